"""Abilities of a terminal, and progress there of work that takes longer than two seconds: a bar, or a line."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from fvflops.reports.formats.text import Terminal
from fvflops.reports.terminal.terminal_line import WIDTH, TerminalLine, terminal_width
from fvflops.text import printable


def find_terminal(stream: TextIO, environment: Mapping[str, str] = os.environ) -> Terminal | None:
    """Return the terminal that a stream writes to, None for a file or a pipe.

    NO_COLOR overrides FORCE_COLOR and CLICOLOR_FORCE, which treat a pipe as a terminal without a width limit, and these
    override TERM=dumb; COLUMNS overrides the width that the terminal reports.
    """
    forced = any(environment.get(name, "") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE"))
    forced = forced and not environment.get("NO_COLOR")
    if not (stream.isatty() or forced):
        return None
    disabled = environment.get("NO_COLOR") or environment.get("TERM") == "dumb" or environment.get("FORCE_COLOR") == "0"
    return Terminal(_measure(stream, environment), forced or not disabled, stream.encoding or "utf-8")


def find_width(stream: TextIO, environment: Mapping[str, str] = os.environ) -> int:
    """Return the longest line of a report: COLUMNS, the width of the terminal, or 80.

    >>> import io
    >>> find_width(io.StringIO(), {}), find_width(io.StringIO(), {"COLUMNS": "60"})
    (80, 60)
    """
    return _measure(stream, environment) or WIDTH


def _measure(stream: TextIO, environment: Mapping[str, str]) -> int | None:
    columns = environment.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    return terminal_width(stream) if stream.isatty() else None


_WIDTH = 30
_MIN_SECONDS = 2.0  # shorter work shows nothing
_PERIOD = 0.5


class Progress:
    """Progress bar on one line of a terminal, for work that takes longer than two seconds.

    >>> class Terminal(list):
    ...     isatty, write, flush, fileno = lambda self: True, list.append, lambda self: None, lambda self: -1
    >>> terminal, seconds = Terminal(), iter([0.0, 1.0, 2.0])
    >>> bar = Progress(terminal, clock=lambda: next(seconds))
    >>> bar.show(1, 4)
    >>> terminal
    ['\\r[#######-----------------------] run 1 of 4, about 3 s left\\x1b[K']
    >>> bar.clear()
    >>> terminal[1:]
    ['\\r\\x1b[K']
    """

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._line = TerminalLine(self._stream, find_width)
        self._start = clock()

    def show(self, done: int, total: int, *, noun: str = "run", note: str = "") -> None:
        """Draw the bar at `done` of `total` runs, or another `noun`, and a note, truncated to the terminal's width."""
        elapsed = self._clock() - self._start
        if (elapsed * total / done if done else elapsed) < _MIN_SECONDS or not self._stream.isatty():
            return
        filled = _WIDTH * done // total
        bar = "#" * filled + "-" * (_WIDTH - filled)
        remaining = f", about {elapsed * (total - done) / done:.0f} s left" if done else ""
        self._line.draw(f"[{bar}] {noun} {done:,} of {total:,}{remaining}{note}")

    def clear(self) -> None:
        self._line.clear()


@contextmanager
def activity(what: str, stream: TextIO | None = None) -> Iterator[None]:
    """Name the work of the body, in a thread, while it takes longer than two seconds; on a terminal only."""
    chosen = sys.stderr if stream is None else stream
    if not chosen.isatty():
        yield
        return
    line, begun, ended = TerminalLine(chosen, find_width), time.monotonic(), threading.Event()

    def draw() -> None:
        while not ended.wait(_PERIOD):
            elapsed = time.monotonic() - begun
            if elapsed >= _MIN_SECONDS:
                line.draw(f"[{elapsed:.0f} s] {printable(what)}")

    thread = threading.Thread(target=draw, name="fvflops-activity", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        line.clear()
