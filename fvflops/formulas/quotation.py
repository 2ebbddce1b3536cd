"""The quotation: what a file says, as an error replays it, cut to a length that a reader takes in."""

from __future__ import annotations


def shorten(text: str, limit: int = 60) -> str:
    """Return a text, cut to its first `limit` characters and … where it is longer.

    >>> shorten("aten::mm"), len(shorten("x" * 900_000))
    ('aten::mm', 61)
    """
    return text if len(text) <= limit else text[:limit] + "…"
