"""A progress bar on standard error for long profiles."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

_WIDTH = 30
_MIN_SECONDS = 2.0  # shorter work shows no bar


class Progress:
    """Progress bar on one line of a terminal, for work that takes longer than two seconds.

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

    def __init__(
        self, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic, noun: str = "run"
    ) -> None:
        self._noun = noun
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._start = clock()
        self._drawn = False

    def show(self, done: int, total: int) -> None:
        """Draw the bar at `done` of `total` runs, or of what `noun` names."""
        elapsed = self._clock() - self._start
        if elapsed * total / done < _MIN_SECONDS or not self._stream.isatty():
            return
        filled = _WIDTH * done // total
        bar = "#" * filled + "-" * (_WIDTH - filled)
        remaining = elapsed * (total - done) / done
        self._stream.write(f"\r[{bar}] {self._noun} {done} of {total}, about {remaining:.0f} s more\x1b[K")
        self._stream.flush()
        self._drawn = True

    def clear(self) -> None:
        """Erase the bar."""
        if self._drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._drawn = False
