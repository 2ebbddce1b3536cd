"""Names and numbers as messages and tables show them: printable, cut to a length, checked, with the nearest known."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_LONGEST = 120  # characters of an attribute or a class


def printable(name: str) -> str:
    """Return a name in which every character that cannot be printed is written as a Python escape.

    >>> print(printable("line\\nbreak"))
    line\\nbreak
    """
    if name.isprintable():
        return name
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode("ascii") for mark in name)


def printable_short(name: str) -> str:
    """Return what `printable` does, for a row of a table: what is longer than 120 characters between two dots is cut.

    A name of many parts stays whole, since its beginning alone would be that of others too.

    >>> print(printable_short("layer.0"), len(printable_short("x" * 10_000)))
    layer.0 121
    """
    if len(name) > _LONGEST:
        name = ".".join(truncate(part, _LONGEST) for part in name.split("."))
    return printable(name)


def truncate(text: str, limit: int = 60) -> str:
    """Return a text, cut to its first `limit` characters and … where it is longer.

    >>> truncate("aten::mm"), len(truncate("x" * 900_000))
    ('aten::mm', 61)
    """
    return text if len(text) <= limit else text[:limit] + "…"


def nearest(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the known name that is most like one, or "" where none is; with cutoff=0 one always is, if any is known.

    >>> nearest("flps", ("macs", "flops")), nearest("x", ("macs", "flops"))
    ('flops', '')
    """
    return "".join(get_close_matches(name, list(known), n=1, cutoff=cutoff))


def suggest(name: str, known: Iterable[str], *, lead: str = ": ", quote: bool = True, cutoff: float = 0.6) -> str:
    """Return how a message about an unknown name ends: with the nearest known one, or with "" where none is near.

    A message that quotes no names, as those about a table's formulas do, takes it with quote=False.

    >>> suggest("flps", ("macs", "flops")), suggest("flps", ("macs", "flops"), lead="; ", quote=False)
    (": did you mean 'flops'?", '; did you mean flops?')
    >>> suggest("x", ("macs", "flops")) or ": there are macs, flops"
    ': there are macs, flops'
    """
    near = nearest(name, known, cutoff=cutoff)
    return f"{lead}did you mean {repr(near) if quote else near}?" if near else ""


def require_int(name: str, value: object, *, least: int) -> int:
    """Return a whole number, `least` or more; anything else, True and False too, raises ValueError.

    >>> require_int("repeat", 0, least=1)
    Traceback (most recent call last):
    ValueError: repeat is a whole number from 1 on, not 0
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is a whole number from {least} on, not {value!r}")
    return value
