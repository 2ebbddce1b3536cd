"""Command lines, each with its output, files and exit code: every command in its formats, lists and options."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import struct
import subprocess
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import nn

import fvflops
from fvflops import zoo
from fvflops.cli import main
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
        self._kept: dict[Path, bytes] = {}
        self._names: set[str] = set()
        shutil.copyfile(Path(__file__).with_name("nets.py"), "nets.py")
        self.keep()

    def keep(self) -> None:
        """Take the files that there are now for inputs: they are not told of as outputs, unless they change."""
        self._kept = {path: path.read_bytes() for path in self._files()}

    def run(self, *words: str, name: str = "", terminal: bool = False) -> None:
        """Run one command line, and write its output and the files that it wrote, which are restored or removed."""
        code, out, err = captured(lambda: main(list(words)), terminal=terminal)
        parts = [f"$ fvflops {' '.join(words)}", f"exit code {code}", "--- stdout", out.rstrip("\n")]
        if err:
            parts += ["--- stderr", err.rstrip("\n")]
        for path in self._files():
            if path.read_bytes() != self._kept.get(path):
                parts += [f"--- file {path}", _read(path).rstrip("\n")]
                path.unlink()
                if path in self._kept:
                    path.write_bytes(self._kept[path])
        name = name or file_name(words)
        if name in self._names:  # words that differ only in what a file's name cannot hold
            name += "_" + hashlib.sha256(" ".join(words).encode()).hexdigest()[:8]
        self._names.add(name)
        self._folder.write(f"{name}.txt", "\n".join(parts))

    def _files(self) -> list[Path]:
        paths = (path for path in Path(".").rglob("*") if path.is_file())
        return sorted(path for path in paths if "__pycache__" not in path.parts and ".git" not in path.parts)


def _read(path: Path) -> str:
    """Return the text of a file; of a picture made of pixels its size and a digest."""
    data = path.read_bytes()
    if data.startswith(b"\x89PNG"):
        width, height = struct.unpack(">II", data[16:24])
        return f"PNG, {width} x {height}, sha256 {hashlib.sha256(data).hexdigest()}"
    return data.decode("utf-8", errors="backslashreplace")


def jobs() -> list[Job]:
    return [Job(name, partial(run_lines, name)) for name in read_cases()["jobs"]]


def run_lines(name: str, folder: Folder) -> None:
    """Run a job's lines, after writing its files and running its commands of the shell."""
    job, commands = read_cases()["jobs"][name], Commands(folder)
    for path, text in {
        **{path: json.dumps(config) for path, config in _CONFIGS.items()},
        **job.get("files", {}),
    }.items():
        Path(path).write_text(text)
    if name == "cli/diff":
        _write_saved()
    if "shell" in job:
        subprocess.run(job["shell"], shell=True, check=True, capture_output=True)
    commands.keep()
    # How often a profile looks at the clock is part of its output.
    with clock.ticking() if name.startswith("cli/profile") else nullcontext(), variables(**job.get("variables", {})):
        for line in job["lines"].splitlines():
            for words in map(shlex.split, expand(line, job.get("values", {}))):
                commands.run(*words, terminal=job.get("terminal", False))


def _write_saved() -> None:
    trace = fvflops.FlopCountAnalysis(zoo.build("lenet5").eval(), torch.zeros(1, 1, 28, 28)).trace()
    Path("saved.json").write_text(trace.to_json())
    program = torch.export.export(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), (torch.ones(2, 4),))
    captured(lambda: torch.export.save(program, "program.pt2"))
