#!/usr/bin/env python3
"""Measures the cost of counting as ratios within one process: tools/benchmark.py [--quick] [--only NAME].

The contenders of a case (the bare model on the meta device, a no-op dispatch mode, torch's FlopCounterMode, fvcore,
fvflops cold and warm) run once in each round, in a shuffled order, on one thread. A ratio is taken in each round; the
output has medians with quartiles, the number of rounds, and a target where there is one. Other sections are a
process's first count compared with `import torch`, repeated counts, and real training steps.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import sys
import time
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch  # noqa: E402
from benchmarking.measuring import Effort  # noqa: E402
from benchmarking.sections import SECTIONS  # noqa: E402

from tests.support.library_versions import installed_versions  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0] + ".")
    parser.add_argument("--quick", action="store_true", help="few rounds: tests that it runs, the figures are noise")
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="only this section; can be repeated")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    effort = Effort(rounds=3, seconds=1, processes=1, share=0.1) if arguments.quick else Effort()
    versions = {"python": platform.python_version(), **installed_versions(("torch", "fvcore", "torchvision"))}
    print(*(f"{name} {version}" for name, version in versions.items()), f"{os.cpu_count()} cores", sep=", ")
    begun = time.perf_counter()
    for name in arguments.only or SECTIONS:
        for measure in SECTIONS[name]:
            print(f"\n{name}, {time.perf_counter() - begun:.0f} s")
            try:
                measure(effort).print()
            except (ImportError, RuntimeError) as error:
                print(f"  failed: {type(error).__name__}: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
