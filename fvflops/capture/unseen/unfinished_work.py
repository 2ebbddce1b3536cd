"""Finish or report work that a call of the model leaves behind: threads, processes, results that compute later."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable
from itertools import islice
from threading import Thread
from types import FrameType
from typing import Any

from fvflops.capture.recorder.caller_lines import (
    SourceLine,
    find_source_line,
    line_of_code,
    source_line_of,
)
from fvflops.capture.unseen.unfinished_results import code_of, find_leaves, is_finished
from fvflops.capture.unseen.unseen_reporter import Site, UnseenRecorder, UnseenReporter, find_starter

# Seconds without an op after which a coroutine is thought to wait for something that does not come.
PATIENCE = 2.0


def complete(work: Any, take: Callable[[Any], None], count_events: Callable[[], int], limit: int) -> bool:
    """Run an awaitable, or an asynchronous iterator for `limit` items at most; return whether it ended.

    `take` is called with each result. A thread runs the loop where this thread has one, as in a notebook.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(work, take, count_events, limit)
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(_run(work, take, count_events, limit))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return bool(outcome[0])


def _run(work: Any, take: Callable[[Any], None], count_events: Callable[[], int], limit: int) -> bool:
    # Not asyncio.run, after which the thread would have no event loop.
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(_supervise(_consume(work, take, limit), count_events))
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


async def _consume(work: Any, take: Callable[[Any], None], limit: int) -> bool:
    if not hasattr(type(work), "__anext__"):
        take(await work)
        return True
    for _ in range(limit):
        try:
            take(await work.__anext__())
        except StopAsyncIteration:
            return True
    return False


async def _supervise(consumption: Any, count_events: Callable[[], int]) -> bool:
    """Await a coroutine as long as ops are recorded."""
    task = asyncio.ensure_future(consumption)
    while True:
        before = count_events()
        done, _ = await asyncio.wait({task}, timeout=PATIENCE)
        if done:
            return bool(task.result())
        if count_events() == before:
            task.cancel()
            await asyncio.wait({task}, timeout=PATIENCE)
            return False


# Seconds that threads are waited for in all, and between two looks at them.
_MAX_WAIT, _POLL = 30.0, 0.002
# Looks at a thread that waits for tasks, after which it is thought to have none.
_IDLE_LOOKS = 5
# Items of an iterator that are computed.
_MAX_ITEMS = 4096
# Results of a recorded program that are kept to see whether they are finished.
_MAX_RESULTS = 64
# Where a thread waits for tasks or events that do not come: file of the standard library, and function.
_IDLE = frozenset({("queue.py", "get"), ("selectors.py", "select")})


class _Task:
    """A function that runs in another thread, and how often in sequence that was found waiting for tasks."""

    __slots__ = ("idle", "is_done", "site", "thread")

    def __init__(self, site: Site, is_done: Callable[[], bool], thread: Thread | None) -> None:
        self.site = site
        self.is_done = is_done
        self.thread = thread
        self.idle = 0

    def has_ended(self) -> bool:
        """Return whether the task has ended, or its thread waits for tasks."""
        if self.is_done():
            return True
        self.idle = self.idle + 1 if self.thread is not None and _waits_for_tasks(self.thread) else 0
        return self.idle >= _IDLE_LOOKS


