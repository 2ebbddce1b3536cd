"""Standard streams of a command, also closed ones and while a user's code prints, and SIGTERM."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from types import FrameType
from typing import NoReturn, TextIO


class DiscardedOutput(io.TextIOWrapper):
    """A closed standard output or error: it discards all text."""

    def __init__(self) -> None:
        super().__init__(io.BufferedWriter(io.FileIO(os.devnull, "w")), encoding="utf-8")


@contextmanager
def streams_opened() -> Iterator[None]:
    """Replace closed standard streams, whose descriptors the next files that are opened would get."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free
    before = sys.stdout, sys.stderr
    try:
        sys.stdout, sys.stderr = (DiscardedOutput() if stream is None else stream for stream in before)
        yield
    finally:
        sys.stdout, sys.stderr = before


_reports: list[TextIO] = []  # standard output while a command runs


@contextmanager
def prints_to_stderr() -> Iterator[None]:
    """Send prints of a model's code to standard error, so that a report on standard output has nothing else in it."""
    _reports.append(report_stream())
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        _reports.pop()


def report_stream() -> TextIO:
    """Return the stream of a report without a path: standard output, while a command runs too."""
    return _reports[-1] if _reports else sys.stdout


class Terminated(KeyboardInterrupt):
    """The process got SIGTERM."""


@contextmanager
def termination_raised() -> Iterator[None]:
    """Raise Terminated in the main thread on the first SIGTERM inside; the next one ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
