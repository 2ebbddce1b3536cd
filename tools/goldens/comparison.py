"""Compare two folders of golden outputs: which files differ in numbers, and which only in words."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

_DIGITS = re.compile(r"\d+")
_WIDEST = 240  # characters of a shown line
_GROUPS = 40  # changes of words listed, each with its number of files


def compare(old: Path, new: Path, lines: int) -> int:
    """Print how two folders differ; return 1 if a number differs or a file is missing or new, else 0.

    A file differs in a number if its sequence of digit runs differs. Changes of words only are listed once for all
    files.
    """
    for folder in (old, new):
        if not folder.is_dir():
            print(f"golden: there is no folder {folder}")
            return 2
    before, after = _files(old), _files(new)
    missing, added = sorted(before - after), sorted(after - before)
    numbers, only_words = list[str](), list[str]()
    for name in sorted(before & after):
        one, two = (folder.joinpath(name).read_bytes() for folder in (old, new))
        if one != two:
            texts = (one.decode(errors="replace"), two.decode(errors="replace"))
            (only_words if numbers_of(texts[0]) == numbers_of(texts[1]) else numbers).append(name)
    for title, names in ((f"only in {old}", missing), (f"only in {new}", added)):
        for name in names:
            print(f"{title}: {name}")
    for name in numbers:
        print(f"\nNUMBERS DIFFER: {name}")
        _print_cut(diff(old / name, new / name), lines)
    if only_words:
        _print_groups(old, new, only_words, lines)
    print(
        f"{len(before & after):,} files in both: {len(numbers):,} differ in numbers, "
        f"{len(only_words):,} in words only; "
        f"{len(missing):,} only in the old folder, {len(added):,} only in the new one"
    )
    return 1 if numbers or missing or added else 0


def numbers_of(text: str) -> list[str]:
    """Return the runs of digits in a text, in order.

    >>> numbers_of("4,089 flops in 2.5 s")
    ['4', '089', '2', '5']
    """
    return _DIGITS.findall(text)


def diff(old: Path, new: Path) -> Iterator[str]:
    """Return the lines of the unified diff of two files, without its two header lines."""
    one, two = (path.read_text(encoding="utf-8", errors="replace").splitlines() for path in (old, new))
    found = difflib.unified_diff(one, two, lineterm="", n=1)
    next(found, None)
    next(found, None)
    return found


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def _print_cut(lines: Iterator[str], limit: int) -> None:
    shown = list(lines)
    for line in shown[: limit or None]:
        print("  " + (line if len(line) <= _WIDEST else line[:_WIDEST] + " ..."))
    if limit and len(shown) > limit:
        print(f"  ... {len(shown) - limit:,} lines more: --lines 0 shows all")


def _print_groups(old: Path, new: Path, names: list[str], limit: int) -> None:
    """Print each change of words once, with its number of files; numbers in it are written as #."""
    files: Counter[tuple[str, ...]] = Counter()
    example: dict[tuple[str, ...], str] = {}
    for name in names:
        for change in set(_changes(diff(old / name, new / name))):
            files[change] += 1
            example.setdefault(change, name)
    print(f"\nWORDS ONLY, in {len(names):,} files; {len(files):,} changes:")
    for change, count in files.most_common(_GROUPS):
        print(f"\nin {count:,} files, such as {example[change]}:")
        _print_cut(iter(change), limit)
    if len(files) > _GROUPS:
        print(f"\n... {len(files) - _GROUPS:,} changes more")


def _changes(lines: Iterator[str]) -> Iterator[tuple[str, ...]]:
    for is_change, group in groupby(lines, lambda line: line[:1] in "+-"):
        if is_change:
            yield tuple(_DIGITS.sub("#", line) for line in group)
