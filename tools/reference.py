#!/usr/bin/env python3
"""Writes the pages of docs/reference that are generated from the code: tools/reference.py [--output FOLDER]."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

from documentation import command_line, devices  # noqa: E402

PAGES = {"command_line.md": command_line.page, "devices.md": devices.page}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "reference", metavar="FOLDER")
    folder = parser.parse_args(argv).output
    for name, make_page in PAGES.items():
        (folder / name).write_text(make_page(), encoding="utf-8")
        print(folder / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
