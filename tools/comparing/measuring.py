"""Each question to a tool in a forked process of its own, so that its leftovers do not reach the next."""

from __future__ import annotations

import importlib
import importlib.metadata
import io
import logging
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from typing import Any, NoReturn

import torch

from comparing.cases import Case, Subject
from comparing.counters import Counter
from comparing.probes import PROBES

LIMIT = 300  # seconds for one question
_REPEAT = 2
_TIMED = "ResNet-50"

# A question to a tool, which returns a text for the table.
Question = Callable[[], str]


def find_version(counter: Counter) -> str | None:
    """Import a tool and return its version, or None where it is not installed."""
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(counter.module)
        return importlib.metadata.version(counter.package)
    except ImportError:
        return None


def ask_apart(question: Question) -> str:
    """Return the answer of a question that is put in a forked process, or "fails: " and its error there.

    Not by multiprocessing, in whose processes TorchLens refuses to run.
    """
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        _answer(question, theirs)
    os.close(theirs)
    ready, _, _ = select.select([ours], [], [], LIMIT)
    with os.fdopen(ours) as pipe:
        answer = pipe.read() if ready else f"fails: no answer in {LIMIT} s"
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return answer or "fails: the process died"


def _answer(question: Question, pipe: int) -> NoReturn:
    try:
        torch.set_num_threads(1)
        answer = question()
    except BaseException as error:
        answer = f"fails: {type(error).__name__}"
    os.write(pipe, answer.encode())
    os._exit(0)


def count(counter: Counter, case: Case, subject: Subject) -> str:
    """Return the figure of a tool as a percentage of the exact multiply-adds; the better of two figures."""
    if subject.step and not counter.step:
        return ""

    def question() -> str:
        exact = case.macs(subject)
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            answer = counter.ask(subject)
        return f"{min((100 * macs / exact for macs in answer.macs), key=lambda share: abs(share - 100)):.2f}"

    return ask_apart(question)


def measure_time(counter: Counter, subject: Subject) -> str:
    """Return the seconds of a count: the least of a few, after one that is not measured."""

    def question() -> str:
        times = []
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            for _ in range(1 + _REPEAT):
                start = time.perf_counter()
                counter.ask(subject)
                times.append(time.perf_counter() - start)
        return f"{min(times[1:]):.4f}"

    return ask_apart(question)


def measure(cases: Sequence[Case], counters: Mapping[Counter, str]) -> dict[str, Any]:
    """Return title of a tool → its version, its percentages and seconds by case, and its probes."""
    found: dict[Counter, dict[str, Any]] = {
        counter: {"version": version, "counts": {}, "seconds": {}} for counter, version in counters.items()
    }
    logging.disable(logging.WARNING)
    for case in cases:
        print(f"{case.title} ...", file=sys.stderr)
        subject = case.build()
        for counter, results in found.items():
            results["counts"][case.title] = count(counter, case, subject)
            if case.title == _TIMED:
                results["seconds"][case.title] = measure_time(counter, subject)
    logging.disable(logging.NOTSET)
    for counter, results in found.items():
        results["probes"] = {name: ask_apart(partial(probe, counter)) for name, probe in PROBES.items()}
    return {counter.title: results for counter, results in found.items()}
