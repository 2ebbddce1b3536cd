"""List and select the op calls and module calls of a Trace, each with its cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any

from fvflops.counting.count_trace import CostModel
from fvflops.counting.nested_timeline import build_timeline
from fvflops.counting.traffic.byte_costs import split_by_aliasing
from fvflops.formulas import FormulaTable
from fvflops.text import nearest
from fvflops.trace import PHASES, Event, Trace, check_phase
from fvflops.trace.calls import LineCount, ModuleCall, OpCall, packet_of
from fvflops.trace.module_tree import innermost
from fvflops.trace.timeline import Callee, Span


def list_op_calls(trace: Trace, cost_model: CostModel, activations: CostModel | None = None) -> tuple[OpCall, ...]:
    """Return the op calls of a Trace in start order; an aggregated Trace raises TraceError.

    `cost_model` gives FLOPs and multiply-adds, `activations` the activations. A module or function that is counted as
    a whole has an entry too, before the ops inside it.
    """
    trace, traffic_model = split_by_aliasing(trace, keep_events=True)
    memory_is_measured = "memory" in trace.info.measured
    scopes = trace.scopes()
    writers: dict[int, int] = {}  # storage → the call that last wrote to it
    calls_of_op: Counter[str] = Counter()
    calls: list[OpCall] = []
    for span, item, covered, activated, _ in _annotate(trace, cost_model, traffic_model, activations):
        event = span.event if item.kind == "op" else None
        if event is None and (not item.status or covered):
            continue
        op, target, name = _name_call(trace, item)
        scope = scopes[span.event.stack] + ((item.name,) if item.kind == "module" else ())
        columns: dict[str, Any] = {}
        if event is not None:  # a region's time and memory are listed at its ops
            reads, producers = _find_producers(trace, event, len(calls), writers)
            columns = {"duration_ns": event.duration_ns, "nbytes": item.nbytes, "parameters": reads, "after": producers}
            if event.line is not None:
                columns["line"] = trace.lines[event.line]
            if memory_is_measured:
                names = ("memory_before", "memory_after", "memory_peak")
                columns |= {name: getattr(event, name) for name in names}
        unique_name = f"{name}_{calls_of_op[op]}" if calls_of_op[op] else name
        first_fields = len(calls), unique_name, op, target, innermost(scope), span.event.phase
        counted = ("covered", 0, 0, 0) if covered else (item.status, item.flops, item.macs, activated)
        status, flops, columns["macs"], columns["activations"] = counted
        calls.append(OpCall(*first_fields, item.inputs, item.outputs, item.dtype, status, flops, **columns))
        calls_of_op[op] += 1
    return tuple(calls)


def list_module_calls(
    trace: Trace, cost_model: CostModel, activations: CostModel | None = None
) -> tuple[ModuleCall, ...]:
    """Return the module calls of a Trace in start order; an aggregated Trace raises TraceError.

    A call includes everything called inside it; neither backward passes nor optimizers call modules. `cost_model` gives
    FLOPs and multiply-adds, `activations` the activations.
    """
    trace, traffic_model = split_by_aliasing(trace, keep_events=True)
    elements = trace.modules.count_parameters()
    calls: list[ModuleCall] = []
    # Per thread of each rank: index and depth of the open calls.
    opened: dict[tuple[int, int], list[tuple[int, int]]] = {}
    ops: Counter[int] = Counter()
    for span, item, _, _, activations_inside in _annotate(trace, cost_model, traffic_model, activations):
        enclosing = opened.setdefault(span.track, [])
        while enclosing and enclosing[-1][1] >= span.depth:
            enclosing.pop()
        if item.kind == "module":
            enclosing.append((len(calls), span.depth))
            class_name, depth = trace.modules.by_name[item.name].class_name, len(enclosing) - 1
            first_fields = len(calls), item.name, class_name, span.event.phase, depth, item.inputs, item.outputs
            sums = span.flops, span.macs, activations_inside, span.nbytes, span.unsupported
            calls.append(ModuleCall(*first_fields, elements[item.name], 0, *sums))
        elif item.kind == "op":
            ops.update([number for number, _ in enclosing])
    return tuple([call._replace(ops=ops[call.number]) for call in calls])


def sum_lines(calls: Iterable[OpCall]) -> tuple[LineCount, ...]:
    """Return the sums of op calls by source line, most FLOPs first."""
    by_line: dict[str, list[OpCall]] = {}
    for call in calls:
        by_line.setdefault(call.line, []).append(call)
    lines = []
    for line, on_line in by_line.items():
        names = ("flops", "macs", "activations", "nbytes")
        flops, macs, activations, nbytes = (sum(getattr(call, name) or 0 for call in on_line) for name in names)
        counted = None if on_line[0].activations is None else activations
        unsupported = sum(call.flops is None for call in on_line)
        lines.append(LineCount(line, len(on_line), flops, macs, counted, nbytes, unsupported))
    return tuple(sorted(lines, key=lambda line: -line.flops))


def _annotate(
    trace: Trace, cost_model: CostModel, traffic_model: CostModel, activations: CostModel | None
) -> Iterator[tuple[Span, Callee, bool, int | None, int | None]]:
    """Yield each span, its callee, whether a caller is counted as a whole, and its own and inclusive activations."""
    timeline = build_timeline(trace, cost_model, traffic_model=traffic_model)
    spans = timeline.require_spans()
    activated: Iterable[tuple[int | None, int | None]] = repeat((None, None))
    if activations is not None:
        counted = build_timeline(trace, activations)
        activated = [(counted.callees[span.callee].flops, span.flops) for span in counted.require_spans()]
    for span, (own, inside) in zip(spans, activated, strict=False):
        item = timeline.callees[span.callee]
        yield span, item, (span.event.stack, span.event.phase) in timeline.covered, own, inside


def _find_producers(
    trace: Trace, event: Event, number: int, writers: dict[int, int]
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the parameters that a call reads and the calls that produced its other inputs; record its writes.

    A call that returns a view does not write to the storage.
    """
    storages = trace.storages
    named = [storages[index].name for index in event.reads if storages[index].origin in ("parameter", "buffer")]
    after = sorted({writers[index] for index in event.reads if index in writers})
    writes_in_place = "!" in trace.signatures[event.item].schema
    for index in event.writes:
        if writes_in_place or index not in event.reads:
            writers[index] = number
    return tuple(dict.fromkeys(named)), tuple(after)


