"""Select op calls by phase, without ignored ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from fvflops.formulas import FormulaTable
from fvflops.text import nearest
from fvflops.trace import PHASES, check_phase
from fvflops.trace.calls import OpCall
from fvflops.trace.signature import packet_of


def select_calls(
    calls: Sequence[OpCall], phase: str | None, ignore: Collection[str], table: FormulaTable | None = None
) -> tuple[tuple[OpCall, ...], Counter[str]]:
    """Return the op calls of a phase without those in `ignore`, and op → number of ignored calls.

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
