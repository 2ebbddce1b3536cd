"""The command lines: every command in its formats, lists and options, on models that show much and count quickly."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from functools import cache, partial
from itertools import product
from pathlib import Path
from string import Template
from typing import Any

import yaml

from goldens import clock, inner
from goldens.commands import Commands, write_help
from goldens.jobs import Folder, Job, captured, variables

LINES = Path(__file__).with_name("command_lines.yaml")
_CHOICE = re.compile("<([^<>]*)>")
_SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50}
_CONFIGS = {
    "bert.json": {**_SIZES, "num_hidden_layers": 2},
    "deeper.json": {**_SIZES, "num_hidden_layers": 3},
    "llama.json": {**_SIZES, "num_hidden_layers": 2},
    "gpt2.json": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 64},
}


def jobs() -> list[Job]:
    """Return a job for each group of command lines."""
    named: dict[str, Callable[[Commands], None]] = {
        name: partial(run_lines, name) for name in read_cases()["jobs"] if name.startswith("cli/")
    }
    named |= {"cli/count/terminal": _count_terminal, "cli/diff/revisions": _diff_revisions, "cli/check": _check}
    return [Job("cli/help", write_help), *(Job(name, partial(_run, run)) for name, run in named.items())]


def run_lines(name: str, commands: Commands) -> None:
    """Run a job's lines, after writing their files."""
    job = read_cases()["jobs"][name]
    for path, text in job.get("files", {}).items():
        Path(path).write_text(text)
    if name == "cli/diff":
        _write_saved()
    commands.keep()
    # How often a profile looks at the clock is part of its output.
    with clock.ticking() if name.startswith("cli/profile") else nullcontext():
        for line in job["lines"].splitlines():
            for words in expand(line, job.get("values", {})):
                commands.run(*words)


def expand(line: str, values: Mapping[str, str]) -> Iterator[list[str]]:
    """Yield the words of each command line that a line stands for."""
    known = {**read_cases()["values"], "TABLES": "|".join(inner.conventions()), **values}
    while "$" in line:
        line = Template(line).substitute(known)
    parts = _CHOICE.split(line)  # text and choices in turn
    choices = (part.split("|") if number % 2 else (part,) for number, part in enumerate(parts))
    yield from (shlex.split("".join(chosen)) for chosen in product(*choices))


@cache
def read_cases() -> dict[str, Any]:
    """Return the values, the jobs' lines, and the tables and budgets with mistakes."""
    with open(LINES, encoding="utf-8") as file:
        return yaml.safe_load(file)


def _run(run: Callable[[Commands], None], folder: Folder) -> None:
    commands = Commands(folder)
    for name, config in _CONFIGS.items():
        with open(name, "w") as file:
            json.dump(config, file)
    commands.keep()
    run(commands)


def _count_terminal(commands: Commands) -> None:
    net, tiny = ("nets.py:net",), ("zoo:llama_tiny", "--input", "1,16:int64")
    for width in ("40", "80", "160"):
        with variables(COLUMNS=width):
            for model in (net, tiny, ("zoo:lenet5",), ("nets.py:hostile",), ("nets.py:unknown",)):
                name = f"{model[0].replace(':', '_')}-{width}"
                commands.run("count", *model, name=name, terminal=True)
                commands.run("count", *model, "--by", "operator", name=f"{name}-operator", terminal=True)
    with variables(NO_COLOR=None, FORCE_COLOR="1", TERM="xterm"):
        for model in (net, tiny):
            commands.run("count", *model, name=f"{model[0].replace(':', '_')}-colour", terminal=True)
            commands.run("count", *model, "--collapse", "--sort", "flops", name=f"{model[0][:4]}-ranked", terminal=True)


def _write_saved() -> None:
    """Write a saved Trace and a torch.export program."""
    import torch
    from torch import nn

    import fvflops
    from fvflops import zoo

    trace = fvflops.FlopCountAnalysis(zoo.build("lenet5").eval(), torch.zeros(1, 1, 28, 28)).trace()
    Path("saved.json").write_text(trace.to_json())
    program = torch.export.export(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (torch.ones(2, 4),))
    captured(lambda: torch.export.save(program, "program.pt2"))


def _diff_revisions(commands: Commands) -> None:
    dates = {"GIT_AUTHOR_DATE": "2026-01-01T00:00:00Z", "GIT_COMMITTER_DATE": "2026-01-01T00:00:00Z"}
    names = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@b"}
    with variables(**dates, **names, GIT_CONFIG_GLOBAL="/dev/null", GIT_CONFIG_SYSTEM="/dev/null"):
        text = "from torch import nn\nimport torch\ndef build():\n    return nn.Linear(4, {}), torch.ones(3, 4)\n"
        with open("net.py", "w") as file:
            file.write(text.format(3))
        for line in (("init", "-q", "-b", "main"), ("add", "net.py"), ("commit", "-q", "-m", "one")):
            subprocess.run(["git", *line], check=True, capture_output=True)
        with open("net.py", "w") as file:
            file.write(text.format(7))
        os.makedirs("other", exist_ok=True)
        with open("other/net.py", "w") as file:
            file.write(text.format(11))
        commands.keep()
        for form in ("text", "markdown", "json"):
            commands.run("diff", "HEAD:net.py:build", "net.py:build", "--format", form)
        commands.run("diff", "net.py:build", "other/net.py:build")
        commands.run("diff", "HEAD:net.py:biuld", "net.py:build")
        commands.run("diff", "HAED:net.py:build", "net.py:build")
        commands.run("diff", "HEAD:nte.py:build", "net.py:build")


_BUDGETS = {
    "kept": "flops: 1K\n    parameters: 100\n    unknown: 0\n",
    "over": "flops: 100\n    macs: {max: 0.1K, tolerance: 10%}\n    activations: {exact: 30}\n    memory: 1MiB\n",
    "noted": "flops: 144\n    modules: {'0': 90, '2': 48, '3': 1}\n    operators: {linear: 140}\n",
    "exact": "table: exact\n    flops: 342\n    parameters: {exact: 59}\n",
}


def _check(commands: Commands) -> None:
    rows = "".join(f"  {name}:\n    {text}" for name, text in _BUDGETS.items())
    budget = f"# what models may cost\nmodels:\n{rows}"

    def write() -> None:
        with open("budget.yaml", "w") as file:
            file.write(budget)

    write()
    commands.keep()
    for name in _BUDGETS:
        commands.run("check", "nets.py:narrow", "--budget", "budget.yaml", "--name", name)
        commands.run("check", "nets.py:wide", "--budget", "budget.yaml", "--name", name, "--summary", "summary.md")
    commands.run("check", "nets.py:unknown", "--budget", "budget.yaml", "--name", "kept")
    commands.run("check", "nets.py:narrow", "--budget", "budget.yaml", "--name", "kept", "--table", "exact")
    # From here on the file is an output.
    os.remove("budget.yaml")
    commands.keep()
    for name in (*_BUDGETS, "new"):
        for options in ((), ("--depth", "1"), ("--table", "exact")):
            write()
            commands.run("check", "nets.py:wide", "--budget", "budget.yaml", "--name", name, "--update", *options)
    commands.run("check", "zoo:lenet5", "--budget", "made.yaml", "--update", "--depth", "2")
