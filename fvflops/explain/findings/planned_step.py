"""A planned step beside the measured one by class of work and by module, and the findings that follow from it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fvflops.explain.explained_trace import ExplainedTrace
from fvflops.explain.findings.finding import Evidence, Finding, Findings, gather_evidence
from fvflops.explain.launch_contexts import KINDS, MODULE, kind_of_op
from fvflops.explain.trace_columns import TraceColumns
from fvflops.plan.rank_plan import RankPlan
from fvflops.plan.step_time.calibration import KernelTimer
from fvflops.plan.step_time.pass_program import Launch, Run
from fvflops.plan.step_time.step_estimate import StepEstimate, divide_rank
from fvflops.plan.step_time.step_program import StepProgram, read_step
from fvflops.text import explaining_arguments, short_repr, shown_by_fields
from fvflops.units import format_seconds, format_share

_OTHERS = ("reduction", "normalisation", "embedding", "elementwise", "copy", "other")
BUBBLE, IDLE, COMMUNICATION = "pipeline bubble and sending", "idle", "exposed communication"
EXPOSED = "exposed_"  # beginning of the codes of findings of exposed collectives
_ROWS = {**KINDS, "memory": "memory-bound kernels"}


@dataclass(frozen=True, slots=True, repr=False)
@shown_by_fields
class ComparedRow:
    """Seconds of a step, expected and measured; `part` is a class of work, a cause of idle time, or a module."""

    part: str
    phase: str
    expected: float
    measured: float

    @property
    def lost(self) -> float:
        """Measured minus expected seconds."""
        return self.measured - self.expected


@dataclass(frozen=True, slots=True, repr=False)
class PlannedStep:
    """The expected seconds of a rank's step by (class, phase) of kernels, and by (module, phase).

    `parts` is code of a finding → its seconds in the plan, "exposed" for all collectives; `macs` are the multiply-adds
    of products. `classes` are the modules of each class in the order of their first calls.
    """

    seconds: float
    kernels: Mapping[tuple[str, str], float]
    modules: Mapping[tuple[str, str], float]
    classes: Mapping[str, tuple[str, ...]]
    parts: Mapping[str, float]
    macs: int
    error: str

    def __repr__(self) -> str:
        return short_repr(self, "", f"{format_seconds(self.seconds)} a step")

    def allowance(self, code: str) -> float:
        """Return the seconds that the plan has for the reason of a finding."""
        return self.parts.get("exposed" if code.startswith(EXPOSED) else code, 0.0)


@explaining_arguments
def expect_step(
    estimate: StepEstimate, rank: int | None = None, *, fused: Collection[str] = (), bucket_cap_mb: float | None = None
) -> PlannedStep:
    """Return the expected seconds of a rank in an estimated step, by default of the slowest, to compare a trace with.

    `fused` and `bucket_cap_mb` are as for `estimate_step`.

    >>> import torch
    >>> from fvflops import estimate_step, plan_step
    >>> from fvflops.zoo import build
    >>> plan = plan_step(build("llama_tiny", device="meta"), torch.ones(1, 16, dtype=torch.int64), mesh={"dp": 1})
    >>> estimate = estimate_step(plan, device="H100")
    >>> expect_step(estimate).seconds == estimate.seconds
    True
    """
    program = read_step(estimate.plans, fused=fused, bucket_cap_mb=bucket_cap_mb)
    timer = KernelTimer(estimate.device, estimate.efficiency)
    ranks = {plan.rank: number for number, plan in enumerate(estimate.plans)}
    index = estimate.slowest if rank is None else ranks.get(rank, estimate.slowest)
    kernels: dict[tuple[str, str], float] = defaultdict(float)
    modules: dict[tuple[str, str], float] = defaultdict(float)
    parts: dict[str, float] = defaultdict(float)
    macs = 0
    for launch, count in _list_launches(program, index):
        seconds = count * timer.seconds(launch.kernel)
        kernels[_class_of(launch), launch.phase] += seconds
        modules[launch.module, launch.phase] += seconds
        if launch.phase == "optimizer":
            parts["unfused_optimizer"] += 0.0 if "_fused_" in launch.op else seconds
        elif launch.kernel.kind == "matmul":
            macs += count * launch.kernel.macs
        elif kind_of_op(launch.op) == "copy":
            parts["copies"] += seconds
    times = divide_rank(program, estimate.simulation, timer, index)
    parts["exposed"] = sum(times["exposed"].values())
    parts["pipeline_bubble"] = times["bubble"] + times["sending"]
    parts["launch_bound"] = times["launching"] + estimate.between
    classes = _list_classes(estimate.plans[index])
    return PlannedStep(estimate.seconds, kernels, modules, classes, parts, macs, estimate.error.text)


def _list_classes(plan: RankPlan) -> dict[str, tuple[str, ...]]:
    """Return the called modules of each class, without FSDP2's prefix, in the order of their first calls."""
    classes: dict[str, dict[str, None]] = defaultdict(dict)
    for action in plan.step.actions:
        if action.kind == "forward" and not action.microbatch:
            recorded = plan.step.pass_of(action)
            trace = recorded.trace
            for event in (trace.events or ())[recorded.begin : recorded.end]:
                region = trace.regions[event.item] if event.kind == "enter" else None
                if region is not None and region.kind == "module" and region.name in trace.modules.by_name:
                    kind = trace.modules.by_name[region.name].class_name.removeprefix("FSDP")
                    classes[kind][region.name] = None
    return {kind: tuple(names) for kind, names in classes.items()}


