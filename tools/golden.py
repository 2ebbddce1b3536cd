#!/usr/bin/env python3
"""Writes all that fvflops counts and prints as a tree of text files, and compares two such trees.

    tools/golden.py write DIR [--only PATTERN] [--jobs 2]
    tools/golden.py compare OLD NEW [--lines N]

For changes that are to change nothing: write before and after, and compare. Files that differ in a number are told
apart from those that differ in words alone. The exit code of `compare` is 1 where a number differs, or a file is
missing or new, and else 0; `write` exits with 1 where an output could not be made.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent))

from goldens import clock

if TYPE_CHECKING:
    from goldens.jobs import Job

# Variables to set before Python starts, and to unset.
ENVIRONMENT = {
    "COLUMNS": "80",
    "LINES": "24",
    "NO_COLOR": "1",
    "PYTHON_COLORS": "0",
    "TERM": "dumb",
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "MPLBACKEND": "agg",
}
UNSET = ("FORCE_COLOR", "CLICOLOR_FORCE", "GITHUB_STEP_SUMMARY", "PYTHONWARNINGS")
# Jobs whose outputs are the same whatever libraries are loaded.
_WITHOUT_LIBRARIES = ("cli/help", "counts/zoo/lenet5/train")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/golden.py", description=(__doc__ or "").partition("\n")[0])
    actions = parser.add_subparsers(dest="action", required=True)
    write = actions.add_parser("write", help="write the outputs of this checkout")
    write.add_argument("folder", type=Path, metavar="DIR", help="an empty folder, or none yet")
    write.add_argument("--only", action="append", default=[], metavar="PATTERN", help="such as 'counts/zoo/*'")
    write.add_argument("--jobs", type=int, default=2, metavar="N", help="processes at a time; default: 2")
    compared = actions.add_parser("compare", help="compare two folders")
    compared.add_argument("old", type=Path, metavar="OLD")
    compared.add_argument("new", type=Path, metavar="NEW")
    compared.add_argument("--lines", type=int, default=20, metavar="N", help="of each diff, 0 for all; default: 20")
    return parser.parse_args(argv)


def write(folder: Path, only: list[str], processes: int) -> int:
    """Write the outputs of the jobs that match."""
    if folder.exists() and any(folder.iterdir()):
        print(f"golden: {folder} is not empty: name another folder", file=sys.stderr)
        return 2
    from goldens.jobs import ROOT, run_jobs

    import fvflops

    if not Path(fvflops.__file__).resolve().is_relative_to(ROOT):
        raise ImportError(f"fvflops is imported from {fvflops.__file__}, and not from {ROOT}")
    begun = time.monotonic()
    jobs = [job for job in find_jobs() if not only or any(fnmatchcase(job.name, pattern) for pattern in only)]
    if not jobs:
        print(f"golden: --only {' '.join(only)} matches no job", file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    import_libraries(jobs)
    failed = run_jobs(jobs, folder.resolve(), processes, lambda text: print(text, file=sys.stderr, flush=True))
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    print(f"{len(files):,} files, {size / 1e6:.1f} MB, of {ROOT}, in {time.monotonic() - begun:.0f} s")
    for name in failed:
        print(f"failed: {name}")
    return 1 if failed else 0


def find_jobs() -> list[Job]:
    """Return all jobs, long ones first."""
    from goldens import command_cases, counts, features, other_cases, timed

    return [job for part in (command_cases, other_cases, features, timed, counts) for job in part.jobs()]


def import_libraries(jobs: Sequence[Job]) -> None:
    """Import what jobs share, the same for all: which ops are registered depends on it, and messages on that."""
    import torch

    import fvflops
    from fvflops.formulas import shipped_tables

    # Imports of torch and fvflops at their first use, and the tables.
    for table in shipped_tables():
        fvflops.FlopCountAnalysis(torch.nn.Linear(2, 2), torch.ones(1, 2), table=table).total()
    if any(job.name not in _WITHOUT_LIBRARIES for job in jobs):
        import timm  # noqa: F401
        import torchvision  # noqa: F401
        import transformers

        # Its package imports the rest when a model is first named.
        transformers.BertModel, transformers.GPT2LMHeadModel, transformers.LlamaModel  # noqa: B018


def main(argv: list[str]) -> int:
    arguments = parse(argv)
    if arguments.action == "compare":
        from goldens.comparison import compare

        return compare(arguments.old, arguments.new, arguments.lines)
    return write(arguments.folder, arguments.only, arguments.jobs)


if __name__ == "__main__":
    if sys.argv[1:2] == ["write"] and os.environ.get("FVFLOPS_GOLDEN") is None:
        kept = {name: value for name, value in os.environ.items() if name not in UNSET}
        root = str(Path(__file__).resolve().parent.parent)  # for the processes that commands start
        again = {**kept, **ENVIRONMENT, "PYTHONPATH": root, "FVFLOPS_GOLDEN": "1"}
        os.execve(sys.executable, [sys.executable, *sys.argv], again)
    clock.install()
    sys.exit(main(sys.argv[1:]))
