#!/usr/bin/env python3
"""Counts random networks in every way and compares: tools/fuzz.py [--networks N] [--seed-from N] [--seed N].

A network is made from a number alone. What a run by shapes, a real run, a recording and the analysis of a training step
say of it is laid side by side, and beside the multiply-adds that were computed by hand for each block. For each
difference the smallest network that shows it is printed, with the number that replays it; then the exit status is 1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from tests.support.fuzz.comparison import compare, explain  # noqa: E402
from tests.support.fuzz.network import KINDS, Network, Plan  # noqa: E402


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(prog="tools/fuzz.py", description=__doc__.splitlines()[0])
    parser.add_argument("--networks", type=_count, default=1000, metavar="N", help="how many networks (default: 1000)")
    parser.add_argument("--seed-from", type=_count, default=0, metavar="N", help="the first one's number (default: 0)")
    parser.add_argument("--seed", type=_count, metavar="N", help="one network alone, which is described")
    return parser.parse_args(argv)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 on")
    return int(text)


def main() -> int:
    """Run the comparisons and return the exit status."""
    arguments = parse()
    torch.set_num_threads(1)  # the networks are small
    if arguments.seed is not None:
        plan = Plan(arguments.seed)
        lines = compare(plan)
        print(explain(plan) if lines else f"no difference in {Network(plan).describe()}")
        return bool(lines)
    begun, failed, kinds = time.monotonic(), 0, Counter[str]()
    for seed in range(arguments.seed_from, arguments.seed_from + arguments.networks):
        plan = Plan(seed)
        kinds.update({name for _, name in plan.choose()[3]})
        if compare(plan):
            failed += 1
            print(explain(plan), flush=True)
    seconds = time.monotonic() - begun
    print(
        f"{arguments.networks:,} networks of {len(kinds)} of {len(KINDS)} kinds of block: "
        f"{failed:,} with differences, {seconds:.0f} s"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
