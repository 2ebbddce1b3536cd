"""Sort the rows of a report and limit their number."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from fvflops.text import require_int, shown, suggest
from fvflops.units import format_quantity

Row = TypeVar("Row")


def rank(
    rows: Sequence[Row],
    headings: Sequence[str],
    *,
    count: Callable[[Row, str], float],
    name: Callable[[Row], str],
    sort: str | None,
    top: int | None,
) -> list[Row]:
    """Return all rows, in stable descending order of a count if `sort` or `top` is given.

    `sort` is a heading, or "name" for the natural order of names; if only `top` is given, rows are sorted by the
    heading that `choose_measure` returns. An unknown `sort` and a `top` below 1 raise ValueError.
    """
    check_top(top)
    if sort is None and top is None:
        return list(rows)
    chosen = choose_measure(headings) if sort is None else check_sort(sort, [*headings, "name"])
    if chosen == "name":
        return sorted(rows, key=lambda row: natural_key(name(row)))
    return sorted(rows, key=lambda row: -count(row, chosen))


def natural_key(name: str) -> list[tuple[bool, int, str]]:
    """Return the sort key of a dotted name in natural order: numeric parts as numbers."""
    parts = name.split(".")
    return [(not part.isdecimal(), int(part) if part.isdecimal() and len(part) < 20 else 0, part) for part in parts]


def choose_measure(headings: Sequence[str], sort: str | None = None) -> str:
    """Return the heading that rows are ranked by: `sort` if it is a heading, else the first one except parameters."""
    if sort is not None and sort in headings:
        return sort
    return next((heading for heading in headings if heading != "parameters"), headings[0])


def truncation_note(rows: Sequence[Row], top: int | None, noun: str) -> list[str]:
    """Return a sentence with the number of rows beyond the first `top`; [] if there are none."""
    hidden = 0 if top is None else len(rows) - top
    return [f"{format_quantity(hidden, f'more {noun}')}."] if hidden > 0 else []


def check_sort(sort: str, known: Collection[str]) -> str:
    """Return a known sort key; an unknown one raises ValueError with the closest match."""
    if sort not in known:
        raise ValueError(f"sort must be one of {', '.join(known)}; got {shown(sort)}{suggest(sort, known)}")
    return sort


def check_top(top: int | None) -> None:
    if top is not None:
        require_int("top", top, least=1)
