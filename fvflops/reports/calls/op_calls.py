"""A table of op calls in the order of the run, with their tensors, FLOPs, time and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fvflops.reports.document import Column, Table, Value, number_column, text_column
from fvflops.reports.names import plain_name
from fvflops.trace.calls import OpCall
from fvflops.units import format_quantity, format_seconds, format_short, format_thousands
from fvflops.views.call_rows import list_op_rows
from fvflops.views.ranking import check_sort

# What `op_table` sorts by → the key of a column.
SORTS: Mapping[str, str] = {
    "time": "duration_ns",
    "flops": "flops",
    "memory": "memory_delta",
    "peak": "memory_peak",
    "name": "name",
}
_STATUS = {"free": "zero-FLOP", "omitted": "ignored", "unknown": "unsupported"}


def op_call_table(
    calls: Sequence[OpCall],
    *,
    sort: str | None = None,
    top: int | None = None,
) -> Table:
    """Return a row for each op call, in the order of the run, or with `sort`, one of SORTS, the largest first.

    `top` is how many are shown, all if None; the total is of all. An order that does not exist raises ValueError.

    >>> call = OpCall(0, "relu", "aten::relu", "aten::relu.default", "", "forward", ("float32[8]",), ("float32[8]",),
    ...               "float32", "counted", 8, 1500)
    >>> from fvflops.reports.document import Document
    >>> from fvflops.reports.formats import write_document
    >>> print(write_document(Document("calls", parts=[op_call_table([call])])))
    #  name   op      target              module  in   out  status   FLOPs    time
    -  -----  ------  ------------------  ------  ---  ---  -------  -----  ------
    0  relu   relu    aten::relu.default  model   [8]  [8]  counted      8  1.5 µs
       total  1 line                                                     8  1.5 µs
    """
    headings, rows = list_op_rows(calls)
    columns = [_COLUMNS[heading] for heading in headings]
    if len({call.phase for call in calls}) == 1:
        columns[headings.index("phase")] = replace(_COLUMNS["phase"], only="data")
    if "memory_before" in headings:
        columns.append(number_column("memory_delta", "delta", form=_signed, only="people"))
        rows = [[*row, call.memory_delta] for row, call in zip(rows, calls, strict=True)]
    totals: dict[str, Value] = {
        "name": "total",
        "op": format_quantity(len(calls), "line"),
        "flops": sum(call.flops or 0 for call in calls),
        "duration_ns": sum(call.duration_ns or 0 for call in calls),
        "memory_delta": sum(call.memory_delta or 0 for call in calls),
    }
    total = [totals.get(column.key) for column in columns]
    table = Table("calls", columns, rows, total=total, noun="line")
    key = None if sort is None else SORTS[check_sort(sort, SORTS)]
    return table.ranked(sort=key if key in [column.key for column in columns] else None, top=top)


def list_shapes(tensors: str) -> str:
    """Return the shapes of the first three of tensors that have "; " between them, without their dtypes.

    >>> list_shapes("float32[2, 3]; float32[3]"), list_shapes("")
    ('[2,3] [3]', '()')
    """
    listed = tensors.split("; ")
    shown = listed[:3]
    shapes = ["[" + text.partition("[")[2].replace(" ", "") if "[" in text else text for text in shown]
    return " ".join(shapes) + " ..." * (len(listed) > len(shown)) or "()"


def _time(nanoseconds: int) -> str:
    return format_seconds(nanoseconds / 1e9) if nanoseconds else "0"


def _signed(count: int) -> str:
    return f"{'+' if count > 0 else ''}{format_short(count)}"


def op_call_notes(calls: Sequence[OpCall], *, ignored: Mapping[str, int], convention: str) -> list[str]:
    """Return sentences on op calls whose FLOPs are not counted by a convention, and on `ignored` ones, by op."""
    notes = []
    unknown = Counter(call.op for call in calls if call.flops is None)
    if unknown:
        notes.append(f"Unsupported by {convention}, so not counted: {_count(unknown)}.")
    if any(call.status == "omitted" for call in calls):
        notes.append(f"ignored: arithmetic that the convention {convention} does not count.")
    if any(call.status == "covered" for call in calls):
        notes.append("covered: counted in the line of the module around it.")
    return [*notes, f"Not listed: {_count(ignored)}."] if ignored else notes


def _count(calls: Mapping[str, int]) -> str:
    return ", ".join(f"{plain_name(op)} ({format_quantity(count, 'call')})" for op, count in calls.items())


def data_column(key: str) -> Column:
    """Return a column of the data formats alone."""
    return Column(key, key, only="data")


INPUTS = replace(text_column("inputs", "in", form=list_shapes), optional=2)
OUTPUTS = text_column("outputs", "out", form=list_shapes)
_OPTIONAL = {
    key: replace(text_column(key), optional=level) for key, level in (("name", 2), ("target", 3), ("phase", 1))
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
