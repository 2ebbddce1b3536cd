"""A line of a terminal that is drawn again in place."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TextIO

WIDTH = 80  # if the terminal does not report its width
_PAUSE = 0.2  # seconds between two texts


def terminal_width(stream: TextIO) -> int:
    """Return the columns of the terminal of a stream, 80 if it does not report them."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or WIDTH
    except (AttributeError, OSError, ValueError):  # it has no file descriptor
        return WIDTH


class TerminalLine:
    """A line that is truncated to the width of the terminal, and left or erased at the end."""

    def __init__(self, stream: TextIO, width: Callable[[TextIO], int] = terminal_width) -> None:
        self._stream = stream
        self._width = width
        self._next = 0.0  # when a text may be shown
        self._drawn = False

    def is_due(self) -> bool:
        """Return whether to draw: on a terminal, at most five times a second."""
        now = time.monotonic()
        due = now >= self._next and self._stream.isatty()
        if due:
            self._next = now + _PAUSE
        return due

    def draw(self, text: str) -> None:
        """Draw a text instead of the one before."""
        self._write(f"\r{text[: self._width(self._stream) - 1]}\x1b[K")
        self._drawn = True

    def leave(self) -> None:
        """Begin a new line below the text."""
        self._end("\n")

    def clear(self) -> None:
        self._end("\r\x1b[K")

    def _end(self, text: str) -> None:
        if self._drawn:
            self._write(text)
            self._drawn = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
