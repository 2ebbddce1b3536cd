"""The module calls: a line for each call of a module in the order of the run, with the shapes of its tensors."""

from __future__ import annotations

from collections.abc import Sequence

from fvflops.reports import names
from fvflops.reports.calls.op_calls import write_shapes
from fvflops.reports.text.text_table import text_table
from fvflops.trace.calls import ModuleCall
from fvflops.units import format_short, format_thousands

_HEADS = ("module", "class", "in → out", "params", "FLOPs", "acts", "bytes")


def render(calls: Sequence[ModuleCall], *, depth: int | None = None) -> str:
    """Return the module calls as text; `depth` is how many calls around one there are at most, any number if None.

    A line has all that ran in the call; FLOPs end with "+" where ops of unknown cost ran.

    >>> call = ModuleCall(0, "", "ReLU", "forward", 0, ("float32[8]",), ("float32[8]",), 0, 1, 8, 0, 0, 64, 0)
    >>> print(render([call]))
    #  module  class  in → out   params  FLOPs  acts  bytes
    -  ------  -----  ---------  ------  -----  ----  -----
    0  model   ReLU   [8] → [8]       0      8     0     64
    """
    shown = [call for call in calls if depth is None or call.depth <= depth]
    phases = len({call.phase for call in calls}) > 1
    heads = ["#", *_HEADS[:2], *(["phase"] if phases else []), *_HEADS[2:]]
    return text_table(heads, [_cells(call, phases) for call in shown], left=range(4 + phases))


def _cells(call: ModuleCall, phases: bool) -> list[str]:
    return [
        str(call.number),
        " " * call.depth + (names.printable_short(call.module) or "model"),
        names.printable_short(call.class_name),
        *([call.phase] * phases),
        write_shapes(call.inputs, call.outputs),
        format_short(call.parameters),
        format_thousands(call.flops) + "+" * bool(call.unknown),
        "" if call.activations is None else format_thousands(call.activations),
        format_short(call.nbytes),
    ]
