"""The models that do work outside the dispatcher, each with the reason; on others such a report is an error."""

from __future__ import annotations

from collections.abc import Iterable

from sweeping.result import Result

# library → model → what it computes outside the dispatcher.
EXPECTED_UNSEEN: dict[str, dict[str, str]] = {
    "timm": {},
    "torchvision": {},
    "transformers": {},
}


def find_unexpected(library: str, results: Iterable[Result]) -> list[Result]:
    """Return the results that report work outside the dispatcher which is not expected of their model."""
    expected = EXPECTED_UNSEEN.get(library, {})
    return [result for result in results if result.unseen and result.model not in expected]
