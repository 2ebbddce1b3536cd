"""One line of a terminal with the figures of the last step."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TextIO

from fvflops.measure.step_meter.step_figures import StepFigures

_PAUSE = 0.2  # seconds between two texts
_WIDTH = 80  # if the terminal does not report its width


class LiveLine:
    """A line of a terminal that is overwritten at most five times a second; nothing on other streams.

    >>> class Terminal(list):
    ...     isatty, write, flush = lambda self: True, list.append, lambda self: None
    >>> terminal, seconds = Terminal(), iter([0.0, 0.1, 0.3])
    >>> line = LiveLine(terminal, clock=lambda: next(seconds))
    >>> for number in (1, 2, 3):
    ...     if line.is_due():
    ...         line.show(StepFigures(number, 0.1, mfu=0.5))
    >>> line.end()
    >>> terminal
    ['\\rstep 1: 100 ms, MFU 50.0%\\x1b[K', '\\rstep 3: 100 ms, MFU 50.0%\\x1b[K', '\\n']
    """

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._is_terminal = stream.isatty()
        self._next: float | None = None
        self._drawn = False

    def is_due(self) -> bool:
        """Return whether a text would be shown now."""
        if not self._is_terminal:
            return False
        now = self._clock()
        if self._next is not None and now < self._next:
            return False
        self._next = now + _PAUSE
        return True

    def show(self, figures: StepFigures) -> None:
        """Show the figures of a step, truncated to the width of the terminal."""
        self._stream.write(f"\r{str(figures)[: self._width() - 1]}\x1b[K")
        self._stream.flush()
        self._drawn = True

    def end(self) -> None:
        """Leave the line as it is."""
        if self._drawn:
            self._stream.write("\n")
            self._stream.flush()
            self._drawn = False

    def _width(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or _WIDTH
        except (AttributeError, OSError, ValueError):  # it has no file descriptor
            return _WIDTH
