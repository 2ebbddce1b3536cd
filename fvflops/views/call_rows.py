"""Rows of op calls, module calls or source lines, for CSV, JSON and data frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fvflops.trace.calls import LineCount, ModuleCall, OpCall
from fvflops.views.frame import Cell, Table

# View → the meaning of a row.
CALL_VIEWS: Mapping[str, str] = {"op": "a call of an op", "call": "a call of a module", "line": "a line of source"}
_OP = "number name op target module phase inputs outputs dtype status flops macs activations bytes parameters after"
_MEASURED = ("duration_ns", "memory_before", "memory_after", "memory_peak")
_LINE = "line calls flops macs activations bytes unsupported"
_MODULE = "number module class phase depth inputs outputs parameters ops flops macs activations bytes unsupported"
# View → its columns, without those of measurements.
CALL_COLUMNS: Mapping[str, tuple[str, ...]] = {
    "op": tuple(_OP.split()),
    "call": tuple(_MODULE.split()),
    "line": tuple(_LINE.split()),
}


def list_op_rows(calls: Sequence[OpCall]) -> Table:
    """Return a row for each op call; quantities that were not measured have no column, unknown counts are None.

    Tensors and parameters in one cell are separated by "; ", numbers of calls by a blank.

    >>> call = OpCall(1, "relu", "aten::relu", "aten::relu.default", "", "forward", ("float32[8]",), ("float32[8]",),
    ...               "float32", "counted", 8, after=(0,))
    >>> list_op_rows([call]).rows[0][6:]
    ['float32[8]', 'float32[8]', 'float32', 'counted', 8, None, None, None, '', '0']
    """
    measured = [name for name in _MEASURED if any(getattr(call, name) is not None for call in calls)]
    measured += ["line"] * any(call.line for call in calls)
    return Table(
        [*_OP.split(), *measured], [[*_list_op(call), *(getattr(call, name) for name in measured)] for call in calls]
    )


def list_module_rows(calls: Sequence[ModuleCall], *, depth: int | None = None) -> Table:
    """Return a row for each module call; the root is named "", and tensors are written as in op calls.

    Calls with more than `depth` enclosing calls are not listed; None lists all.
    """
    return Table(
        _MODULE.split(),
        [
            [*call[:5], _join(call.inputs), _join(call.outputs), *call[7:]]
            for call in calls
            if depth is None or call.depth <= depth
        ],
    )


def list_line_rows(lines: Sequence[LineCount]) -> Table:
    """Return a row for each source line."""
    return Table(_LINE.split(), [list(line) for line in lines])


def _list_op(call: OpCall) -> list[Cell]:
    counts = (call.flops, call.macs, call.activations, call.nbytes)
    return [
        *call[:6],
        _join(call.inputs),
        _join(call.outputs),
        call.dtype,
        call.status,
        *counts,
        _join(call.parameters),
        " ".join(map(str, call.after)),
    ]


def _join(texts: Sequence[str]) -> str:
    return "; ".join(texts)
