#!/usr/bin/env python3
"""Writes a result of pytest into the table of docs/reference/versions.md: tools/matrix_table.py --torch X.Y.Z FILE.

FILE is written by `pytest --junitxml`. The row of this Python and that torch is replaced or added; other rows are kept.
Prints the tests that failed.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from documentation.page_parts import replace_part

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "versions.md"
_HEADER = "| Python | torch | passed | skipped | failed |\n|:---|:---|---:|---:|---:|\n"
_ROW = re.compile(r"^\| (3\.\d+) \| (\d[\w.+]*) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", re.MULTILINE)


class Result(NamedTuple):
    """Numbers of tests by outcome, for a version of Python ("3.11") and of torch ("2.13.0")."""

    python: str
    torch: str
    passed: int
    skipped: int
    failed: int


def read_junit(path: Path) -> tuple[int, int, list[str]]:
    """Return the numbers of tests that passed and were skipped, and the names of failed ones."""
    passed = skipped = 0
    failed = []
    for case in ElementTree.parse(path).iter("testcase"):
        outcomes = {child.tag for child in case}
        if outcomes & {"failure", "error"}:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in outcomes:
            skipped += 1
        else:
            passed += 1
    return passed, skipped, failed


def read_rows(page: str) -> list[Result]:
    """Return the rows of the page.

    >>> read_rows("| 3.11 | 2.13.0 | 5,120 | 12 | 0 |")
    [Result(python='3.11', torch='2.13.0', passed=5120, skipped=12, failed=0)]
    """
    return [
        Result(python, torch, *(int(number.replace(",", "")) for number in numbers))
        for python, torch, *numbers in _ROW.findall(page)
    ]


def write_rows(rows: Iterable[Result]) -> str:
    """Return the table in Markdown, sorted by versions, with the last row given for each pair of them."""
    latest = {(row.python, row.torch): row for row in rows}
    lines = [
        f"| {row.python} | {row.torch} | {row.passed:,} | {row.skipped:,} | {row.failed:,} |\n"
        for row in sorted(latest.values(), key=lambda row: (_order(row.python), _order(row.torch)))
    ]
    return _HEADER + "".join(lines)


def update(page: str, result: Result) -> str:
    """Return the page with a result in its table, which is between its two comments."""
    table = write_rows([*read_rows(page), result])
    return replace_part(page, "<!-- matrix -->\n", "<!-- end of matrix -->", table)


def _order(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("junit", type=Path)
    parser.add_argument("--torch", required=True, help="version of torch that was tested")
    parser.add_argument("--python", default=".".join(platform.python_version_tuple()[:2]), help="version of Python")
    parser.add_argument("--page", type=Path, default=PAGE)
    arguments = parser.parse_args(argv)
    passed, skipped, failed = read_junit(arguments.junit)
    result = Result(arguments.python, arguments.torch, passed, skipped, len(failed))
    arguments.page.write_text(update(arguments.page.read_text(), result))
    print(
        f"Python {result.python}, torch {result.torch}: {passed:,} passed, {skipped:,} skipped, {len(failed):,} failed"
    )
    print(*failed, sep="\n", end="\n" if failed else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
