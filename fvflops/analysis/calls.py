"""The calls of an analysis: which of them are wanted, and as rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from fvflops.analysis.model_analysis import ModelAnalysis
from fvflops.formulas import FormulaTable
from fvflops.text import nearest
from fvflops.trace import PHASES, check_phase
from fvflops.trace.calls import OpCall
from fvflops.trace.signature import packet_of

if TYPE_CHECKING:
    from fvflops.views.frame_rows import Table

# View → what a row is.
VIEWS: Mapping[str, str] = {"op": "a call of an op", "call": "a call of a module", "line": "a line of source"}
# View → the method of an analysis of flops that lists it.
_METHODS: Mapping[str, str] = {"op": "op_calls", "call": "module_calls", "line": "line_counts"}


def select_calls(
    calls: Sequence[OpCall], phase: str | None, ignore: Collection[str], table: FormulaTable | None = None
) -> tuple[tuple[OpCall, ...], Counter[str]]:
    """Return the op calls of a phase but for those to ignore, and how often each of these ran.

    A name to ignore that neither an op that ran nor a row of the table has raises ValueError naming the nearest.
    """
    present = {call.phase for call in calls}
    if phase is not None:
        check_phase(phase, tuple(name for name in PHASES if name in present))
    calls = [call for call in calls if phase in (None, call.phase)]
    names = {_full_name(name, table, calls) for name in ([ignore] if isinstance(ignore, str) else ignore)}
    kept = tuple(call for call in calls if not names.intersection((call.op, call.target)))
    return kept, Counter(call.op for call in calls if names.intersection((call.op, call.target)))


def list_call_rows(analysis: ModelAnalysis, by: str, depth: int | None = None) -> Table:
    """Return a row for each call of an op, by "op", of a module, by "call", or each line of source, by "line".

    The analysis is one of flops. `depth` is how many calls around a module's are listed at most, any number if None; by
    op and by line it is ignored.
    """
    from fvflops.views.call_rows import list_line_rows, list_module_rows, list_op_rows

    ask = getattr(analysis, _METHODS[by], None)
    if ask is None:
        raise ValueError(f"by={by!r}, {VIEWS[by]} in each row, is a view of a FlopCountAnalysis alone")
    if by == "op":
        return list_op_rows(ask())
    if by == "line":
        return list_line_rows(ask())
    return list_module_rows([call for call in ask() if depth is None or call.depth <= depth])


def _full_name(name: str, table: FormulaTable | None, calls: Collection[OpCall]) -> str:
    """Return an op's name as calls have it; one that is none raises ValueError."""
    ran = {known for call in calls for known in (call.op, call.target)}
    full = name if "::" in name or name in ran else f"aten::{name}"
    if full in ran:
        return full
    known = set(ran) if table is None else {*ran, *table.rows}
    packet = packet_of(full)
    if full in known or (packet in known and packet not in ran):  # it did not run here, which is no mistake
        return full
    raise ValueError(f"no op is called {name!r}: the nearest is {nearest(full, sorted(known), cutoff=0)!r}")
