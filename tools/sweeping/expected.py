"""The models that do work outside the dispatcher, each with the reason; on others such a report is an error."""

from __future__ import annotations

from collections.abc import Iterable

from fvflops.sweep.count_model import UNSEEN
from fvflops.sweep.model_count import ModelCount

# MODEL → what it computes outside the dispatcher.
EXPECTED_UNSEEN: dict[str, str] = {}


def find_unseen(row: ModelCount) -> str:
    """Return the work outside the dispatcher of a row.

    >>> find_unseen(ModelCount("m", unsupported="aten::x ×2; unseen::f ×1 in 'scan' at net.py:42"))
    "unseen::f ×1 in 'scan' at net.py:42"
    """
    return "; ".join(item for item in row.unsupported.split("; ") if item.startswith(UNSEEN))


def find_unexpected(rows: Iterable[ModelCount]) -> list[ModelCount]:
    """Return the rows with work outside the dispatcher that is not expected of their model."""
    return [row for row in rows if find_unseen(row) and row.model not in EXPECTED_UNSEEN]
