"""Report of an estimated training step: does it fit, how long does it take, and where the time goes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fvflops.devices.devices import Device
from fvflops.devices.measured_errors import describe_verdicts
from fvflops.garbage_collector import gc_paused
from fvflops.plan.communication import Communication
from fvflops.plan.memory.cuda_allocator import reserved_memory
from fvflops.plan.memory.memory_report import memory_chart
from fvflops.plan.memory.step_settings import Verdict, introduction
from fvflops.plan.step_time.calibration import Network
from fvflops.plan.step_time.step_estimate import StepEstimate, TrainingCost
from fvflops.plan.step_time.step_tables import (
    RankMemory,
    encode,
    module_table,
    name_of,
    pipeline_picture,
    read_memories,
)
from fvflops.reports.document import Document, Items, Part, Table, data_only, number_column, text_column
from fvflops.reports.escaping import list_ops, plain_name
from fvflops.trace import PHASES, Status
from fvflops.trace.records import list_run_notes
from fvflops.units import (
    format_bytes,
    format_parameters,
    format_quantity,
    format_ratio,
    format_seconds,
    format_share,
    format_short,
    format_thousands,
)

_HOST_BOUND = 0.5  # share of a pass that waits for the host
_FUSED_OPTIMIZERS = ("aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad")
_NOTED_WAIT = 0.05  # share of a step


@gc_paused()
def estimate_report(
    estimate: StepEstimate,
    *,
    name: str = "",
    cost: TrainingCost | None = None,
    measured: float | None = None,
    command: str = "",
    finder: str = "",
    pictures: bool = False,
    **modules: Any,
) -> Document:
    """Return the report of an estimated step of the model `name`.

    `cost` is a whole training's, `measured` the seconds that a real step took, `command` the command line of the
    report, and `finder` a command that finds how to lower the peak memory. `modules` are options of
    `module_table`. With `pictures` it has the pipeline of any number of ranks, and memory curves. A measured time whose
    MFU is above 1 raises ValueError.
    """
    memories = read_memories(estimate.plans)
    peak_rank = max(memories, key=lambda memory: memory.reserved)
    judged = estimate.device, peak_rank.plan.mesh
    verdict = judge(peak_rank.reserved, *judged, advice=_advise(finder), tensors=peak_rank.timeline.peak)
    texts, about = introduction(verdict, estimate.settings, command)
    parts: list[Part] = [
        *texts,
        *_describe_host(estimate),
        _describe_run(estimate),
        *([] if measured is None else [_describe_measured(estimate, measured)]),
        _tabulate_step(estimate),
        *([] if cost is None else [_tabulate_cost(cost)]),
        _tabulate_size(estimate, peak_rank),
        _tabulate_memory(peak_rank, estimate),
    ]
    if len(estimate.plans) > 1:
        parts.append(_tabulate_ranks(estimate, memories, peak_rank))
    if len(estimate.plans) > 1 or pictures:
        parts.append(pipeline_picture(estimate))
    parts += [_tabulate_time(estimate), _tabulate_communication(estimate)]
    parts.append(module_table(estimate, **modules))
    if pictures:
        parts += _draw_memory(memories, peak_rank)
    parts += _list_unsupported(estimate)
    parts.append(Items("Assumptions:", [f"{text[:1].upper()}{text[1:]}." for text in estimate.assumptions]))
    mesh = ", ".join(f"{axis}={size}" for axis, size in estimate.plans[0].mesh.items())
    model = plain_name(name or estimate.plans[0].trace.modules.root.class_name)
    title = f"{model} on {mesh}: {format_seconds(estimate.seconds)} a step, MFU {format_share(estimate.mfu)}"
    about["host_bound"] = {
        "forward_is_bound": estimate.host_bound.get("forward", 0.0) > _HOST_BOUND,
        "share_waiting": estimate.host_bound,
        "launch_overhead": estimate.efficiency.launch,
        "source": estimate.efficiency.source,
    }
    about |= {} if measured is None else {"measured": {"seconds": measured, **_utilisations(estimate, measured)}}
    data = {**encode(estimate, memories, cost), "fits": verdict.fits, "error": estimate.error._asdict()}
    return Document("step_estimate", title, parts, main="step", data=data, about=about)


estimate_page = partial(estimate_report, pictures=True)  # for a notebook


def judge(
    nbytes: int, device: Device, mesh: Mapping[str, int], *, advice: str = "", tensors: int | None = None
) -> Verdict:
    """Return whether bytes reserved for the `tensors` of each rank of a mesh fit a device."""
    reserve = device.reserve(mesh)
    reserved_for = f"the device's context{' and NCCL' * (reserve > device.reserve())}" if reserve else ""
    if device.memory is None and device.note:
        advice = f"It is {device.note}."
    return Verdict(nbytes, device.name, device.memory, reserve, reserved_for, advice, tensors)


def _describe_host(estimate: StepEstimate) -> Iterator[str]:
    """Yield that the host bounds the forward pass or the optimizer, if kernels take less time than their launches."""
    share = estimate.host_bound.get("optimizer", 0.0)
    is_fused = any(item.op.startswith(_FUSED_OPTIMIZERS) for item in estimate.plans[0].recorded.signatures)
    if share > _HOST_BOUND and estimate.host_bound_share > _NOTED_WAIT and not is_fused:
        yield (
            f"The host bounds the optimizer: {format_share(share)} of its step waits for launches of kernels, several "
            "for each parameter. With fused=True, as --optimizer 'AdamW(fused=True)', one kernel updates many."
        )
    share = estimate.host_bound.get("forward", 0.0)
    if share > _HOST_BOUND:
        source = estimate.efficiency.source.rpartition("; ")[2]
        yield (
            f"The host bounds the forward pass: {format_share(share)} of it waits for the host. Launch overhead: "
            f"{format_seconds(estimate.efficiency.launch)} an op. {source[:1].upper()}{source[1:]}."
        )


def _advise(command: str) -> str:
    finder = f"`{command}`, with the same options," if command else "`plan_savings`"
    return f"More ranks along fsdp, tp or pp, or smaller microbatches, lower it; {finder} finds what else does."


def _describe_run(estimate: StepEstimate) -> str:
    first = estimate.plans[0]
    microbatches = sum(action.kind == "forward" and action.stage == 0 for action in first.step.actions)
    schedule = f" (schedule {first.step.schedule})" if first.step.schedule else ""
    return (
        f"A training step on {format_thousands(estimate.gpus)} × {estimate.device.name}. Inputs of a rank: "
        f"{plain_name(first.trace.info.inputs)}, {format_quantity(microbatches, 'microbatch')}{schedule}."
    )


def _utilisations(estimate: StepEstimate, seconds: float) -> dict[str, float]:
    return {name: getattr(estimate, name) * estimate.seconds / seconds for name in ("mfu", "hfu")}


def _describe_measured(estimate: StepEstimate, seconds: float) -> str:
    utilisations = _utilisations(estimate, seconds)
    shares = {name: format_share(share) for name, share in utilisations.items()}
    if utilisations["mfu"] > 1:
        raise ValueError(
            f"MFU would be {shares['mfu']} at {format_seconds(seconds)} a step: check the time, the device, the "
            "number of ranks, the precision and the batch"
        )
    return (
        f"Measured: {format_seconds(seconds)} a step, MFU {shares['mfu']}, HFU {shares['hfu']}, "
        f"{format_ratio(seconds / estimate.seconds)} times the time that is estimated below."
    )


_METRIC = tuple(replace(text_column("metric"), only_for=reader) for reader in ("people", "data"))
# A row of the main table: its key and name, its value, that at an efficiency of 1, how both are shown, and their unit.
_Figure = tuple[str, str, float, float | None, Callable[[Any], str], str]


def _list_figures(estimate: StepEstimate) -> Iterator[_Figure]:
    faster = estimate.seconds / estimate.bound
    yield "seconds", "step time", estimate.seconds, estimate.bound, format_seconds, "s"
    rate = estimate.tokens_per_second
    what = "samples" if rate is None else "tokens"
    rate = estimate.samples_per_second if rate is None else rate
    yield f"{what}_per_second", f"{what}/s", rate, rate * faster, format_short, f"{what}/s"
    each = rate / estimate.gpus
    yield f"{what}_per_second_per_gpu", f"{what}/s per GPU", each, each * faster, format_short, f"{what}/s"
    flops = estimate.model_flops_per_second
    in_tera = ("model_flops_per_second", "model TFLOP/s per GPU", flops, flops * faster)
    yield *in_tera, lambda x: format_ratio(x / 1e12), "FLOP/s"
    yield "mfu", "MFU", estimate.mfu, estimate.mfu * faster, format_share, ""
    yield "hfu", "HFU", estimate.hfu, estimate.hfu * faster, format_share, ""
    if len(estimate.plans) > 1:
        yield "bubble_share", "pipeline bubble", estimate.bubble_share, None, format_share, ""
    if estimate.gpus > 1:
        yield "exposed_share", "exposed communication", estimate.exposed_share, None, format_share, ""
    yield "host_bound_share", "waiting for the host", estimate.host_bound_share, None, format_share, ""


def _tabulate_step(estimate: StepEstimate) -> Table:
    columns = (
        *_METRIC,
        number_column("shown", "estimate", form=str, only_for="people"),
        number_column("bound_shown", "at efficiency 1", form=str, only_for="people"),
        *data_only((number_column("value"), number_column("bound"), text_column("unit")), ("value", "bound", "unit")),
    )
    rows = [
        (name, key, form(value), None if bound is None else form(bound), value, bound, unit)
        for key, name, value, bound, form, unit in _list_figures(estimate)
    ]
    return Table("step", columns, rows, notes=list(_describe_basis(estimate)), noun="metric")


def _describe_basis(estimate: StepEstimate) -> Iterator[str]:
    yield f"Efficiency of {estimate.device.name}: {estimate.efficiency.source}."
    yield estimate.error.text
    if estimate.network is not None:
        yield f"Network {estimate.network.name}: {estimate.network.source}."
    yield "Efficiency 1: kernels at the device's peaks, no launch overhead; the same network. No step is faster."
    if estimate.gpus > 1:
        pipeline = "Pipeline bubble: mean of the ranks. " if len(estimate.plans) > 1 else ""
        yield f"{pipeline}Exposed communication and waiting for the host: of the slowest rank."
    yield (
        "MFU: forward and backward passes, 2 FLOPs a multiply-add, all pairs of masked attention, no recomputation; "
        "HFU: all FLOPs, with what checkpoints and the backward pass of flash attention recompute."
    )
    faster = estimate.seconds / estimate.bound
    if estimate.mfu * faster > 1 and estimate.mfu_of_unmasked < estimate.mfu:
        yield (
            "MFU and HFU exceed 100 %, since they count all pairs of masked attention and kernels skip masked ones. "
            f"The MFU of the unmasked pairs is {format_share(estimate.mfu_of_unmasked)}, at efficiency 1 "
            f"{format_share(estimate.mfu_of_unmasked * faster)}."
        )


def _tabulate_cost(cost: TrainingCost) -> Table:
    shown = number_column("shown", "value", form=str, only_for="people")
    columns = (*_METRIC, shown, number_column("value", only_for="data"))
    rows = [
        ("tokens", "tokens", format_short(cost.tokens), cost.tokens),
        ("steps", "steps", format_thousands(round(cost.steps)), cost.steps),
        ("days", "days", format_ratio(cost.days), cost.days),
        ("GPU hours", "gpu_hours", format_thousands(round(cost.gpu_hours)), cost.gpu_hours),
    ]
    notes = ["Without restarts, evaluation and checkpoints, and at this step time throughout."]
    if cost.cost is not None:
        label = f"cost, {cost.price:g} per GPU hour"
        rows.append((label, "cost", format_thousands(round(cost.cost)), cost.cost))
    if cost.energy is not None:
        label = f"MWh, {cost.watts:g} W per GPU"
        rows.append((label, "energy_kwh", format_ratio(cost.energy / 1000), cost.energy))
        notes.append("The power is as given, of GPUs alone: no host, network or cooling.")
    return Table("training", columns, rows, title="The whole training", notes=notes, noun="metric")


def _tabulate_size(estimate: StepEstimate, peak_rank: RankMemory) -> Table:
    rows = [
        ("model parameters", format_parameters(peak_rank.plan.model_parameters)),
        ("of the peak-memory rank", format_parameters(peak_rank.plan.parameters)),
        ("model FLOPs, per GPU", format_short(estimate.model_flops)),
        ("samples, all GPUs", format_thousands(estimate.samples)),
    ]
    if estimate.tokens is not None:
        rows.append(("tokens, all GPUs", format_thousands(estimate.tokens)))
    columns = (text_column("size", "one step"), number_column("value", form=str))
    return Table("size", columns, rows, noun="size")


def _tabulate_memory(peak_rank: RankMemory, estimate: StepEstimate) -> Table:
    memory, reserve = estimate.device.memory, estimate.device.reserve(peak_rank.plan.mesh)
    columns = (
        text_column("memory"),
        number_column("bytes", "at the peak", form=format_bytes),
        number_column("share", "of the device", form=format_share),
    )
    kinds = {**peak_rank.by_kind, "fragmentation": peak_rank.reserved - peak_rank.timeline.peak}
    rows = [(kind, nbytes, None if memory is None else nbytes / memory) for kind, nbytes in kinds.items()]
    total = ("total", peak_rank.reserved, None if memory is None else peak_rank.reserved / memory)
    notes = [f"Estimated: {part}." for part in peak_rank.plan.estimated_memory]
    otherwise = format_bytes(reserved_memory(peak_rank.timeline).peak)
    notes += [
        "Fragmentation: memory that torch's allocator reserves beyond the tensors, simulated with expandable segments; "
        f"without them the total is {otherwise}.",
        f"Not included: the device's context and buffers of NCCL, for which {format_bytes(reserve)} are set aside.",
        describe_verdicts(),
    ]
    title = f"Memory of the rank with the highest peak, {name_of(peak_rank.plan)}"
    return Table("memory", columns, rows, title=title, total=total, notes=notes, noun="kind")


def _tabulate_ranks(estimate: StepEstimate, memories: Sequence[RankMemory], peak_rank: RankMemory) -> Table:
    columns = (
        text_column("rank"),
        text_column("stages"),
        number_column("parameters", form=format_parameters),
        number_column("busy", form=format_seconds),
        number_column("idle", "bubble", form=format_share),
        number_column("peak", "peak memory", form=format_bytes),
        text_column("note"),
    )
    rows = []
    for index, (memory, spans) in enumerate(zip(memories, estimate.simulation.spans, strict=True)):
        busy, plan = sum(span.end - span.start for span in spans), memory.plan
        bubble, stages = 1 - busy / estimate.simulation.seconds, ", ".join(map(str, plan.step.stages))
        marks = ["slowest"] * (index == estimate.slowest) + ["peak memory"] * (memory is peak_rank)
        rows.append((name_of(plan), stages, plan.parameters, busy, bubble, memory.reserved, ", ".join(marks)))
    return Table("ranks", columns, rows, title="Ranks of the pipeline", noun="rank")


def _tabulate_time(estimate: StepEstimate) -> Table:
    columns = (
        text_column("time"),
        number_column("seconds", "time", form=format_seconds),
        number_column("share", "of the step", form=format_share),
    )
    phases = [phase for phase in PHASES if estimate.by_phase.get(phase)]
    rows: list[tuple[str, float]] = [(f"kernels, {phase}", estimate.by_phase[phase]) for phase in phases]
    rows += [(f"waits for {axis}", seconds) for axis, seconds in estimate.exposed.items() if seconds]
    rows += [("waits for the host", estimate.launching)] if estimate.launching else []
    if len(estimate.plans) > 1:
        rows += [("sends to stages", estimate.sending), ("waits for stages", estimate.bubble)]
    rows += [("between steps", estimate.between)] if estimate.between else []
    shares = [(what, seconds, seconds / estimate.seconds) for what, seconds in rows]
    title = f"Time of the slowest rank, {name_of(estimate.plans[estimate.slowest])}"
    return Table("time", columns, shares, title=title, total=("total", estimate.seconds, 1.0), noun="part")


def _tabulate_communication(estimate: StepEstimate) -> Table:
    columns = (
        text_column("axis", "collectives over"),
        number_column("nodes", form=format_thousands),
        number_column("calls", form=format_thousands),
        number_column("payload", form=format_bytes),
        number_column("seconds", "time", form=format_seconds),
        number_column("exposed", form=format_seconds),
        number_column("share", "of the step", form=format_share),
    )
    plan = estimate.plans[estimate.slowest]
    communication = plan.communication()
    volumes = communication.by_axis()
    nodes = _count_nodes(communication, estimate.network)
    rows = []
    for axis, seconds in estimate.communication.items():
        calls, payload, _ = volumes.get(axis, (None, None, None))
        exposed = estimate.exposed.get(axis, 0.0)
        rows.append((axis, nodes.get(axis), calls, payload, seconds, exposed, exposed / estimate.seconds))
    notes = ["Exposed: the compute stream waits for a collective, for its launch too."]
    if nodes.get("tp", 1) > 1 and estimate.network is not None and plan.mesh["tp"] <= estimate.network.gpus_per_node:
        notes.append("tp crosses nodes: name it last in the mesh, so that its ranks are adjacent.")
    notes += [f"Estimated: {rule}." for rule in plan.derived]
    title = f"Communication of the slowest rank, {name_of(plan)}"
    return Table("communication", columns, rows, title=title, notes=notes, noun="axis")


def _count_nodes(communication: Communication, network: Network | None) -> dict[str, int]:
    """Return axis → the most nodes that the ranks of one of its groups are in, {} without a network."""
    nodes: dict[str, int] = {}
    for group in {transfer.group for transfer in communication.transfers}:
        if group is not None and network is not None:
            axis = group.axis or group.name
            nodes[axis] = max(nodes.get(axis, 0), network.span(group)[0])
    return nodes


def _draw_memory(memories: Sequence[RankMemory], peak_rank: RankMemory) -> Iterator[Part]:
    distinct = {id(memory.timeline): memory for memory in (peak_rank, memories[0], memories[-1])}
    for memory in distinct.values():
        chart = memory_chart(memory.timeline)
        if any(chart.totals()):
            title = f"Memory of {name_of(memory.plan)} over the ops of its step, in bytes by kind"
            yield replace(chart, name=f"memory {name_of(memory.plan)}", title=title)


def _list_unsupported(estimate: StepEstimate) -> Iterator[Part]:
    unsupported = Counter[str]()
    for plan in estimate.plans:
        unsupported |= Counter(plan.flops().counts().ledger()[Status.UNSUPPORTED])
    if unsupported:
        yield f"Unsupported, so not in the FLOPs: {list_ops(dict(unsupported.most_common()))}."
    yield from list_unknown(estimate.unknown, estimate.bytes_only)
    notes = [note for plan in estimate.plans for note in list_run_notes(plan.trace.about, plain_name)]
    yield Items("", list(dict.fromkeys(notes)))


def list_unknown(unknown: Mapping[str, int], bytes_only: Mapping[str, int]) -> Iterator[str]:
    """Yield a sentence for the ops of unknown time, and one for the ops of unknown FLOPs: op → calls.

    >>> list(list_unknown({"mine::scan": 2}, {}))
    ['Time unknown, so not in the step: mine::scan (2 calls).']
    """
    if unknown:
        yield f"Time unknown, so not in the step: {list_ops(unknown)}."
    if bytes_only:
        yield f"FLOPs unknown, so timed by their bytes: {list_ops(bytes_only)}."
