"""Find the source lines that draw from random generators of Python and NumPy, which torch does not see."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

from fvflops.capture.recorder.caller_lines import path_of
from fvflops.capture.recorder.python_reads import Site
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.restore.global_state import SavedGenerator
from fvflops.capture.restore.restore import Snapshot


class DrawFinder:
    """Find the generators that a run draws from, and in a second run the lines that draw.

    States are compared at the end of the first run, and after each line of the model's source in the second.
    """

    def __init__(self) -> None:
        self._generators: list[SavedGenerator] = []
        self._located = False

    @property
    def needs_second_run(self) -> bool:
        """Whether a run drew numbers on unknown lines."""
        return bool(self._generators) and not self._located

    def compare(self, snapshot: Snapshot, recorder: Recorder) -> None:
        """Find the generators that a run drew from since a snapshot; record a draw without a line if none is known."""
        self._generators = [saved for saved in snapshot.generators() if saved.has_drawn]
        if self.needs_second_run:
            recorder.python_reads.record_draw(Site("", ""))

    @contextmanager
    def locating(self, recorder: Recorder) -> Iterator[None]:
        """Record the lines that draw from the generators of an earlier run, if any, while the context lasts."""
        if not self._generators:
            yield
            return
        self._located = True
        outer = sys.gettrace()
        tracer = _LineTracer(recorder, self._generators)
        sys.settrace(tracer.on_call)
        try:
            yield
        finally:
            sys.settrace(outer)
            tracer.finish()


class _LineTracer:
    """A trace function that attributes changes of generators to the line that ran before."""

    def __init__(self, recorder: Recorder, generators: list[SavedGenerator]) -> None:
        self._recorder = recorder
        self._generators = generators
        self._states = [saved.state() for saved in generators]
        self._last: tuple[CodeType, int, int] | None = None  # with the stack of modules

    def on_call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        """Trace the lines of a function of the model's source."""
        if path_of(frame.f_code) is None:
            return None
        return self._on_event(frame, event, argument)

    def _on_event(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        self._compare()
        current: FrameType | None = frame
        if event == "return":
            current = frame.f_back
            while current is not None and path_of(current.f_code) is None:
                current = current.f_back
        if current is not None:
            self._last = current.f_code, current.f_lineno, self._recorder.thread_state().stack
        return self._on_event

    def finish(self) -> None:
        """Record draws after the last line, or in other threads, without a line."""
        self._last = None
        self._compare()

    def _compare(self) -> None:
        states = [saved.state() for saved in self._generators]
        if states == self._states:
            return
        self._states, site = states, Site("", "")
        if self._last is not None:
            code, line, stack = self._last
            site = Site(self._recorder.module_at(stack), f"{path_of(code)}:{line}")
        self._recorder.python_reads.record_draw(site)
