"""A progress bar on standard error for long profiles and sweeps."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from fvflops.cli.terminal_detection import TerminalLine

_WIDTH = 30
_MIN_SECONDS = 2.0  # shorter work shows no bar


class Progress:
    """Progress bar on one line of a terminal, for work that takes longer than two seconds.

    >>> class Terminal(list):
    ...     isatty, write, flush, fileno = lambda self: True, list.append, lambda self: None, lambda self: -1
    >>> terminal, seconds = Terminal(), iter([0.0, 1.0, 2.0])
    >>> bar = Progress(terminal, clock=lambda: next(seconds))
    >>> bar.show(1, 4)
    >>> terminal
    ['\\r[#######-----------------------] run 1 of 4, about 3 s more\\x1b[K']
    >>> bar.clear()
    >>> terminal[1:]
    ['\\r\\x1b[K']
    """

    def __init__(self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._line = TerminalLine(self._stream)
        self._start = clock()

    def show(self, done: int, total: int, *, noun: str = "run", note: str = "") -> None:
        """Draw the bar at `done` of `total` runs, or of what `noun` says, followed by a note.

        A line that is longer than the terminal is truncated.
        """
        elapsed = self._clock() - self._start
        if (elapsed * total / done if done else elapsed) < _MIN_SECONDS or not self._stream.isatty():
            return
        filled = _WIDTH * done // total
        bar = "#" * filled + "-" * (_WIDTH - filled)
        remaining = f", about {elapsed * (total - done) / done:.0f} s more" if done else ""
        self._line.draw(f"[{bar}] {noun} {done:,} of {total:,}{remaining}{note}")

    def clear(self) -> None:
        """Erase the bar."""
        self._line.clear()
