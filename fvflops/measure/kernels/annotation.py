"""Annotate a chrome trace that torch.profiler wrote earlier, possibly in another process, with a model's counts."""

from __future__ import annotations

import ast
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.analysis.table_examples import NotRunnable, overloads_of
from fvflops.capture.errors.model_check import trace_of
from fvflops.capture.recorder.tensor_specs import describe_call
from fvflops.counting import TableCostModel
from fvflops.counting.count_trace import CostModel
from fvflops.counting.traffic.byte_costs import TrafficCostModel
from fvflops.formulas import FormulaTable, resolve_table
from fvflops.measure.kernels import kernel_table
from fvflops.measure.kernels.kernel_sums import KernelAverages, sum_kernels
from fvflops.measure.kernels.matching import KernelMatch, match_kernels
from fvflops.measure.kernels.profiler_trace import (
    ChromeTrace,
    TraceEvents,
    annotate,
    has_kernels,
    read_document,
    read_events,
    write_document,
)
from fvflops.measure.kernels.recorded_calls import NO_WORK, Work, add_works, work_of
from fvflops.reports.display import Displayed
from fvflops.reports.document import Document, Items, Part, Table, Value, number_column, text_column
from fvflops.text import short_repr
from fvflops.trace import Signature, Status, Trace, TraceError
from fvflops.trace.kernel_events import KernelRow
from fvflops.units import flops_to_string, format_percent, format_quantity, format_seconds, format_size

# "Input type" → dtype; torch.profiler writes the names of C++.
_DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "long int": torch.int64,
    "long": torch.int64,
    "int": torch.int32,
    "short": torch.int16,
    "short int": torch.int16,
    "signed char": torch.int8,
    "unsigned char": torch.uint8,
    "bool": torch.bool,
    "c10::Half": torch.float16,
    "c10::BFloat16": torch.bfloat16,
    "c10::Float8_e4m3fn": torch.float8_e4m3fn,
    "c10::Float8_e5m2": torch.float8_e5m2,
    "c10::complex<float>": torch.complex64,
    "c10::complex<double>": torch.complex128,
}
# A list of tensors is recorded without their dtype.
_LIST_DTYPE = torch.float32


class _Unreadable(ValueError):
    """A recorded argument that is not understood."""


class ShapeCosts:
    """Costs of the op events of a chrome trace by their "Input Dims", "Input type" and "Concrete Inputs".

    A call is repeated on the meta device, for the shapes of its results. An argument that torch.profiler does not
    record, such as a string, has its default. None is the cost of an op without a formula, or of unreadable arguments.
    """

    def __init__(
        self, events: Sequence[tuple[str, Mapping[str, Any]]], table: FormulaTable, cost_model: CostModel
    ) -> None:
        self._events = events
        self._table = table
        self._cost_model = cost_model
        self._traffic = TrafficCostModel()
        self._signatures: dict[tuple[str, str], Signature | None] = {}

    def work(self, event_index: int) -> Work | None:
        """Return the work of an event; None if unknown."""
        name, args = self._events[event_index]
        row = self._table.row(name)
        if row is None or row.kind == "decompose":
            return None
        signature = self._sign(name, args)
        return None if signature is None else work_of(self._cost_model.op_cost(signature))

    def nbytes(self, event_index: int) -> int | None:
        """Return the bytes that an event reads and writes; None if unknown."""
        signature = self._sign(*self._events[event_index])
        if signature is None:
            return None
        (cost,) = self._traffic.op_cost(signature)
        return None if cost.status is Status.UNSUPPORTED else cost.value

    def _sign(self, name: str, args: Mapping[str, Any]) -> Signature | None:
        if "Input Dims" not in args or "Input type" not in args:
            return None
        inputs = args["Input Dims"], args["Input type"], args.get("Concrete Inputs")
        key = name, str(inputs)
        if key not in self._signatures:
            self._signatures[key] = _sign(name, *inputs)
        return self._signatures[key]


