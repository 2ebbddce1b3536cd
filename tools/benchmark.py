#!/usr/bin/env python3
"""Measures the cost of counting as ratios within one process: tools/benchmark.py [--quick] [--only NAME] [--json PATH].

The contenders of a case (the bare model on the meta device, a no-op dispatch mode, torch's FlopCounterMode, fvcore,
fvflops cold and warm) run once in each round, in a shuffled order, on one thread. A ratio is taken in each round; shown
are medians with quartiles, beside the aim where there is one. Other sections are a process' first count beside `import
torch`, and the times that fvflops measures beside torch.profiler's and a stopwatch's.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
import time
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import torch  # noqa: E402
from benchmarking.measuring import Limits, Section  # noqa: E402
from benchmarking.sections import SECTIONS, Effort  # noqa: E402

from tests.support.library_versions import installed_versions  # noqa: E402

LIBRARIES = ("torch", "fvcore", "torchvision", "transformers")
QUICK = Effort(limits=Limits(rounds=3, seconds=1, least=1), processes=1, share=0.1)


def describe_machine() -> dict[str, Any]:
    """Return the versions and the machine's kind, which every figure depends on."""
    return {
        "python": platform.python_version(),
        **installed_versions(LIBRARIES),
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0] + ".")
    limits = Limits()
    parser.add_argument("--rounds", type=int, default=limits.rounds, help="at most so many rounds a case and step")
    parser.add_argument("--seconds", type=float, default=limits.seconds, help="no new round of a case after so long")
    parser.add_argument("--quick", action="store_true", help="few rounds: whether it runs, not what it costs")
    parser.add_argument("--only", action="append", choices=list(SECTIONS), help="only this; can be given again")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "benchmark.json", help="where to write")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    effort = QUICK if arguments.quick else Effort(Limits(arguments.rounds, arguments.seconds, limits.least))
    begun = time.perf_counter()
    sections = []
    for name in arguments.only or SECTIONS:
        for measure in SECTIONS[name]:
            try:
                sections.append(measure(effort))
            except (ImportError, RuntimeError) as error:
                whole_name = ", ".join([name, *getattr(measure, "args", ())])
                sections.append(Section(whole_name, failures={"the section": f"{type(error).__name__}: {error}"}))
            print(f"{time.perf_counter() - begun:5.0f} s  {sections[-1].name}", file=sys.stderr)
    machine = describe_machine()
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    for section in sections:
        print("", *section.lines(), sep="\n")
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(
        json.dumps({"machine": machine, "sections": [asdict(item) for item in sections]}, indent=1)
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
