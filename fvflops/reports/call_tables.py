"""Tables of op calls, module calls and source lines, with tensors, FLOPs, time and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from fvflops import __version__
from fvflops.reports.document import Column, Document, Items, Table, Value, module_column, number_column, text_column
from fvflops.reports.escaping import list_ops, show_status
from fvflops.reports.terminal.op_coverage import op_coverage_notes
from fvflops.trace.calls import LineCount, ModuleCall, OpCall
from fvflops.units import (
    format_parameters,
    format_percent,
    format_quantity,
    format_seconds,
    format_signed,
    format_thousands,
)
from fvflops.views.analysed_run import AnalysedRun, describe_run, make_summary
from fvflops.views.ranking import check_sort

# View → the meaning of a row.
CALL_VIEWS: Mapping[str, str] = {"op": "a call of an op", "call": "a call of a module", "line": "a line of source"}
_TITLES = {"op": "op calls", "call": "module calls", "line": "lines of source"}
_OP = "number name op target module phase inputs outputs dtype status flops macs activations bytes parameters after"
_MODULE = "number module class phase depth inputs outputs parameters ops flops macs activations bytes unsupported"
_LINE = "line calls flops macs activations bytes unsupported"
# View → the keys of its columns, without measurements.
CALL_COLUMNS = {"op": tuple(_OP.split()), "call": tuple(_MODULE.split()), "line": tuple(_LINE.split())}
_MEASURED = ("duration_ns", "memory_before", "memory_after", "memory_peak")
# Argument `sort` of `op_call_table` → the key of a column.
SORTS: Mapping[str, str] = {
    "time": "duration_ns",
    "flops": "flops",
    "memory": "memory_delta",
    "peak": "memory_peak",
    "name": "name",
}
_NO_LINE = "(outside the model's code)"


def call_report(run: AnalysedRun, by: str, table: Table) -> Document:
    """Return the report of a table of a run's calls, with the count's coverage; its data are `about` and `rows`."""
    about = {"fvflops": __version__, **describe_run(run)}
    summary = make_summary({run.counts.metric: run})
    return Document(
        "calls",
        f"{about['model']}: {_TITLES[by]}",
        [table, Items("", op_coverage_notes(summary))],
        data={"about": about, "rows": table.readable_by("data").records()},
    )


def op_call_table(calls: Sequence[OpCall], *, sort: str | None = None, top: int | None = None) -> Table:
    """Return a row for each op call in execution order or sorted by `sort`, one of SORTS.

    The first `top` are shown, None for all; the total includes all. Quantities that were not measured have no column,
    unknown counts are None. Tensors and parameters in one cell are separated by "; ", numbers of calls by a blank. An
    unknown `sort` raises ValueError.

    >>> call = OpCall(0, "relu", "aten::relu", "aten::relu.default", "", "forward", ("float32[8]",), ("float32[8]",),
    ...               "float32", "counted", 8, 1500)
    >>> from fvflops.reports.formats import write_document
    >>> print(write_document(Document("calls", parts=[op_call_table([call])])))
    #  name   op      target              module  in   out  status   FLOPs    time
    -  -----  ------  ------------------  ------  ---  ---  -------  -----  ------
    0  relu   relu    aten::relu.default  model   [8]  [8]  counted      8  1.5 µs
       total  1 call                                                     8  1.5 µs
    """
    measured = [name for name in _MEASURED if any(getattr(call, name) is not None for call in calls)]
    measured += ["line"] * any(call.line for call in calls)
    measured += ["memory_delta"] * ("memory_before" in measured)
    columns = [_OP_COLUMNS.get(key, _data_column(key)) for key in (*CALL_COLUMNS["op"], *measured)]
    if len({call.phase for call in calls}) == 1:
        columns = [replace(column, only_for="data") if column.key == "phase" else column for column in columns]
    totals: dict[str, Value] = {
        "name": "total",
        "op": format_quantity(len(calls), "call"),
        "flops": sum(call.flops or 0 for call in calls),
        "duration_ns": sum(call.duration_ns or 0 for call in calls),
        "memory_delta": sum(call.memory_delta or 0 for call in calls),
    }
    rows = [[*_list_op(call), *(getattr(call, name) for name in measured)] for call in calls]
    table = Table("calls", columns, rows, total=[totals.get(column.key) for column in columns], noun="call")
    key = None if sort is None else SORTS[check_sort(sort, SORTS)]
    return table.ranked(sort=key if key in [column.key for column in columns] else None, top=top)


def _list_op(call: OpCall) -> list[Value]:
    tensors = "; ".join(call.inputs), "; ".join(call.outputs)
    counts = call.flops, call.macs, call.activations, call.nbytes
    flow = "; ".join(call.parameters), " ".join(map(str, call.after))
    return [*call[:6], *tensors, call.dtype, call.status, *counts, *flow]


def op_call_notes(calls: Sequence[OpCall], *, ignored: Mapping[str, int], convention: str) -> list[str]:
    """Return sentences on the op calls that a convention does not count; `ignored` are op → calls not listed."""
    notes = []
    if unsupported := Counter(call.op for call in calls if call.flops is None):
        notes.append(f"Unsupported by {convention}, so not counted: {list_ops(unsupported)}.")
    if any(call.status == "ignored" for call in calls):
        notes.append(f"ignored: arithmetic that the convention {convention} does not count.")
    if any(call.status == "covered" for call in calls):
        notes.append("covered: counted in the row of the enclosing module or function.")
    return [*notes, f"Not listed: {list_ops(ignored)}."] if ignored else notes


def module_call_table(calls: Sequence[ModuleCall], *, depth: int | None = None) -> Table:
    """Return a row for each module call with at most `depth` enclosing calls, None for all."""
    several_phases = len({call.phase for call in calls}) > 1
    columns = {
        "number": number_column("number", "#", form=str),
        "module": module_column(),
        "class": text_column("class"),
        "phase": replace(text_column("phase"), hide_order=1, only_for="" if several_phases else "data"),
        "inputs": _INPUTS,
        "outputs": _OUTPUTS,
        "parameters": number_column("parameters", "params", form=format_parameters),
        **_count_columns(calls),
    }
    return Table(
        "calls",
        [columns.get(key, _data_column(key)) for key in CALL_COLUMNS["call"]],
        [
            [*call[:5], "; ".join(call.inputs), "; ".join(call.outputs), *call[7:]]
            for call in calls
            if depth is None or call.depth <= depth
        ],
        noun="call",
    )


def line_table(lines: Sequence[LineCount]) -> Table:
    total = sum(line.flops for line in lines)
    columns = {
        "line": text_column("line", form=lambda line: line or _NO_LINE),
        "calls": number_column("calls", "op calls", form=format_thousands),
        "share": number_column("share", form=lambda flops: format_percent(flops, total), only_for="people"),
        **_count_columns(lines),
    }
    after_flops = CALL_COLUMNS["line"].index("flops") + 1
    keys = (*CALL_COLUMNS["line"][:after_flops], "share", *CALL_COLUMNS["line"][after_flops:])
    rows = [[*line[:after_flops], line.flops, *line[after_flops:]] for line in lines]
    return Table("calls", [columns.get(key, _data_column(key)) for key in keys], rows, noun="line")


def _count_columns(rows: Sequence[ModuleCall | LineCount]) -> dict[str, Column]:
    """Return the columns of counts of module calls and of lines; unsupported ops are shown if there are any."""
    unsupported = number_column(
        "unsupported", "unsupported ops", form=str, only_for="" if any(row.unsupported for row in rows) else "data"
    )
    return {
        "flops": number_column("flops", "FLOPs", form=format_thousands),
        "activations": number_column("activations", "acts", form=format_thousands),
        "bytes": number_column("bytes"),
        "unsupported": unsupported,
    }


def list_shapes(tensors: str) -> str:
    """Return the shapes of the first three tensors of a list separated by "; ", without dtypes.

    >>> list_shapes("float32[2, 3]; float32[3]"), list_shapes("")
    ('[2,3] [3]', '()')
    """
    specs = tensors.split("; ")
    shapes = ["[" + spec.partition("[")[2].replace(" ", "") if "[" in spec else spec for spec in specs[:3]]
    return " ".join(shapes) + " ..." * (len(specs) > 3) or "()"


def _data_column(key: str) -> Column:
    return Column(key, key, only_for="data")


_INPUTS = replace(text_column("inputs", "in", form=list_shapes), hide_order=2)
_OUTPUTS = text_column("outputs", "out", form=list_shapes)
_OP_COLUMNS: Mapping[str, Column] = {
    "number": number_column("number", "#", form=str),
    **{key: replace(text_column(key), hide_order=order) for key, order in (("name", 2), ("target", 3), ("phase", 1))},
    "op": text_column("op", form=lambda op: op.removeprefix("aten::")),
    "module": text_column("module", form=lambda name: name or "model"),
    "inputs": _INPUTS,
    "outputs": _OUTPUTS,
    "status": text_column("status", form=show_status),
    "flops": number_column("flops", "FLOPs", form=format_thousands, missing="unsupported"),
    "duration_ns": number_column("duration_ns", "time", form=lambda time: format_seconds(time / 1e9) if time else "0"),
    "memory_before": number_column("memory_before", "before"),
    "memory_after": number_column("memory_after", "after"),
    "memory_delta": number_column("memory_delta", "delta", form=format_signed, only_for="people"),
}