def _sign(name: str, dims: Sequence[Any], types: Sequence[str], concrete: Sequence[str] | None) -> Signature | None:
    """Return the signature of a call by the first overload that accepts its arguments, None if there is none."""
    try:
        overloads = overloads_of(name)
    except NotRunnable:
        return None
    for overload in overloads:
        arguments = overload._schema.arguments
        # The out= variant of an op has its results as further arguments.
        if len(types) < len(arguments) or not all(type in _DTYPES for type in types[len(arguments) :]):
            continue
        texts = [""] * len(types) if concrete is None else concrete
        try:
            values = [_read(*item) for item in zip(arguments, dims, types, texts, strict=False)]
            with torch.no_grad():
                named = {argument.name: value for argument, value in zip(arguments, values, strict=True)}
                return describe_call(overload, (), named, overload(**named))
        except (_Unreadable, RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            continue  # another overload may accept them
    return None


def _read(argument: Any, dims: Any, type: str, text: str) -> Any:
    """Return an argument as recorded; tensors are on the meta device."""
    kind = str(argument.type)
    if type == "TensorList":
        return [torch.empty(shape, dtype=_LIST_DTYPE, device="meta") for shape in dims]
    if "Tensor" in kind:
        if type in _DTYPES:
            return torch.empty(dims, dtype=_DTYPES[type], device="meta")
        if kind.startswith("Optional") and type == "":
            return None
        raise _Unreadable(type)
    if type in _DTYPES:
        raise _Unreadable(type)  # a tensor for an argument that is none
    if kind.startswith("Optional[Generator") or kind == "Device" or kind == "Optional[Device]":
        return torch.device("meta") if "Device" in kind else None
    if not text:
        if type == "" and kind.startswith("Optional"):
            return None
        if argument.has_default_value():
            return argument.default_value
        raise _Unreadable(kind)
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        if kind in ("str", "Optional[str]"):
            return text
        if text in ("inf", "-inf", "nan"):
            return float(text)
        raise _Unreadable(text) from None


@dataclass(frozen=True, slots=True, repr=False)
class AnnotatedTrace(Displayed):
    """A chrome trace with the modules, MACs, FLOPs and bytes of its events.

    `match` has them for each event, `rank` is that of a distributed process, None for any other. FLOPs are 2 per
    multiply-add and all other operations; `table` says which ops count.
    """

    _report = "fvflops.measure.kernels.annotation:describe_annotation"

    path: str
    match: KernelMatch
    table: FormulaTable
    events: TraceEvents
    document: ChromeTrace

    def __repr__(self) -> str:
        return short_repr(self, os.path.basename(self.path), self.about()[0])

    @property
    def rank(self) -> int | None:
        """Rank of the process, None if it was not distributed."""
        return self.events.rank

    def share(self) -> float | None:
        """Return the share of the recorded FLOPs, 0 to 1, whose ops have an event; None without a model."""
        ledger = self.match.ledger
        return ledger.landed_flops / ledger.recorded_flops if ledger.recorded_flops else None

    def work(self) -> Work:
        """Return the MACs and FLOPs of all events: the sums of the rows' `self_macs` and `self_flops`."""
        return add_works(self.match.self_work) or NO_WORK

    def key_averages(self, group_by_input_shape: bool = False, *, group_by_module: bool = False) -> KernelAverages:
        """Return a row for all events of one name, as torch.profiler does; shapes need record_shapes=True."""
        rows = sum_kernels(self.match, by_module=group_by_module, by_shape=group_by_input_shape)
        return KernelAverages(rows, "\n".join(self.about()))

    def about(self) -> list[str]:
        """Return a summary in lines: the steps, their FLOPs and FLOP/s, and what could not be matched."""
        steps, nanoseconds = self.match.clock()
        ledger = self.match.ledger
        flops = self.work().flops
        each = f"{format_seconds(nanoseconds / max(steps, 1) / 1e9)} each" if steps else "none complete"
        rate = flops_to_string(flops * 1e9 / nanoseconds)
        lines = [
            f"{format_quantity(steps, 'step')}, {each}; {format_size(flops)} FLOPs on events (2 per MAC, table "
            f"{self.table.name}), {rate}"
        ]
        if ledger.recorded_flops:
            missing = ledger.recorded_flops - ledger.landed_flops
            lines.append(
                f"{format_percent(ledger.landed_flops, ledger.recorded_flops)} of the model's FLOPs have an event; "
                f"{format_size(missing)} FLOPs have none"
            )
        if ledger.other_shapes:
            lines.append(
                "events whose input shapes differ from the model's, counted by their own shapes: "
                f"{kernel_table.list_calls(ledger.other_shapes)}"
            )
        return lines + kernel_table.describe_ledger(ledger, self.table)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the chrome trace with its annotations, compressed if the path ends with .gz."""
        metadata: dict[str, Any] = {"about": self.about(), "table": self.table.name, "FLOPs per MAC": 2}
        document = annotate(self.document, self.match, self.events.positions, metadata)
        write_document(document, os.fspath(path))


def annotate_trace(
    path: str | os.PathLike[str],
    counted: FlopCountAnalysis | Trace | None = None,
    *,
    table: str | FormulaTable = "exact",
) -> AnnotatedTrace:
    """Return a chrome trace of torch.profiler, .json or .json.gz, with the modules and FLOPs of its events.

    `counted` is an analysis or a Trace of one step of the same work, such as `TrainingStepAnalysis` with the trace's
    inputs and optimizer; its ops are matched with the events of each step by order and name, and by shapes if the trace
    has them (record_shapes=True). Without it, or where shapes differ, an event is counted by its own shapes, without a
    module. A file that is no such trace raises TraceError; so does a trace without shapes if `counted` is None.

    >>> import tempfile, torch
    >>> model, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
    >>> with torch.profiler.profile() as profile:
    ...     y = model(x)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     profile.export_chrome_trace(f"{folder}/trace.json")
    ...     annotated = annotate_trace(f"{folder}/trace.json", FlopCountAnalysis(model, x))
    >>> annotated.share(), [(row.key, row.macs, row.flops) for row in annotated.key_averages() if row.flops]
    (1.0, [('aten::linear', 24, 56)])
    """
    table = resolve_table(table)
    cost_model = TableCostModel(table, "flops")
    name = os.fspath(path)
    document = read_document(name)
    try:
        events = read_events(document)
    except TraceError as error:
        raise TraceError(f"{name}: {error}") from None
    trace = _read_trace(counted, table)
    if trace is None and not events.has_shapes:
        raise TraceError(f"{name} has no input shapes: pass the model, or record the trace with record_shapes=True")
    raw_events = [document["traceEvents"][position] for position in events.positions]
    args = [(event["name"], event.get("args", {})) for event in raw_events]
    by_shapes = ShapeCosts(args, table, cost_model) if events.has_shapes else None
    match = match_kernels(events.run, trace, cost_model, by_shapes=by_shapes)
    return AnnotatedTrace(name, match, table, events, document)


def find_device(paths: Sequence[str]) -> str | None:
    """Return "cuda" if one of several chrome traces has kernels of a GPU, else None."""
    return "cuda" if any(has_kernels(path) for path in paths) else None


def _read_trace(counted: FlopCountAnalysis | Trace | None, table: FormulaTable) -> Trace | None:
    """Return the Trace of one step; one that has decomposed an op of the table raises TraceError."""
    if counted is None:
        return None
    trace = trace_of(counted)
    if trace.events is None:
        raise TraceError("the Trace has no events, since it is aggregated: pass that of a single step")
    return FlopCountAnalysis.from_trace(trace, table=table, warn=False).trace()


_MAX_ROWS = 40  # events of a trace that is printed
_TRACE_COLUMNS = (
    text_column("trace", "annotated trace", form=os.path.basename),
    number_column("rank", form=str),
    number_column("steps", form=str),
    number_column("seconds", "time/step", form=format_seconds),
    replace(number_column("macs", "MACs"), hide_order=1),
    number_column("flops", "FLOPs (2 per MAC)"),
    number_column("flops_per_second", "FLOP/s"),
    number_column("share", "matched", form=lambda share: format_percent(round(share * 10**6), 10**6)),
)
_NOTES = ("matched: share of the model's FLOPs whose ops have an event in the trace.",)
_EVENT_COLUMNS = (
    text_column("event"),
    number_column("calls", form=str),
    number_column("seconds", "time", form=format_seconds),
    number_column("macs", "MACs"),
    number_column("flops", "FLOPs"),
    number_column("flops_per_second", "FLOP/s"),
)


def annotation_report(traces: Sequence[tuple[str, AnnotatedTrace]], *, subject: str = "") -> Document:
    """Return the report of traces, each with the path of its annotated file; `subject` is the model.

    `matched` is the share of the model's FLOPs whose ops have an event in the trace. Rows of events are those of the
    ops that have FLOPs of their own, so that they add up; their times are those of their kernels if they have any, else
    those on the CPU.
    """
    notes = _NOTES if any(trace.share() is not None for _, trace in traces) else ()
    table = Table("traces", _TRACE_COLUMNS, [_row(path, trace) for path, trace in traces], noun="trace", notes=notes)
    parts: list[Part] = [table]
    for path, trace in traces:
        lines = trace.about()[1:]
        if lines:
            parts.append(Items(path, lines))
    rows = [row for _, trace in traces for row in trace.key_averages() if row.self_flops]
    parts.append(Table("events", _EVENT_COLUMNS, _sum_rows(rows), noun="event"))
    return Document("annotation", subject, parts, main="events")


def describe_annotation(trace: AnnotatedTrace) -> Document:
    """Return the report of one trace that is not saved yet, with its largest events."""
    return annotation_report([(trace.path, trace)]).ranked(top=_MAX_ROWS)


def _row(path: str, trace: AnnotatedTrace) -> list[Value]:
    steps, nanoseconds = trace.match.clock()
    seconds, work = nanoseconds / 1e9, trace.work()
    return [
        path,
        trace.rank,
        steps,
        seconds / steps if steps else None,
        work.macs,
        work.flops,
        work.flops / seconds,
        trace.share(),
    ]


def _sum_rows(rows: Sequence[KernelRow]) -> list[list[Value]]:
    """Return a row for all events of one name, of all ranks, the most FLOPs first."""
    groups: dict[str, list[KernelRow]] = defaultdict(list)
    for row in rows:
        groups[row.key].append(row)
    summed: list[list[Value]] = []
    for name, group in groups.items():
        flops = sum(row.self_flops or 0 for row in group)
        seconds = sum(row.device_time_total or row.cpu_time_total for row in group) / 1e6
        macs = sum(row.self_macs or 0 for row in group)
        calls = sum(row.count for row in group)
        summed.append([name, calls, seconds, macs, flops, flops / seconds if seconds else None])
    return sorted(summed, key=lambda row: -float(row[4] or 0))
