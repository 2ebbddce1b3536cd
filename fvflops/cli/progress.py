"""A progress bar on standard error for long profiles."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 30
_LONG = 2.0  # seconds; what is done sooner needs no bar


class Progress:
    """A bar that is drawn on one line, if the whole takes longer than two seconds and somebody is there to see it.

    >>> class Terminal(list):
    ...     isatty, write, flush = lambda self: True, list.append, lambda self: None
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
        self._begun = clock()
        self._drawn = False

    def show(self, done: int, whole: int) -> None:
        """Draw how many runs of how many are done."""
        passed = self._clock() - self._begun
        if passed * whole / done < _LONG or not self._stream.isatty():
            return
        filled = _WIDTH * done // whole
        bar = "#" * filled + "-" * (_WIDTH - filled)
        left = passed * (whole - done) / done
        self._stream.write(f"\r[{bar}] run {done} of {whole}, about {left:.0f} s more\x1b[K")
        self._stream.flush()
        self._drawn = True

    def clear(self) -> None:
        """Take the bar away."""
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._drawn = False
