"""Count masked attention in full or only within its mask."""

from __future__ import annotations

from dataclasses import replace

from fvflops.formulas import FormulaTable
from fvflops.formulas.functions.attention import SKIPS

ATTENTION = ("dense", "causal")


def with_attention(table: FormulaTable, attention: str) -> FormulaTable:
    """Return a table that counts fused attention by all pairs of query and key ("dense") or the unmasked ("causal")."""
    if attention not in ATTENTION:
        raise ValueError(f"attention must be 'dense' or 'causal'; got {attention!r}")
    return replace(table, constants={**table.constants, SKIPS: int(attention == "causal")})
