"""Measure, truncate, pad and wrap text by its width in terminal cells; tables of such text."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Sequence
from functools import lru_cache


def display_width(text: str) -> int:
    """Return the width of a printable text in cells: two for a wide character, none for a combining mark.

    >>> display_width("layer"), display_width("层"), display_width("e\u0301")
    (5, 2, 1)
    """
    return len(text) if text.isascii() else sum(map(_character_width, text))


@lru_cache(maxsize=4096)
def _character_width(character: str) -> int:
    # U+FE0F turns a narrow character into an emoji, two cells wide.
    if unicodedata.category(character) in ("Mn", "Me") and character != "\ufe0f":
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def truncate_middle(text: str, limit: int, *, ellipsis: str = "…") -> str:
    """Return a text, with an ellipsis in place of its middle if it is wider than `limit` cells.

    >>> truncate_middle("layers.0.self_attn", 12), truncate_middle("fc", 12), truncate_middle("layers", 1)
    ('layers…_attn', 'fc', '…')
    """
    if display_width(text) <= limit:
        return text
    available = limit - len(ellipsis)
    if available < 1:
        return ellipsis[:limit]
    head = _longest_prefix(text, (available + 1) // 2)
    tail = _longest_prefix(text[::-1], available - display_width(head))[::-1]
    while tail and _character_width(tail[0]) == 0:  # a combining mark without its letter
        tail = tail[1:]
    return head + ellipsis + tail


def _longest_prefix(text: str, limit: int) -> str:
    width = 0
    for index, character in enumerate(text):
        width += _character_width(character)
        if width > limit:
            return text[:index]
    return text


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Return a text padded with blanks to a width in cells; with `right` it is right-aligned."""
    blanks = " " * (width - display_width(text))
    return blanks + text if right else text + blanks


def wrap(sentence: str, width: int) -> list[str]:
    """Return a sentence as lines of at most `width` cells, broken between words or within a longer word.

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
            part = _longest_prefix(word, width) or word[0]
            lines[-1:] = [part, ""]
            word = word[len(part) :]
        lines[-1] = word
    return [line for line in lines if line]


def wrap_legend(entries: Sequence[str], width: int) -> list[str]:
    """Return the entries of a legend as lines, broken between entries where they fit."""
    lines: list[str] = []
    for number, entry in enumerate(entries, start=1):
        text = entry + "," * (number < len(entries))
        if lines and display_width(f"{lines[-1]} {text}") <= width:
            lines[-1] += f" {text}"
        else:
            lines += wrap(text, width)
    return lines


GAP = "  "


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]], *, left: Collection[int] = (0,)) -> str:
    """Return a table in which the columns with the indexes `left` are left-aligned, the others right-aligned."""
    widths = [max(map(display_width, column)) for column in zip(headers, *rows, strict=True)]
    lines = []
    for cells in (headers, ["-" * width for width in widths], *rows):
        padded = zip(cells, widths, strict=True)
        lines.append(GAP.join(pad(*cell, right=index not in left) for index, cell in enumerate(padded)).rstrip())
    return "\n".join(lines)
