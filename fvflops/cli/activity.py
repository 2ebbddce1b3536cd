"""Say on a terminal what takes longer than two seconds: loading a model, recording it, predicting."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from fvflops.cli.terminal_detection import TerminalLine
from fvflops.text import printable

_MIN_SECONDS = 2.0  # shorter work shows nothing
_PERIOD = 0.5


class Activity:
    """A line on a terminal with what is being done and for how long, erased at the end.

    A thread draws it, since the work itself calls nothing meanwhile.

    >>> class Terminal(list):
    ...     isatty, write, flush, fileno = lambda self: True, list.append, lambda self: None, lambda self: -1
    >>> terminal, seconds = Terminal(), iter([0.0, 1.0, 3.2])
    >>> line = Activity("recording zoo:gpt2", terminal, clock=lambda: next(seconds))
    >>> line.draw(), line.draw(), line.clear()
    (None, None, None)
    >>> terminal
    ['\\r[3 s] recording zoo:gpt2\\x1b[K', '\\r\\x1b[K']
    """

    def __init__(self, what: str, stream: TextIO | None = None, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = printable(what)
        self._line = TerminalLine(sys.stderr if stream is None else stream)
        self._clock = clock
        self._start = clock()

    def draw(self) -> None:
        """Draw the line, if the work has taken long enough."""
        elapsed = self._clock() - self._start
        if elapsed >= _MIN_SECONDS:
            self._line.draw(f"[{elapsed:.0f} s] {self._what}")

    def clear(self) -> None:
        """Erase the line."""
        self._line.clear()


@contextmanager
def activity(what: str, stream: TextIO | None = None) -> Iterator[None]:
    """Show what is being done while the body takes longer than two seconds, on a terminal only."""
    chosen = sys.stderr if stream is None else stream
    if not chosen.isatty():
        yield
        return
    line, ended = Activity(what, chosen), threading.Event()

    def draw() -> None:
        while not ended.wait(_PERIOD):
            line.draw()

    thread = threading.Thread(target=draw, name="fvflops-activity", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        line.clear()
