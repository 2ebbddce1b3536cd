"""The printable: a name with nothing in it that a screen would obey instead of showing it."""

from __future__ import annotations


def show(name: str) -> str:
    """Return a name in which every character that cannot be printed is written as a Python escape.

    >>> print(show("line\\nbreak"))
    line\\nbreak
    """
    if name.isprintable():
        return name
    return "".join(mark if mark.isprintable() else mark.encode("unicode_escape").decode("ascii") for mark in name)
