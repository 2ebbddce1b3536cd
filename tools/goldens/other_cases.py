"""The public interface, bad calls and files, the cases of tests/support/first_answers, and the other programs."""

from __future__ import annotations

import csv
import importlib
import io
import json
import pydoc
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fvflops
from fvflops import zoo
from goldens.command_cases import Commands
from goldens.expressions import sections
from goldens.jobs import ROOT, Folder, Job, attempt, captured, file_name, read_cases
from tests.support.first_answers.answers import KINDS, answer, cases_of

# Modules whose paths are public too.
_MODULES = (
    "fvflops",
    "fvflops.zoo",
    "fvflops.integrations.accelerate",
    "fvflops.integrations.lightning",
    "fvflops.integrations.transformers",
    "fvflops.integrations.pytest_plugin",
    "fvflops.reports.count_json",
    "fvflops.reports.html",
    "fvflops.devices.utilisation",
)
# Some twenty classifiers of torchvision: resnet18 to resnet152, vgg, vit, shufflenet, squeezenet, mobilenet_v2.
_SWEPT = "[mrsv][eghiqo]*[0-9]"
# Columns of a sweep that are not the same in each run.
_MEASURED = ("seconds", "checksum")  # of the seconds too


def jobs() -> list[Job]:
    return [
        Job("programs/sweep", _sweep),
        Job("programs/coverage", _list_coverage),
        *(Job(f"answers/{kind}", partial(_write_answers, kind)) for kind in KINDS if kind != "commands"),
        Job("mistakes/calls", _write_calls),
        Job("mistakes/files", _write_files),
        Job("api", _write_api),
    ]


def _write_api(folder: Folder) -> None:
    """Write names, signatures and docstrings, as pydoc writes them."""
    for name in _MODULES:
        folder.write(f"{name}.txt", attempt(lambda name=name: pydoc.plain(pydoc.render_doc(_import(name)))))  # type: ignore[misc]


def _import(name: str) -> Any:
    return importlib.import_module(name)


def _write_answers(kind: str, folder: Folder) -> None:
    for name in cases_of(kind):
        text = json.dumps(answer(f"{kind}: {name}"), indent=1, ensure_ascii=False)
        folder.write(f"{file_name([name])}.json", text)


def _list_coverage(folder: Folder) -> None:
    program = str(ROOT / "tools" / "op_coverage.py")
    for table in ("default", "exact", "fvcore"):
        for kind in ("unsupported", "ignored", "decomposed", "counted"):
            sys.argv = [program, table, "--list", kind]
            code, out, _ = captured(partial(runpy.run_path, program, run_name="__main__"))
            folder.write(f"{table}-{kind}.txt", f"exit code {code}\n{out}")


def _sweep(folder: Folder) -> None:
    options = ("--only", _SWEPT, "--jobs", "1", "--out", "sweep.csv")
    command = [sys.executable, str(ROOT / "tools" / "sweep.py"), "torchvision", *options]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = list(csv.DictReader(io.StringIO(Path("sweep.csv").read_text())))
    lines = [f"exit code {found.returncode}"]
    for row in sorted(rows, key=lambda row: row["model"]):
        lines += [f"{key}: {value}" for key, value in row.items() if key not in _MEASURED] + [""]
    # The last line tells the seconds.
    folder.write("sweep.txt", "\n".join([*lines, *found.stdout.splitlines()[:-1]]))


def _write_files(folder: Folder) -> None:
    """Write what is said of bad tables, budgets and Traces."""

    def use(name: str, text: str) -> Any:
        Path(f"{name}.yaml").write_text(text)
        return fvflops.FlopCountAnalysis(nn.Linear(3, 2), torch.ones(4, 3), table=f"{name}.yaml").total()

    tables = read_cases()["tables"].items()
    folder.write("tables.txt", sections((name, partial(use, name, text)) for name, text in tables))
    commands = Commands(folder)
    for name, text in read_cases()["budgets"].items():
        Path("budget.yaml").write_text(text)
        commands.keep()
        commands.run("check", "nets.py:narrow", "--budget", "budget.yaml", "--name", "net", name=f"budget {name}")
    whole = fvflops.record_call(nn.Linear(3, 2), (torch.ones(4, 3),)).to_json()
    damaged = {
        "no JSON": "{",
        "other JSON": "[]",
        "another format": '{"format": "other"}',
        "cut short": whole[: len(whole) // 2],
        "a newer schema": whole.replace('"schema":1', '"schema":99'),
        "no schema": whole.replace('"schema":1', '"schema":"1"'),
        "no calls": whole.replace('"calls":', '"clals":', 1),
        "an unknown column": whole.replace('"kind":[', '"knid":[', 1),
        "an unknown phase": whole.replace('"forward"', '"forwards"'),
        "a stack that is not there": whole.replace('"stacks":[[],[0]]', '"stacks":[[],[7]]'),
    }
    loads = ((name, partial(fvflops.Trace.from_json, text)) for name, text in damaged.items())
    folder.write("traces.txt", sections(loads))


def _write_calls(folder: Folder) -> None:
    """Write what is said of bad calls of the public interface."""
    linear, x = nn.Linear(3, 2), torch.ones(4, 3)
    flops = fvflops.FlopCountAnalysis(linear, x)
    names = {
        "public": fvflops,
        "nn": nn,
        "torch": torch,
        "zoo": zoo,
        "linear": linear,
        "x": x,
        "flops": flops,
        "analyse": fvflops.FlopCountAnalysis,
        "trace": flops.trace(),
        "profiled": partial(fvflops.ProfileAnalysis, linear, x),
        "tokens": torch.ones(1, 16, dtype=torch.int64),
        "tiny": zoo.build("llama_tiny", device="meta"),
    }
    calls = ((name, partial(eval, text, names)) for name, text in read_cases()["calls"].items())
    _, out, err = captured(lambda: folder.write("calls.txt", sections(calls)))
    folder.write("printed.txt", f"{out}\n{err}")
