"""A table of op calls in execution order, with tensors, FLOPs, time and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fvflops.reports.document import Column, Table, Value, number_column, text_column
from fvflops.reports.escaping import plain_name
from fvflops.trace.calls import OpCall
from fvflops.units import format_quantity, format_seconds, format_short, format_thousands
from fvflops.views.call_rows import list_op_rows
from fvflops.views.ranking import check_sort

# Argument `sort` of `op_table` → the key of a column.
SORTS: Mapping[str, str] = {
    "time": "duration_ns",
    "flops": "flops",
    "memory": "memory_delta",
    "peak": "memory_peak",
    "name": "name",
}
_STATUS = {"zero_flop": "zero-FLOP", "ignored": "ignored", "unsupported": "unsupported"}


def op_call_table(
    calls: Sequence[OpCall],
    *,
    sort: str | None = None,
    top: int | None = None,
) -> Table:
    """Return a row for each op call in execution order or sorted by `sort`, one of SORTS.

    The first `top` are shown, None for all; the total includes all. An unknown `sort` raises ValueError.

    >>> call = OpCall(0, "relu", "aten::relu", "aten::relu.default", "", "forward", ("float32[8]",), ("float32[8]",),
    ...               "float32", "counted", 8, 1500)
    >>> from fvflops.reports.document import Document
    >>> from fvflops.reports.formats import write_document
    >>> print(write_document(Document("calls", parts=[op_call_table([call])])))
    #  name   op      target              module  in   out  status   FLOPs    time
    -  -----  ------  ------------------  ------  ---  ---  -------  -----  ------
    0  relu   relu    aten::relu.default  model   [8]  [8]  counted      8  1.5 µs
       total  1 call                                                     8  1.5 µs
    """
    headings, rows = list_op_rows(calls)
    columns = [_COLUMNS[heading] for heading in headings]
    if len({call.phase for call in calls}) == 1:
        columns[headings.index("phase")] = replace(_COLUMNS["phase"], only_for="data")
    if "memory_before" in headings:
        columns.append(number_column("memory_delta", "delta", form=_signed, only_for="people"))
        rows = [[*row, call.memory_delta] for row, call in zip(rows, calls, strict=True)]
    totals: dict[str, Value] = {
        "name": "total",
        "op": format_quantity(len(calls), "call"),
        "flops": sum(call.flops or 0 for call in calls),
        "duration_ns": sum(call.duration_ns or 0 for call in calls),
        "memory_delta": sum(call.memory_delta or 0 for call in calls),
    }
    total = [totals.get(column.key) for column in columns]
    table = Table("calls", columns, rows, total=total, noun="call")
    key = None if sort is None else SORTS[check_sort(sort, SORTS)]
    return table.ranked(sort=key if key in [column.key for column in columns] else None, top=top)


def list_shapes(tensors: str) -> str:
    """Return the shapes of the first three tensors of a list separated by "; ", without dtypes.

    >>> list_shapes("float32[2, 3]; float32[3]"), list_shapes("")
    ('[2,3] [3]', '()')
    """
    specs = tensors.split("; ")
    shapes = ["[" + spec.partition("[")[2].replace(" ", "") if "[" in spec else spec for spec in specs[:3]]
    return " ".join(shapes) + " ..." * (len(specs) > 3) or "()"


def _time(nanoseconds: int) -> str:
    return format_seconds(nanoseconds / 1e9) if nanoseconds else "0"


def _signed(count: int) -> str:
    return f"{'+' if count > 0 else ''}{format_short(count)}"


def op_call_notes(calls: Sequence[OpCall], *, ignored: Mapping[str, int], convention: str) -> list[str]:
    """Return sentences on the op calls that a convention does not count; `ignored` are op → calls not listed."""
    notes = []
    unsupported = Counter(call.op for call in calls if call.flops is None)
    if unsupported:
        notes.append(f"Unsupported by {convention}, so not counted: {_list_counts(unsupported)}.")
    if any(call.status == "ignored" for call in calls):
        notes.append(f"ignored: arithmetic that the convention {convention} does not count.")
    if any(call.status == "covered" for call in calls):
        notes.append("covered: counted in the row of the enclosing module or function.")
    return [*notes, f"Not listed: {_list_counts(ignored)}."] if ignored else notes


def _list_counts(calls: Mapping[str, int]) -> str:
    return ", ".join(f"{plain_name(op)} ({format_quantity(count, 'call')})" for op, count in calls.items())


def data_column(key: str) -> Column:
    """Return a column that only CSV and JSON have."""
    return Column(key, key, only_for="data")


INPUTS = replace(text_column("inputs", "in", form=list_shapes), hide_order=2)
OUTPUTS = text_column("outputs", "out", form=list_shapes)
_OPTIONAL = {
    key: replace(text_column(key), hide_order=order) for key, order in (("name", 2), ("target", 3), ("phase", 1))
}
_COLUMNS: Mapping[str, Column] = {
    "number": number_column("number", "#", form=str),
    "name": _OPTIONAL["name"],
    "op": text_column("op", form=lambda op: op.removeprefix("aten::")),
    "target": _OPTIONAL["target"],
    "module": text_column("module", form=lambda name: name or "model"),
    "phase": _OPTIONAL["phase"],
    "inputs": INPUTS,
    "outputs": OUTPUTS,
    "status": text_column("status", form=lambda status: _STATUS.get(status, status)),
    "flops": number_column("flops", "FLOPs", form=format_thousands, missing="unsupported"),
    "duration_ns": number_column("duration_ns", "time", form=_time),
    "memory_before": number_column("memory_before", "before"),
    "memory_after": number_column("memory_after", "after"),
    **{
        key: data_column(key)
        for key in (*("dtype", "macs", "activations", "bytes", "parameters", "after", "memory_peak", "line"),)
    },
}
