#!/usr/bin/env python3
"""Writes the results of pytest into the table of docs/reference/versions.md: tools/matrix_table.py --torch X.Y.Z FILE.

FILE is written by `pytest --junitxml`. The row of this Python and that torch is replaced or added; other rows are kept.
Prints the tests that failed.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from documentation.page_parts import replace_part

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "versions.md"
_HEADER = "| Python | torch | passed | skipped | failed |\n|:---|:---|---:|---:|---:|\n"
_ROW = re.compile(r"^\| (3\.\d+) \| (\d[\w.+]*) \| ([\d,]+ \| [\d,]+ \| [\d,]+) \|$", re.MULTILINE)


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


def read_rows(page: str) -> dict[tuple[str, str], str]:
    """Return the rows of the page, by Python and torch.

    >>> read_rows("| 3.11 | 2.13.0 | 5,120 | 12 | 0 |")
    {('3.11', '2.13.0'): '5,120 | 12 | 0'}
    """
    return {(python, torch): numbers for python, torch, numbers in _ROW.findall(page)}


def update(page: str, versions: tuple[str, str], numbers: str) -> str:
    """Return the page with the numbers of a Python and a torch in its table, which is sorted by these versions."""
    rows = read_rows(page) | {versions: numbers}
    lines = [f"| {' | '.join(pair)} | {rows[pair]} |\n" for pair in sorted(rows, key=lambda pair: [*map(_order, pair)])]
    return replace_part(page, "<!-- matrix -->\n", "<!-- end of matrix -->", _HEADER + "".join(lines))


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
    counts = passed, skipped, len(failed)
    numbers = " | ".join(f"{count:,}" for count in counts)
    page = update(arguments.page.read_text(), (arguments.python, arguments.torch), numbers)
    arguments.page.write_text(page)
    result = ", ".join(f"{count:,} {name}" for count, name in zip(counts, ("passed", "skipped", "failed"), strict=True))
    print(f"Python {arguments.python}, torch {arguments.torch}: {result}")
    print(*failed, sep="\n", end="\n" if failed else "")
    return 0


if __name__ == "__main__":
    sys.exit(main())
