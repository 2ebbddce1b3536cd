"""Run jobs, each of which writes a part of the golden outputs to a folder, in a forked process each."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import random
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from string import Template
from typing import Any
from unittest.mock import patch

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent

_CHOICE = re.compile("<([^<>]*)>")
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
_ESCAPE = re.compile(r"[^A-Za-z0-9=.+-]+")
_LONGEST = 100  # characters of a file's name


@dataclass(frozen=True)
class Job:
    """A function that writes golden files, and its name, which is also the name of their folder."""

    name: str
    run: Callable[[Folder], Any]


class Folder:
    """The folder to which a job writes its files, as normalised text."""

    def __init__(self, path: Path, temporary: Path) -> None:
        self._path = path
        self._replaced = [
            (str(temporary.resolve()), "<tmp>"),
            (str(temporary), "<tmp>"),
            (str(ROOT), "<root>"),
            *_installed(),
        ]

    def write(self, name: str, text: str) -> None:
        """Write a file; a file that was written before raises FileExistsError."""
        path = self._path / name
        if path.exists():
            raise FileExistsError(f"{path} is written twice: give each output a name of its own")
        path.parent.mkdir(parents=True, exist_ok=True)
        for found, new in self._replaced:
            text = text.replace(found, new)
        text = _ADDRESS.sub("0x...", text)
        path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8", errors="backslashreplace")


@cache
def read_cases() -> dict[str, Any]:
    """Return the jobs' lines, and the tables, budgets and calls with mistakes, of command_lines.yaml."""
    with open(Path(__file__).with_name("command_lines.yaml"), encoding="utf-8") as file:
        return yaml.safe_load(file)


def expand(line: str, values: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield the command lines of a line: each $NAME is replaced, and each choice such as <a|b> is tried.

    >>> list(expand("count $LENET <|--train>"))
    ['count zoo:lenet5 ', 'count zoo:lenet5 --train']
    """
    from fvflops.cli import COMMANDS
    from fvflops.formulas import shipped_tables

    lists = {"TABLES": "|".join(shipped_tables()), "COMMANDS": "|".join(COMMANDS)}
    known = {**read_cases()["values"], **lists, **(values or {})}
    while "$" in line:
        line = Template(line).substitute(known)
    parts = _CHOICE.split(line)  # text and choices in turn
    choices = (part.split("|") if number % 2 else (part,) for number, part in enumerate(parts))
    yield from map("".join, product(*choices))


def file_name(words: Sequence[str]) -> str:
    """Return a readable file name for a command line, unique even if it is truncated.

    >>> file_name(["count", "zoo:lenet5", "--by", "op"])
    'count_zoo_lenet5_--by_op'
    """
    text = " ".join(words)
    name = _ESCAPE.sub("_", text).strip("_.") or "none"
    if len(name) > _LONGEST:
        name = f"{name[:_LONGEST]}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return name


def attempt(make: Callable[[], Any]) -> str:
    """Return a function's result as text, or the error that it raises."""
    try:
        return str(make())
    except Exception as error:
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        return f"raises {type(error).__name__}: {text}"


def captured(run: Callable[[], Any], *, terminal: bool = False) -> tuple[Any, str, str]:
    """Return a function's result or exit code, and its output on stdout and on stderr."""
    out, err = (_Terminal() if terminal else io.StringIO()), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fvflops gives none, and libraries' warnings are not compared
        try:
            result = run()
        except SystemExit as error:
            result = error.code
    return result, out.getvalue(), err.getvalue()


class _Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@contextlib.contextmanager
def variables(**values: str | None) -> Iterator[None]:
    """Set environment variables in the context; None removes a variable."""
    with patch.dict(os.environ):
        for name, value in values.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        yield


def run_jobs(jobs: Sequence[Job], folder: Path, processes: int, log: Callable[[str], None]) -> list[str]:
    """Run the jobs in up to `processes` processes at once, and return the names of the failed jobs.

    Each runs in a fork of this process: the next job does not see its caches, registered ops and imported modules, so
    that the outputs do not depend on which jobs run, in which order, and how many at once.
    """
    waiting, running, failed = list(jobs), dict[int, tuple[Job, float]](), list[str]()
    done = 0
    while waiting or running:
        while waiting and len(running) < processes:
            job = waiting.pop(0)
            running[_fork(job, folder)] = (job, time.monotonic())
        pid, status = os.wait()
        job, begun = running.pop(pid)
        done += 1
        seconds = time.monotonic() - begun
        if status != 0:
            failed.append(job.name)
        log(f"[{done}/{len(jobs)}] {job.name}: {'FAILED' if status else 'done'}, {seconds:.1f} s")
    return failed


def _fork(job: Job, folder: Path) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        _run(job, folder)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _run(job: Job, folder: Path) -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        os.chdir(name)
        try:
            job.run(Folder(folder / job.name, Path(name)))
        finally:
            os.chdir("/")


def _installed() -> list[tuple[str, str]]:
    import torch

    import fvflops

    own, python = fvflops.__version__, sys.version.split()[0]
    return [
        (str(Path(torch.__file__).parent.parent), "<site-packages>"),
        (sys.executable, "<python>"),
        (str(torch.__version__), "<torch>"),
        (f'"python":"{python}"', '"python":"<python>"'),
        (f'"python": "{python}"', '"python": "<python>"'),
        (f'"fvflops": "{own}"', '"fvflops": "<fvflops>"'),
        (f'"fvflops":"{own}"', '"fvflops":"<fvflops>"'),
        (f"fvflops {own}", "fvflops <fvflops>"),
        (f"fvflops-{own}", "fvflops-<fvflops>"),
    ]
