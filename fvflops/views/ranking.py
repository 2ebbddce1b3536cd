"""Order the rows of a report, and limit how many are shown."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from fvflops.text import suggest
from fvflops.units import format_quantity

Row = TypeVar("Row")
_NAME = "name"


def rank(
    rows: Sequence[Row],
    headings: Sequence[str],
    *,
    count: Callable[[Row, str], float],
    name: Callable[[Row], str],
    sort: str | None = None,
    top: int | None = None,
) -> list[Row]:
    """Return all rows: as they are or, with `sort` or `top`, those with most first and equal ones as they are.

    `sort` is one of the headings or "name", numbers in names in their order; if it is None and `top` is not, it is what
    `choose_measure` takes. Another order, and a `top` below 1, raise ValueError.

    >>> rank(["fc.10", "fc.9"], ["flops"], count=lambda row, heading: len(row), name=str, sort="name")
    ['fc.9', 'fc.10']
    """
    check_top(top)
    if sort is None and top is None:
        return list(rows)
    chosen = choose_measure(headings) if sort is None else check_sort(sort, [*headings, _NAME])
    if chosen == _NAME:
        return sorted(rows, key=lambda row: natural_key(name(row)))
    return sorted(rows, key=lambda row: -count(row, chosen))


def natural_key(name: str) -> list[tuple[bool, int, str]]:
    """Return the key by which dotted names are sorted, parts that are numbers as numbers.

    >>> sorted(["fc.10", "fc.9"], key=natural_key)
    ['fc.9', 'fc.10']
    """
    return [_order_part(part) for part in name.split(".")]


def _order_part(part: str) -> tuple[bool, int, str]:
    return (not part.isdecimal(), int(part) if part.isdecimal() and len(part) < 20 else 0, part)


def choose_measure(headings: Sequence[str], sort: str | None = None) -> str:
    """Return the main heading: that of `sort`, else the first one but parameters.

    >>> choose_measure(["parameters", "flops"]), choose_measure(["parameters", "flops"], "parameters")
    ('flops', 'parameters')
    """
    if sort is not None and sort in headings:
        return sort
    return next((heading for heading in headings if heading != "parameters"), headings[0])


def truncation_note(rows: Sequence[Row], top: int | None, noun: str) -> list[str]:
    """Return a sentence on how many of the rows are not among the first `top`, none if all are.

    >>> truncation_note("abc", 2, "module")
    ['1 module more.']
    """
    hidden = 0 if top is None else len(rows) - top
    return [f"{format_quantity(hidden, noun)} more."] if hidden > 0 else []


def check_sort(sort: str, known: Collection[str]) -> str:
    """Return an order that there is; another raises ValueError, which names the nearest and all.

    >>> check_sort("tme", ["time", "name"])
    Traceback (most recent call last):
    ValueError: nothing is sorted by 'tme': did you mean 'time'? There are time, name
    """
    if sort in known:
        return sort
    near = suggest(sort, known)
    hint = f"{near} There are" if near else ": take"
    raise ValueError(f"nothing is sorted by {sort!r}{hint} {', '.join(known)}")


def check_top(top: int | None) -> None:
    """Raise ValueError where the number of rows to be shown is none."""
    if top is not None and (isinstance(top, bool) or not isinstance(top, int) or top < 1):
        raise ValueError(f"top is how many lines are shown, 1 or more, not {top!r}")