class UnfinishedWork:
    """Work that a call of the model leaves behind.

    With `runs_results` a result that computes later (an iterator, a coroutine) is run to its end, inside the call;
    otherwise the program, or the loss, uses it, and what is not finished at the end is reported.
    """

    def __init__(self, reporter: UnseenReporter, recorder: UnseenRecorder, *, runs_results: bool = False) -> None:
        self._runs_results = runs_results
        self._reporter = reporter
        self._recorder = recorder
        self._tasks: list[_Task] = []
        self._elsewhere: dict[tuple[int, str, SourceLine], Site] = {}
        # A result, where it is from, and the number of events when it was returned.
        self._results: list[tuple[Any, Site, int]] = []

    def record_elsewhere(self, frame: FrameType | None) -> bool:
        """Record that code at a frame has another process or thread compute; return whether it is the model's."""
        if not self._reporter.is_accessible(find_starter(frame)):
            return False
        site = self._reporter.site(find_source_line(frame))
        self._elsewhere.setdefault((site.stack, site.phase, site.source), site)
        return True

    def add_task(
        self, function: Any, is_done: Callable[[], bool], frame: FrameType | None, thread: Thread | None = None
    ) -> None:
        """Record that a function runs in another thread, which code at a frame started."""
        source = find_source_line(frame)
        name = source_line_of(function).function or source.function
        site = self._reporter.site(SourceLine(source.line, name))
        if site.stack:  # a program's own threads are not the model's
            self._tasks = [task for task in self._tasks if not task.is_done()]
            self._tasks.append(_Task(site, is_done, thread))

    def finish(self, result: Any, owner: Any) -> list[Any]:
        """Run the unfinished work in a result of the function `owner`, or keep it to see; return the arrays in it."""
        leaves = find_leaves(result)
        for work in leaves.unfinished:
            site = self._reporter.site(_source_of(work, owner))
            if not self._runs_results:
                self._watch(work, site)
            elif not self._run(work, owner):
                self._reporter.report(site)
        return leaves.numbers

    def _run(self, work: Any, owner: Any) -> bool:
        """Run unfinished work to its end; return whether that is possible."""

        def take(item: Any) -> None:
            self.finish(item, owner)

        kind = type(work)
        if (finished := is_finished(work)) is not None and (finished or hasattr(work, "done")):
            return finished
        if hasattr(kind, "__next__"):
            number = 0
            for item in islice(work, _MAX_ITEMS):
                number += 1
                take(item)
                del item
            if number == _MAX_ITEMS and hasattr(work, "close"):
                work.close()
            return number < _MAX_ITEMS
        if hasattr(kind, "__anext__") or hasattr(kind, "__await__"):
            return complete(work, take, lambda: self._recorder.length, _MAX_ITEMS)
        return False

    def _watch(self, work: Any, site: Site) -> None:
        self._results = [row for row in self._results if not is_finished(row[0])]
        if len(self._results) >= _MAX_RESULTS:
            self._reporter.report(self._results.pop(0)[1])
        self._results.append((work, site, self._recorder.length))

    def end(self) -> None:
        """Wait for the model's threads; report what is not finished, and what ran elsewhere without a known effect."""
        self._wait()
        for task in self._tasks:
            self._reporter.report(task.site)
        for work, site, first in self._results:
            finished = is_finished(work)
            if finished is None:  # if ops ran afterwards, the program has used it
                finished = self._recorder.has_ops_since(first)
            if not finished:
                self._reporter.report(site)
        for site in self._elsewhere.values():
            if site.stack not in self._reporter.reported:
                self._reporter.report(site)
        self._tasks, self._results = [], []
        self._elsewhere.clear()

    def _wait(self) -> None:
        """Wait while tasks run, up to some seconds in which they record nothing."""
        begun = progress = time.monotonic()
        events = self._recorder.length
        while True:
            self._tasks = [task for task in self._tasks if not task.has_ended()]
            now = time.monotonic()
            if self._recorder.length != events:
                events, progress = self._recorder.length, now
            if not self._tasks or now - progress > PATIENCE or now - begun > _MAX_WAIT:
                return
            time.sleep(_POLL)


def _source_of(work: Any, owner: Any) -> SourceLine:
    code = code_of(work)
    if code is not None:
        return line_of_code(code, getattr(work, "__qualname__", code.co_name))
    return SourceLine(source_line_of(owner).line, type(work).__name__)


def _waits_for_tasks(thread: Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    for _ in range(3):
        if frame is None:
            return False
        if (os.path.basename(frame.f_code.co_filename), frame.f_code.co_name) in _IDLE:
            return True
        frame = frame.f_back
    return False