def _list_launches(program: StepProgram, rank: int) -> Iterator[tuple[Launch, int]]:
    """Yield the kernels of a rank's step, and how often it launches them."""
    for index, times in Counter(index for _, index in program.ranks[rank]).items():
        own = program.programs[index]
        calls = Counter(number for item in own.items if isinstance(item, Run) for number in item.items)
        yield from ((own.launches[number], times * count) for number, count in calls.items())


def _class_of(launch: Launch) -> str:
    if launch.phase == "optimizer":
        return "optimizer"
    kind = launch.kernel.kind
    return "memory" if kind == "memory" else "attention" if kind.startswith("attention") else "matmul"


def compare_step(trace: ExplainedTrace, planned: PlannedStep) -> list[ComparedRow]:
    """Return a step's time by class and phase, expected and measured, the largest loss first; rows add up to it."""
    evidence = gather_evidence(trace)
    measured = measure_kernels(evidence)
    keys = dict.fromkeys([*planned.kernels, *measured])
    rows = [
        ComparedRow(_ROWS[kind], phase, planned.kernels.get((kind, phase), 0.0), measured.get((kind, phase), 0.0))
        for kind, phase in keys
    ]
    pairs = {True: 0.0, False: 0.0}
    for row in evidence.work:
        if row.kind == "communication":
            name = f"{dict(row.details).get('Collective name')} {row.op}".lower()
            pairs["send" in name or "recv" in name] += row.ns
    idle = evidence.seconds(sum(row.ns for row in evidence.idle))
    rows += [
        ComparedRow(COMMUNICATION, "", planned.parts["exposed"], evidence.seconds(pairs[False])),
        ComparedRow(BUBBLE, "", planned.parts["pipeline_bubble"], evidence.seconds(pairs[True])),
        ComparedRow(IDLE, "", planned.parts["launch_bound"], idle),
    ]
    return sorted((row for row in rows if max(row.expected, row.measured) >= 1e-9), key=lambda row: -row.lost)


def measure_kernels(evidence: Evidence) -> dict[tuple[str, str], float]:
    """Return the measured seconds of kernels by the classes of a plan, and phase."""
    measured: dict[tuple[str, str], float] = defaultdict(float)
    for row in evidence.work:
        if row.kind != "communication":
            kind = "optimizer" if row.phase == "optimizer" else row.kind
            kind = "memory" if kind in _OTHERS else "matmul" if kind in ("experts", "convolution") else kind
            measured[kind, row.phase] += evidence.seconds(row.ns)
    return measured


OUTSIDE = "model, outside of its modules"
_LAYER = re.compile(r"(?<![^.])\d+(?![^.])")  # a number between dots
_NUMBERED = re.compile(r"(?:FSDP)?(\w+)_(\d+)")  # FSDP2 changes the names of classes


@dataclass(frozen=True, slots=True)
class ComparedModules:
    """Rows of modules, equal ones of all layers together, the largest loss first; `matched` of the trace's `traced`."""

    rows: tuple[ComparedRow, ...]
    matched: int
    traced: int


def compare_modules(trace: ExplainedTrace, planned: PlannedStep) -> ComparedModules:
    """Return the time of kernels by module and phase, expected and measured, without optimizers and collectives.

    A module's time is without its submodules. Modules of a class that the trace and the plan have in different numbers
    are not matched: each side has rows of its own.
    """
    steps = max(len(trace.steps()), 1)
    measured: dict[tuple[str, str], float] = defaultdict(float)
    expected: dict[tuple[str, str], float] = defaultdict(float)
    names = {timeline.path: match_modules(timeline.columns, planned.classes) for timeline in trace.timelines}
    for timeline, step in trace.steps():
        for row in step.work:
            if row.kind != "communication" and row.phase != "optimizer":
                name = names[timeline.path].get(row.module, row.module)
                name = f"{row.module.rpartition('_')[0]} (not matched)" if name is None else name
                measured[_label(name), row.phase] += row.ns / 1e9 / steps
    for (module, phase), seconds in planned.modules.items():
        if phase != "optimizer":
            expected[_label(module), phase] += seconds
    rows = [ComparedRow(*key, expected[key], measured[key]) for key in {**measured, **expected}]
    known = [name for own in names.values() for name in own.values()]
    rows.sort(key=lambda row: -row.lost)
    return ComparedModules(tuple(rows), sum(name is not None for name in known), len(known))


