"""The outputs of the repository's other programs."""

from __future__ import annotations

import csv
import io
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

from goldens.jobs import ROOT, Folder, Job, captured

_TABLES = ("default", "exact", "fvcore")
_CLASSES = ("unsupported", "ignored", "decomposed", "counted")
# Some twenty classifiers of torchvision: resnet18 to resnet152, vgg, vit, shufflenet, squeezenet, mobilenet_v2.
_SWEPT = "[mrsv][eghiqo]*[0-9]"
# Columns of a sweep that are not the same in each run.
_MEASURED = ("seconds", "checksum")  # of the seconds too


def jobs() -> list[Job]:
    return [Job("programs/sweep", _sweep), Job("programs/coverage", _coverage)]


def _coverage(folder: Folder) -> None:
    program = str(ROOT / "tools" / "op_coverage.py")
    for table in _TABLES:
        for kind in _CLASSES:
            sys.argv = [program, table, "--list", kind]
            code, out, _ = captured(partial(runpy.run_path, program, run_name="__main__"))
            folder.write(f"{table}-{kind}.txt", f"exit code {code}\n{out}")


def _sweep(folder: Folder) -> None:
    program = str(ROOT / "tools" / "sweep.py")
    options = ("--only", _SWEPT, "--jobs", "1", "--out", "sweep.csv")
    found = subprocess.run(
        [sys.executable, program, "torchvision", *options], capture_output=True, text=True, check=False
    )
    rows = list(csv.DictReader(io.StringIO(Path("sweep.csv").read_text())))
    lines = [f"exit code {found.returncode}"]
    for row in sorted(rows, key=lambda row: row["model"]):
        lines += [f"{key}: {value}" for key, value in row.items() if key not in _MEASURED] + [""]
    # The last line tells the seconds.
    folder.write("sweep.txt", "\n".join([*lines, *found.stdout.splitlines()[:-1]]))
