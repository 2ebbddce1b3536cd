"""Mistakes: what is said of bad command lines, bad calls of the public interface, and bad tables and budgets."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

import fvflops
from fvflops import zoo
from goldens.command_cases import Commands
from goldens.expressions import sections
from goldens.jobs import Folder, Job, captured, read_cases


def jobs() -> list[Job]:
    return [Job("mistakes/calls", _write_calls), Job("mistakes/files", _write_files)]


def _write_files(folder: Folder) -> None:
    def load(name: str, text: str) -> Any:
        with open(f"{name}.yaml", "w") as file:
            file.write(text)
        return fvflops.load_table(f"{name}.yaml")

    def use(name: str, text: str) -> Any:
        table = load(name, text)
        return fvflops.FlopCountAnalysis(nn.Linear(3, 2), torch.ones(4, 3), table=table).total()

    tables = read_cases()["tables"].items()
    folder.write("tables.txt", sections((name, partial(use, name, text)) for name, text in tables))
    commands = Commands(folder)
    for name, text in read_cases()["budgets"].items():
        with open("budget.yaml", "w") as file:
            file.write(text)
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
    linear, x = nn.Linear(3, 2), torch.ones(4, 3)
    analyse = fvflops.FlopCountAnalysis
    flops = analyse(linear, x)
    names = {
        "public": fvflops,
        "nn": nn,
        "torch": torch,
        "zoo": zoo,
        "linear": linear,
        "x": x,
        "analyse": analyse,
        "flops": flops,
        "trace": flops.trace(),
        "profiled": partial(fvflops.ProfileAnalysis, linear, x),
        "tokens": torch.ones(1, 16, dtype=torch.int64),
        "tiny": zoo.build("llama_tiny", device="meta"),
    }
    calls = ((name, partial(eval, text, names)) for name, text in read_cases()["calls"].items())
    _, out, err = captured(lambda: folder.write("calls.txt", sections(calls)))
    folder.write("printed.txt", f"{out}\n{err}")
