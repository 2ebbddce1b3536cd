"""Jobs: pieces of the golden outputs, each run in a forked process of its own and written to a folder."""

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from goldens import clock

ROOT = Path(__file__).resolve().parent.parent.parent

_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")
_ESCAPE = re.compile(r"[^A-Za-z0-9=.+-]+")
_LONGEST = 100  # characters of a file's name


@dataclass(frozen=True)
class Job:
    """A name, which is the folder of its files, and what writes them."""

    name: str
    run: Callable[[Folder], Any]


class Folder:
    """The folder that a job writes its files to, as normalised text."""

    def __init__(self, path: Path, temporary: Path) -> None:
        self._path = path
        self._replaced = [
            (str(temporary.resolve()), "<tmp>"),
            (str(temporary), "<tmp>"),
            (str(ROOT), "<root>"),
            (_site_packages(), "<site-packages>"),
            (sys.executable, "<python>"),
            *_versions(),
        ]

    def normalise(self, text: str) -> str:
        """Return a text without paths, versions and object addresses of this run."""
        for found, name in self._replaced:
            text = text.replace(found, name)
        return _ADDRESS.sub("0x...", text)

    def write(self, name: str, text: str) -> None:
        """Write a file; one name twice is an error of the program."""
        path = self._path / name
        if path.exists():
            raise FileExistsError(f"{path} is written twice: give each output a name of its own")
        path.parent.mkdir(parents=True, exist_ok=True)
        text = self.normalise(text)
        path.write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8", errors="backslashreplace")


def file_name(words: Sequence[str]) -> str:
    """Return a file name that tells a command line, unique also where it is cut.

    >>> file_name(["count", "zoo:lenet5", "--by", "op"])
    'count_zoo_lenet5_--by_op'
    """
    text = " ".join(words)
    name = _ESCAPE.sub("_", text).strip("_.") or "none"
    if len(name) > _LONGEST:
        name = f"{name[:_LONGEST]}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return name


def attempt(make: Callable[[], Any]) -> str:
    """Return the text that a function makes, or the error that it raises."""
    try:
        return str(make())
    except Exception as error:
        text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
        return f"raises {type(error).__name__}: {text}"


def captured(run: Callable[[], Any], *, terminal: bool = False) -> tuple[Any, str, str]:
    """Return what a function returns, or the code that it exits with, and what it writes to stdout and stderr."""
    out, err = (_Terminal() if terminal else io.StringIO()), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fvflops gives none; those of libraries are not ours to compare
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
    """Set environment variables for a while; None takes one away."""
    before = {name: os.environ.get(name) for name in values}
    _set_variables(values)
    try:
        yield
    finally:
        _set_variables(before)


def _set_variables(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def run_jobs(jobs: Sequence[Job], folder: Path, processes: int, tell: Callable[[str], None]) -> list[str]:
    """Run the jobs, so many at a time, and return the names of those that failed.

    Each runs in a fork of this process: what one leaves behind (caches, registered ops, imported modules) is not seen
    by the next, so that the outputs do not depend on which jobs run, in which order, and how many at a time.
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
        tell(f"[{done}/{len(jobs)}] {job.name}: {'FAILED' if status else 'done'}, {seconds:.1f} s")
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
    clock.reset()
    with tempfile.TemporaryDirectory(prefix="golden-") as name:
        os.chdir(name)
        try:
            job.run(Folder(folder / job.name, Path(name)))
        finally:
            os.chdir("/")


def _site_packages() -> str:
    import torch

    return str(Path(torch.__file__).parent.parent)


def _versions() -> list[tuple[str, str]]:
    import torch

    import fvflops

    own, python = fvflops.__version__, sys.version.split()[0]
    return [
        (str(torch.__version__), "<torch>"),
        (f'"python":"{python}"', '"python":"<python>"'),
        (f'"python": "{python}"', '"python": "<python>"'),
        (f'"fvflops": "{own}"', '"fvflops": "<fvflops>"'),
        (f'"fvflops":"{own}"', '"fvflops":"<fvflops>"'),
        (f"fvflops {own}", "fvflops <fvflops>"),
        (f"fvflops-{own}", "fvflops-<fvflops>"),
    ]
