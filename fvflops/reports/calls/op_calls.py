"""The op calls: a line for each call of an op in the order of the run, with what it took and what it comes to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from fvflops.reports import names
from fvflops.reports.text.display_width import wrap_notes
from fvflops.reports.text.text_table import text_table
from fvflops.trace.calls import OpCall
from fvflops.units import format_quantity, format_seconds, format_short, format_thousands
from fvflops.views.ranking import check_sort, check_top

SORTS: Mapping[str, Callable[[OpCall], float]] = {
    "time": lambda call: call.duration_ns or 0,
    "flops": lambda call: call.flops or 0,
    "memory": lambda call: call.memory_delta or 0,
    "peak": lambda call: call.memory_peak or 0,
    "name": lambda _: 0,
}
_HEADS = ("name", "op", "target", "module", "in → out")


def render(
    calls: Sequence[OpCall],
    *,
    sort: str | None = None,
    top: int | None = None,
    ignored: Mapping[str, int] | None = None,
    table: str = "",
) -> str:
    """Return the op calls as text, in the order of the run, or with `sort`, one of SORTS, those with most first.

    `top` is how many are shown, all if None; the last line adds up all. `ignored` are the calls that were left out, by
    op, and `table` is the name of the convention. An op without a formula has UNKNOWN for its FLOPs. An order that does
    not exist raises ValueError.

    >>> call = OpCall(0, "relu", "aten::relu", "aten::relu.default", "", "forward", ("float32[8]",), ("float32[8]",),
    ...               "float32", "counted", 8, 1500)
    >>> print(render([call]))
    #  name   op      target              module  in → out   FLOPs    time
    -  -----  ------  ------------------  ------  ---------  -----  ------
    0  relu   relu    aten::relu.default  model   [8] → [8]      8  1.5 µs
       total  1 line                                             8  1.5 µs
    """
    check_top(top)
    ranked = list(calls)
    if sort is not None:
        key = SORTS[check_sort(sort, SORTS)]
        ranked.sort(key=lambda call: (-key(call), call.name if sort == "name" else "", call.number))
    shown = ranked[:top]
    timed = any(call.duration_ns is not None for call in calls)
    memory = any(call.memory_before is not None for call in calls)
    phases = len({call.phase for call in calls}) > 1
    heads = ["#", *_HEADS[:4], *(["phase"] if phases else []), _HEADS[4], "FLOPs"]
    heads += ["time"] * timed + ["before", "after", "delta"] * memory
    rows = [[str(call.number), *_cells(call, phases, timed, memory)] for call in shown]
    rows.append(["", *_add_up(calls, phases, timed, memory)])
    return "\n\n".join(
        [text_table(heads, rows, left=range(6 + phases)), *_tell(calls, len(calls) - len(shown), ignored or {}, table)]
    )


def _cells(call: OpCall, phases: bool, timed: bool, memory: bool) -> list[str]:
    cells = [
        names.printable_short(call.name),
        names.printable_short(call.op.removeprefix("aten::")),
        names.printable_short(call.target),
        names.printable_short(call.module) or "model",
    ]
    cells += [call.phase] * phases
    cells += [write_shapes(call.inputs, call.outputs), _flops(call)]
    cells += [_time(call.duration_ns)] * timed
    if memory:
        cells += [*map(_bytes, (call.memory_before, call.memory_after)), _signed(call.memory_delta)]
    return cells


def _add_up(calls: Sequence[OpCall], phases: bool, timed: bool, memory: bool) -> list[str]:
    cells = ["total", format_quantity(len(calls), "line"), "", "", *([""] * phases), ""]
    unknown = any(call.flops is None for call in calls)
    cells.append(format_thousands(sum(call.flops or 0 for call in calls)) + "+" * unknown)
    cells += [_time(sum(call.duration_ns or 0 for call in calls))] * timed
    return cells + ["", "", _signed(sum(call.memory_delta or 0 for call in calls))] * memory


def write_shapes(inputs: Sequence[str], outputs: Sequence[str]) -> str:
    """Return the shapes of what goes in and of what comes out of a call, the first three of each.

    >>> write_shapes(("float32[2, 3]", "float32[3]"), ())
    '[2,3] [3] → ()'
    """
    return f"{_list(inputs)} → {_list(outputs)}"


def _list(tensors: Sequence[str]) -> str:
    """Return the shapes of tensors, without their dtypes."""
    shown = tensors[:3]
    shapes = ["[" + text.partition("[")[2].replace(" ", "") if "[" in text else text for text in shown]
    return " ".join(shapes) + " ..." * (len(tensors) > len(shown)) or "()"


def _flops(call: OpCall) -> str:
    if call.flops is None:
        return "UNKNOWN"
    return call.status if call.status in ("omitted", "covered") else format_thousands(call.flops)


def _time(nanoseconds: int | None) -> str:
    return "" if nanoseconds is None else format_seconds(nanoseconds / 1e9) if nanoseconds else "0"


def _bytes(count: int | None) -> str:
    return "" if count is None else format_short(count)


def _signed(count: int | None) -> str:
    text = _bytes(count)
    return f"+{text}" if count is not None and count > 0 else text


def _tell(calls: Sequence[OpCall], hidden: int, ignored: Mapping[str, int], table: str) -> list[str]:
    sentences = []
    if hidden:
        sentences.append(f"{format_quantity(hidden, 'line')} more.")
    unknown = Counter(call.op for call in calls if call.flops is None)
    if unknown:
        sentences.append(f"UNKNOWN to the table {table}, so missing from the total: {_count(unknown)}.")
    if any(call.status == "omitted" for call in calls):
        sentences.append(f"omitted is arithmetic that the table {table} leaves out.")
    if any(call.status == "covered" for call in calls):
        sentences.append("covered is what is counted in the line of the module around it.")
    if ignored:
        sentences.append(f"Ignored: {_count(ignored)}.")
    return [wrap_notes(sentences)] if sentences else []


def _count(calls: Mapping[str, int]) -> str:
    return ", ".join(f"{names.printable_short(op)} ({format_quantity(count, 'call')})" for op, count in calls.items())