def _name_call(trace: Trace, item: Callee) -> tuple[str, str, str]:
    if item.kind == "module":
        module = trace.modules.by_name[item.name]
        return module.class_name, module.classes[0] if module.classes else module.class_name, module.class_name
    if item.frame is not None:
        return f"prim::PythonOp.{item.name}", f"prim::PythonOp.{item.name}", item.name
    op = packet_of(item.name)
    return op, item.name if item.name != op else f"{op}.default", op.rpartition("::")[2]


def select_calls(
    calls: Sequence[OpCall], phase: str | None, ignore: Collection[str], table: FormulaTable | None = None
) -> tuple[tuple[OpCall, ...], Counter[str]]:
    """Return the op calls of a phase, without the ops in `ignore`, and op → number of ignored calls.

    A name in `ignore` that is neither an op that ran nor a row of the table raises ValueError with the closest match.
    """
    present = {call.phase for call in calls}
    if phase is not None:
        check_phase(phase, tuple(name for name in PHASES if name in present))
    calls = [call for call in calls if phase in (None, call.phase)]
    names = {_full_name(name, table, calls) for name in ([ignore] if isinstance(ignore, str) else ignore)}
    selected = tuple(call for call in calls if not names.intersection((call.op, call.target)))
    return selected, Counter(call.op for call in calls if names.intersection((call.op, call.target)))


def _full_name(name: str, table: FormulaTable | None, calls: Collection[OpCall]) -> str:
    """Return an op's full name; an unknown op raises ValueError."""
    ran = {op for call in calls for op in (call.op, call.target)}
    full = name if "::" in name or name in ran else f"aten::{name}"
    if full in ran:
        return full
    known = set(ran) if table is None else {*ran, *table.rows}
    packet = packet_of(full)
    if full in known or (packet in known and packet not in ran):  # a valid op that did not run here
        return full
    raise ValueError(f"no op is named {name!r}: did you mean {nearest(full, sorted(known), cutoff=0)!r}?")
