"""Command lines, each with its output, files and exit code: every command in its formats, lists and options."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import struct
import subprocess
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

from fvflops.cli import COMMANDS, main
from goldens import clock
from goldens.jobs import Folder, Job, captured, expand, file_name, read_cases, variables

_SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50}
_CONFIGS = {
    "bert.json": {**_SIZES, "num_hidden_layers": 2},
    "deeper.json": {**_SIZES, "num_hidden_layers": 3},
    "llama.json": {**_SIZES, "num_hidden_layers": 2},
    "gpt2.json": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 64},
}


class Commands:
    """Runs command lines in a folder of its own, and writes a file for each."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._main = main
        self._kept: set[str] = set()
        self._names: set[str] = set()
        shutil.copyfile(Path(__file__).with_name("nets.py"), "nets.py")
        self.keep()

    def keep(self) -> None:
        """Take the files that there are now for inputs: they are not told of as outputs."""
        self._kept = set(self._files())

    def run(self, *words: str, name: str | None = None, terminal: bool = False) -> None:
        """Run one command line and write down what came out; the files that it wrote are told, and taken away."""
        code, out, err = captured(lambda: self._main(list(words)), terminal=terminal)
        parts = [f"$ fvflops {' '.join(words)}", f"exit code {code}", "--- stdout", out.rstrip("\n")]
        if err:
            parts += ["--- stderr", err.rstrip("\n")]
        for path in self._files():
            if path not in self._kept:
                parts += [f"--- file {path}", _read(Path(path)).rstrip("\n")]
                os.remove(path)
        name = name or file_name(words)
        if name in self._names:  # words that differ only in what a file's name cannot hold
            name += "_" + hashlib.sha256(" ".join(words).encode()).hexdigest()[:8]
        self._names.add(name)
        self._folder.write(f"{name}.txt", "\n".join(parts))

    def _files(self) -> list[str]:
        paths = (path for path in Path(".").rglob("*") if path.is_file())
        return sorted(str(path) for path in paths if "__pycache__" not in path.parts and ".git" not in path.parts)


def _read(path: Path) -> str:
    """Return the text of a file; of a picture made of pixels its size and a digest."""
    data = path.read_bytes()
    if data.startswith(b"\x89PNG"):
        width, height = struct.unpack(">II", data[16:24])
        return f"PNG, {width} x {height}, sha256 {hashlib.sha256(data).hexdigest()}"
    return data.decode("utf-8", errors="backslashreplace")


def write_help(folder: Folder) -> None:
    commands = Commands(folder)
    commands.run("--help", name="fvflops")
    commands.run("--version", name="version")
    for name in COMMANDS:
        commands.run(name, "--help", name=name)


def jobs() -> list[Job]:
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
            for words in map(shlex.split, expand(line, job.get("values", {}))):
                commands.run(*words)


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
