"""Find attention whose mask is unknown, where a table counts only unmasked pairs: it is counted as dense."""

from __future__ import annotations

from collections import Counter

from fvflops.formulas import FormulaTable
from fvflops.formulas.functions.attention import SKIPS, has_unknown_mask
from fvflops.trace import Trace
from fvflops.trace.module_tree import innermost


def find_unknown_masks(trace: Trace, table: FormulaTable) -> dict[str, Counter[str]]:
    """Return op → location → calls of attention with an unknown mask, {} if the table counts all pairs anyway."""
    if not table.constants.get(SKIPS):
        return {}
    unknown = {
        index: signature.packet for index, signature in enumerate(trace.signatures) if has_unknown_mask(signature)
    }
    scopes = trace.scopes()
    locations: dict[str, Counter[str]] = {}
    for (index, stack, _), calls in trace.calls.items() if unknown else ():
        if index in unknown:
            locations.setdefault(unknown[index], Counter())[trace.modules.locate(innermost(scopes[stack]))] += calls
    return locations


def describe_unknown_masks(trace: Trace, table: FormulaTable) -> str:
    """Return the attention with unknown masks in one line, "" if there is none."""
    found = find_unknown_masks(trace, table)
    listed = []
    for op, places in sorted(found.items()):
        first, *more = places
        others = f" and {len(more)} more" if more else ""
        listed.append(f"{op} ×{sum(places.values())} (in {first}{others})")
    return ", ".join(listed)
