"""What a network costs in each of the ways to count it, laid side by side."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator

import torch

from fvflops import ActivationCountAnalysis, ByteCountAnalysis, FlopCountAnalysis, Trace, TrainingStepAnalysis, record
from fvflops.analysis.model_analysis import ModelAnalysis
from fvflops.capture.run import record_call
from fvflops.measure.step_meter.call_costs import quiet_log
from fvflops.trace import Status
from tests.support.fuzz.network import Network, Plan
from tests.support.trace_comparison import OPEN, PRICER, WAYS_OF_VIEWS, add_up, differences

_SHOWN = 6  # lines of one comparison
_ABOUT = ("vocabulary", "torch")


def compare(plan: Plan) -> list[str]:
    """Return a line for each thing in which the ways of counting a plan's network differ, or from the hand count.

    An error in one of them is a line too, but one that the network raises where nothing counts is raised.
    """
    return compare_ways(Network(plan))


def compare_ways(network: Network) -> list[str]:
    lines = []
    with warnings.catch_warnings(), quiet_log():
        warnings.simplefilter("ignore")
        for part in (_compare_forward, _compare_training):
            try:
                lines += part(network)
            except Exception as error:
                add_up(network(network.input.detach().requires_grad_())).backward()
                lines.append(f"{part.__name__.removeprefix('_compare_')}: {type(error).__name__}: {error}")
    return lines


def shrink(plan: Plan, fails: Callable[[Plan], object]) -> Plan:
    """Return a plan with as few blocks as still fails."""
    for smaller in plan.smaller():
        if fails(smaller):
            return shrink(smaller, fails)
    return plan


def explain(plan: Plan) -> str:
    """Return what a plan's network disagrees in, on the smallest network that does: a message that replays it."""
    least = shrink(plan, compare)
    return "\n".join(
        [
            f"seed {plan.seed}, shown again by tests.support.fuzz.comparison.explain(Plan({plan.seed})):",
            *compare(least),
            Network(least).describe(),
        ]
    )


def _compare_forward(network: Network) -> Iterator[str]:
    args = (network.input,)
    ways = {
        execution: record_call(network, args, {}, stops_at=PRICER.stops_at, execution=execution)
        for execution in ("shapes", "real")
    }
    yield from _lay_side_by_side("forward", ways["shapes"], ways["real"])
    with torch.no_grad(), record(network) as run:
        network(network.input)
    macs = {name: _macs_by_block(FlopCountAnalysis.from_trace(trace), "forward") for name, trace in ways.items()}
    macs["record"] = _macs_by_block(run, "forward")
    by_hand = {name: made.macs for name, made in network.made.items() if made.macs is not None}
    for way, counted in macs.items():
        for name in network.made:
            expected = by_hand.get(name, macs["real"][name])
            if counted[name] != expected:
                yield f"forward, {way}: {counted[name]} multiply-adds in {name}, not {expected}"
    unknown = {
        entry.op
        for entry in FlopCountAnalysis.from_trace(ways["shapes"]).counts().entries
        if entry.status == Status.UNSUPPORTED
    }
    if unknown:
        yield f"forward: the cost of {sorted(unknown)} is unknown"
    parameters = sum(parameter.numel() for parameter in network.parameters())
    if (told := ways["shapes"].modules.count_parameters()[""]) != parameters:
        yield f"{told} parameters, not {parameters}"


def _compare_training(network: Network) -> Iterator[str]:
    # The input wants a gradient too, so that the first product has both of its own.
    x = network.input.requires_grad_()
    step = TrainingStepAnalysis(network, x, loss=add_up, optimizer=network.optimizer)
    ways = {"step": step.trace(), "recorded by shapes": _record_step(network, "shapes")}
    ways["real"] = _record_step(network, "real")
    for name in ("step", "recorded by shapes"):
        yield from _lay_side_by_side(name, ways[name], ways["real"])
    for way, trace in ways.items():
        macs = _macs_by_block(FlopCountAnalysis.from_trace(trace), "backward")
        for name, made in network.made.items():
            expected = made.backward_macs()
            if expected and macs[name] not in expected:
                yield f"backward, {way}: {macs[name]} multiply-adds in {name}, not {expected}"


def _record_step(network: Network, execution: str) -> Trace:
    made = network.optimizer and network.optimizer(network.parameters())
    with record(network, execution=execution) as run:
        add_up(network(network.input)).backward()
        if made is not None:
            made.step()
    for parameter in (*network.parameters(), network.input):
        parameter.grad = None
    return run.trace()


def _lay_side_by_side(way: str, trace: Trace, real: Trace) -> Iterator[str]:
    exact = differences(trace, real, about=_ABOUT)
    lines = differences(trace, real, about=_ABOUT, other_ways=WAYS_OF_VIEWS) if exact else []
    yield from (f"{way}: {line}" for line in lines[:_SHOWN])
    if len(lines) > _SHOWN:
        yield f"{way}: and {len(lines) - _SHOWN} more"
    if exact:
        return
    for analysis in (ActivationCountAnalysis, ByteCountAnalysis):
        one, other = (_values(analysis.from_trace(item)) for item in (trace, real))
        for name, place, phase in sorted(key for key in {*one, *other} if one[key] != other[key]):
            told = f"{one[name, place, phase]} and {other[name, place, phase]}"
            yield f"{way}: {analysis.__name__} of {name} in {place!r}, {phase}: {told}"


def _values(analysis: ModelAnalysis) -> Counter[tuple[str, str, str]]:
    """Return (op, module, phase) → what is counted, without the ops of which a real run alone knows all sizes."""
    values = Counter()
    for entry in analysis.counts().entries:
        if entry.op not in OPEN:
            values[entry.op, entry.scope[-1] if entry.scope else "", entry.phase] += entry.value
    return values


def _macs_by_block(analysis: FlopCountAnalysis, phase: str) -> Counter[str]:
    macs = Counter()
    for entry in analysis.counts().entries:
        if entry.scope and entry.phase == phase:
            macs[entry.scope[-1].partition(".")[0]] += entry.macs
    return macs
