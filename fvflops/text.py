"""The printable: a name with nothing in it that a screen would obey instead of showing it."""

from __future__ import annotations

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
    """Return what `show` does, for a row of a table: what is longer than 120 characters between two dots is cut.

    A name of many parts stays whole, since its beginning alone would be that of others too.

    >>> print(printable_short("layer.0"), len(printable_short("x" * 10_000)))
    layer.0 121
    """
    if len(name) > _LONGEST:
        name = ".".join(part if len(part) <= _LONGEST else part[:_LONGEST] + "…" for part in name.split("."))
    return printable(name)
