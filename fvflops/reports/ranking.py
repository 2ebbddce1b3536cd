"""The ranking: by what the rows of a report are ordered, and how many of them are shown."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches


def check_sort(sort: str, known: Collection[str]) -> str:
    """Return an order that there is; another raises ValueError, which names the nearest and all.

    >>> check_sort("tme", ["time", "name"])
    Traceback (most recent call last):
    ValueError: nothing is sorted by 'tme': did you mean 'time'? There are time, name
    """
    if sort in known:
        return sort
    near = get_close_matches(sort, known, n=1)
    hint = f"did you mean {near[0]!r}? There are" if near else "take"
    raise ValueError(f"nothing is sorted by {sort!r}: {hint} {', '.join(known)}")


def check_top(top: int | None) -> None:
    """Raise ValueError where the number of rows to be shown is none."""
    if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < 1):
        raise ValueError(f"top is how many lines are shown, 1 or more, not {top!r}")