def _label(module: str) -> str:
    return _LAYER.sub("*", module) or OUTSIDE


def match_modules(columns: TraceColumns, classes: Mapping[str, tuple[str, ...]]) -> dict[str, str | None]:
    """Return a trace's names of modules → names of the plan's, None where unmatched.

    With stacks, torch.profiler numbers the modules of each class by their first call, as `classes` lists them.
    """
    traced: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for name in columns.names.values:
        module = name.removeprefix(MODULE)
        if module != name and (match := _NUMBERED.fullmatch(module)):
            traced[match[1]].append((int(match[2]), module))
    found: dict[str, str | None] = {}
    for kind, modules in traced.items():
        planned = classes.get(kind, ())
        same: list[str | None] = [*planned] if len(planned) == len(modules) else [None] * len(modules)
        found.update(zip((name for _, name in sorted(modules)), same, strict=True))
    return found


_MORE = 1.02  # times the planned multiply-adds


def find_unplanned(evidence: Evidence, planned: PlannedStep) -> Findings:
    """Yield findings of work that the plan does not have."""
    recomputed = [row for row in evidence.work if row.phase == "recompute"]
    ns = sum(row.ns for row in recomputed)
    expected = 1e9 * evidence.steps * sum(time for (_, phase), time in planned.kernels.items() if phase == "recompute")
    if ns > expected:
        text = f"recomputation of activations: {evidence.time(ns)}, planned {evidence.time(expected)}"
        advice = "checkpoint fewer modules, if memory allows: see `fvflops memory`"
        yield evidence.finding("unplanned_recomputation", text, ns - expected, recomputed, advice)
    products = [row for row in evidence.work if row.kind in ("matmul", "convolution", "experts") and row.macs]
    products = [row for row in products if row.phase != "recompute"]
    macs = sum(row.macs or 0 for row in products) / evidence.steps
    if planned.macs and macs > _MORE * planned.macs:
        share = 1 - planned.macs / macs
        more_ns = sum(row.ns for row in products) * share
        numbers = f"{round(macs):,} multiply-adds, planned {planned.macs:,}"
        text = f"products do {format_share(macs / planned.macs - 1)} more work than planned: {numbers}"
        advice = "look for padding in batches, longer sequences, or a model that differs from the plan's"
        yield evidence.finding("more_work", text, more_ns, products, advice)


def find_unexplained(evidence: Evidence, planned: PlannedStep, found: Sequence[Finding]) -> Findings:
    """Yield a finding of the kernels' time over the plan that no other finding explains."""
    measured = measure_kernels(evidence)
    over = sum(measured.values()) - sum(planned.kernels.values())
    left = over - sum(finding.seconds for finding in found if finding.code in _OF_KERNELS)
    losses = {key: seconds - planned.kernels.get(key, 0.0) for key, seconds in measured.items()}
    shown = sorted(losses, key=lambda key: -losses[key])[:3]
    if left > 0 and shown:
        kind, phase = shown[0]
        most, expected = measured[shown[0]], planned.kernels.get(shown[0], 0.0)
        where = f"most in {kind} {phase}: {format_seconds(most)}, expected {format_seconds(expected)}"
        text = f"kernels take {format_seconds(left)} more than planned without a known reason, {where}"
        evidence_rows = tuple(f"{kind} {phase}: {format_seconds(losses[kind, phase])} over" for kind, phase in shown)
        advice = "compare the rows of both sides: other kernels, dtypes or shapes than the plan's"
        yield Finding("slower_than_planned", text, left, evidence_rows, advice, planned.error)


# Findings about kernel time.
_OF_KERNELS = frozenset(
    (
        *("unfused_attention", "float64_products", "float32_without_tf32", "float32_products", "product_loop"),
        *("unaligned_size", "small_batch", "slow_products", "copies", "casts", "unpinned_copies", "host_copies"),
        *("layout_conversions", "zeroing", "indexing", "unfused_optimizer", "unplanned_recomputation", "more_work"),
    )
)
