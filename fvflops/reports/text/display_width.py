"""Measure, cut, pad and wrap texts by the terminal cells that they take."""

from __future__ import annotations

import textwrap
import unicodedata
from collections.abc import Sequence
from functools import lru_cache

_NOTES_WIDTH = 120
_VARIATION = "\ufe0f"  # makes a narrow sign an emoji, two cells wide


def display_width(text: str) -> int:
    """Return how many cells a printable text takes: two for a wide character, none for a combining mark.

    >>> display_width("layer"), display_width("层"), display_width("e\u0301")
    (5, 2, 1)
    """
    return len(text) if text.isascii() else sum(map(_measure_mark, text))


@lru_cache(maxsize=4096)
def _measure_mark(mark: str) -> int:
    if unicodedata.category(mark) in ("Mn", "Me") and mark != _VARIATION:
        return 0
    return 2 if unicodedata.east_asian_width(mark) in ("W", "F") else 1


def truncate_middle(text: str, limit: int, *, ellipsis: str = "…") -> str:
    """Return a text without its middle, an ellipsis in its place, where it takes more than `limit` cells.

    >>> truncate_middle("layers.0.self_attn", 12), truncate_middle("fc", 12), truncate_middle("layers", 1)
    ('layers…_attn', 'fc', '…')
    """
    if display_width(text) <= limit:
        return text
    room = limit - len(ellipsis)
    if room < 1:
        return ellipsis[:limit]
    head = _take(text, (room + 1) // 2)
    tail = _take(text[::-1], room - display_width(head))[::-1]
    while tail and _measure_mark(tail[0]) == 0:  # a mark without the letter that it belongs to
        tail = tail[1:]
    return head + ellipsis + tail


def _take(text: str, limit: int) -> str:
    """Return the longest beginning of a text that takes no more than `limit` cells."""
    taken = 0
    for place, mark in enumerate(text):
        taken += _measure_mark(mark)
        if taken > limit:
            return text[:place]
    return text


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Return a text filled with blanks to a number of cells: behind it or, with `right`, in front of it."""
    blanks = " " * (width - display_width(text))
    return blanks + text if right else text + blanks


def wrap(sentence: str, width: int) -> list[str]:
    """Return a sentence as lines of at most `width` cells, broken between words, a longer word within.

    >>> wrap("counted by the table", 10)
    ['counted by', 'the table']
    """
    lines = [""]
    for word in sentence.split():
        joined = f"{lines[-1]} {word}" if lines[-1] else word
        if display_width(joined) <= width:
            lines[-1] = joined
            continue
        if lines[-1]:
            lines.append("")
        while display_width(word) > width:
            part = _take(word, width) or word[0]
            lines[-1:] = [part, ""]
            word = word[len(part) :]
        lines[-1] = word
    return [line for line in lines if line]


def wrap_notes(notes: Sequence[str]) -> str:
    """Return the notes below a table, each on lines of its own, the second and later ones of a note indented."""
    return "\n".join(textwrap.fill(note, _NOTES_WIDTH, subsequent_indent="  ") for note in notes)
