"""Ranges of names that differ only in numbers, such as names of layers."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_DIGITS = 18  # a longer number is read as a name


def find_pattern(name: str | None) -> str | None:
    """Return a dotted name with # for each numeric part; None for None.

    >>> find_pattern("layers.10.fc")
    'layers.#.fc'
    """
    return None if name is None else ".".join("#" if _is_number(part) else part for part in name.split("."))


def format_range(names: Sequence[str]) -> str:
    """Return one name for names of the same pattern, with a range for numbers that differ.

    >>> format_range(["layers.0.fc", "layers.1.fc", "layers.2.fc"])
    'layers.0–2.fc'
    >>> format_range(["0.1", "1.1", "2.1"])  # not 0–2.1, which reads as a range from 0 to 2.1
    '{0–2}.1'
    """
    if not names:
        return ""
    parts = []
    for column in zip(*(name.split(".") for name in names), strict=True):
        values = set(column)
        numbers = sorted(int(value) for value in values) if len(values) > 1 else []
        if not numbers:
            parts.append(column[0])
        elif numbers == list(range(numbers[0], numbers[-1] + 1)):
            parts.append(f"{numbers[0]}–{numbers[-1]}")
        else:
            parts.append(",".join(map(str, numbers)) if len(numbers) <= 4 else f"{numbers[0]}…{numbers[-1]}")
    if sum(part[:1].isdigit() for part in parts) > 1:
        parts = [part if part.isdigit() or not part[:1].isdigit() else f"{{{part}}}" for part in parts]
    return ".".join(parts)


def _is_number(part: str) -> bool:
    return part.isdecimal() and len(part) <= _MAX_DIGITS
