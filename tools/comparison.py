#!/usr/bin/env python3
"""Compares fvflops with other tools on the same models, and writes the tables of docs/comparison.md.

tools/comparison.py [--only TOOL,...] [--cases MODEL,...] [--page PAGE] needs the extras `peers` and `models`, for two
tools also `pip install --no-deps --target FOLDER torchprofile torchlens graphviz` and PYTHONPATH=FOLDER. A tool that is
not installed is named and left out. Each count is compared with closed-form arithmetic; each runs in a process of its
own, in one thread. Exits with 1 if a count of fvflops is wrong.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch  # noqa: E402
from comparing.cases import CASES  # noqa: E402
from comparing.counters import COUNTERS  # noqa: E402
from comparing.measuring import find_version, measure  # noqa: E402
from comparing.page import count_table, is_right, write_tables  # noqa: E402

from tests.support.schemas.torchvision_schemas import define_torchvision_schemas  # noqa: E402


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", metavar="TOOL,...", help="ask these tools only, named as in the tables")
    parser.add_argument("--cases", metavar="MODEL,...", help="count these models only, named as in the tables")
    parser.add_argument("--page", metavar="PAGE", help="replace the tables of this page, docs/comparison.md")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    define_torchvision_schemas()
    only = arguments.only.split(",") if arguments.only else [counter.title for counter in COUNTERS]
    names = arguments.cases.split(",") if arguments.cases else [case.title for case in CASES]
    versions = {counter: find_version(counter) for counter in COUNTERS if counter.title in only}
    for counter, version in versions.items():
        if version is None:
            print(f"{counter.title} is not installed here, and is left out.", file=sys.stderr)
    installed = {counter: version for counter, version in versions.items() if version is not None}
    results = measure([case for case in CASES if case.title in names], installed)
    if arguments.page:
        page = Path(arguments.page)
        page.write_text(write_tables(page.read_text(), results))
    print(count_table(results))
    return int(not all(map(is_right, results.get("fvflops", {"counts": {}})["counts"].values())))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main())
