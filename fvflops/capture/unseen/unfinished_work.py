"""Finish or report work that a call of the model leaves behind: threads, processes, results that compute later."""

from __future__ import annotations

import asyncio
import io
import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from operator import length_hint
from threading import Thread
from traceback import walk_stack
from types import (
    AsyncGeneratorType,
    CodeType,
    CoroutineType,
    FrameType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import nn

from fvflops.capture.recorder.caller_lines import SourceLine, find_source_line, line_of_code, source_line_of
from fvflops.capture.restore.contents import FUNCTION, VALUE_TYPES, is_iterator, kind_of
from fvflops.capture.unseen.unseen_reporter import Site, UnseenReporter, find_starter
from fvflops.trace import TensorSpec

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
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_run, work, take, count_events, limit).result()


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


# Total seconds of waiting for threads, and seconds between two checks.
_MAX_WAIT, _POLL = 30.0, 0.002
# Looks at a thread that waits for tasks, after which it is thought to have none.
_IDLE_LOOKS = 5
# Items of an iterator that are computed.
_MAX_ITEMS = 4096
# Results of a recorded program that are kept to see whether they are finished.
_MAX_RESULTS = 64
# Where a thread waits for tasks or events that do not come: file of the standard library, and function.
_IDLE = frozenset({("queue.py", "get"), ("selectors.py", "select")})


@dataclass(slots=True)
class _Task:
    """A function that runs in another thread, and how often in sequence that was found waiting for tasks."""

    site: Site
    is_done: Callable[[], bool]
    thread: Thread | None
    idle: int = 0

    def has_ended(self) -> bool:
        """Return whether the task has ended, or its thread waits for tasks."""
        if self.is_done():
            return True
        self.idle = self.idle + 1 if self.thread is not None and _waits_for_tasks(self.thread) else 0
        return self.idle >= _IDLE_LOOKS


class UnfinishedWork:
    """Work that a call of the model leaves behind.

    With `runs_results` a result that computes later (an iterator, a coroutine) is run to its end, inside the call;
    otherwise the program, or the loss, uses it, and unfinished results are reported at the end.
    """

    def __init__(self, reporter: UnseenReporter, recorder: Any, *, runs_results: bool = False) -> None:
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
        unfinished, numbers = find_leaves(result)
        for work in unfinished:
            site = self._reporter.site(_source_of(work, owner))
            if not self._runs_results:
                self._results = [row for row in self._results if not is_finished(row[0])]
                if len(self._results) >= _MAX_RESULTS:
                    self._reporter.report(self._results.pop(0)[1])
                self._results.append((work, site, self._recorder.length))
            elif not self._run(work, owner):
                self._reporter.report(site)
        return numbers

    def _run(self, work: Any, owner: Any) -> bool:
        """Run unfinished work to its end; return whether that is possible."""

        def take(item: Any) -> None:
            self.finish(item, owner)

        kind = type(work)
        if (finished := is_finished(work)) is not None and (finished or hasattr(work, "done")):
            return finished
        if hasattr(kind, "__next__"):
            number = 0
            for item in itertools.islice(work, _MAX_ITEMS):
                number += 1
                take(item)
                del item
            if number == _MAX_ITEMS and hasattr(work, "close"):
                work.close()
            return number < _MAX_ITEMS
        if hasattr(kind, "__anext__") or hasattr(kind, "__await__"):
            return complete(work, take, lambda: self._recorder.length, _MAX_ITEMS)
        return False

    def end(self) -> None:
        """Wait for the model's threads; report unfinished work, and work elsewhere without a known effect."""
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
    if (code := code_of(work)) is not None:
        return line_of_code(code, getattr(work, "__qualname__", code.co_name))
    return SourceLine(source_line_of(owner).line, type(work).__name__)


def _waits_for_tasks(thread: Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    frames = () if frame is None else islice(walk_stack(frame), 3)
    codes = [inner.f_code for inner, _ in frames]
    return any((os.path.basename(code.co_filename), code.co_name) in _IDLE for code in codes)


# Objects in a result that are looked at.
_MAX_OBJECTS = 4096
_CONTAINERS = (list, tuple, set, frozenset, deque)
_FUNCTIONS = (FunctionType, MethodType, partial)
# An object that computes later refers to a tensor or a module.
_COMPUTE = (torch.Tensor, nn.Module)
_NOT_FOLLOWED = (*_COMPUTE, type, ModuleType, torch.dtype, torch.device, io.IOBase, itertools.count, itertools.repeat)


def find_leaves(result: Any) -> tuple[list[Any], list[Any]]:
    """Return a result's objects that compute when used (iterators, awaitables, futures, functions), and its arrays.

    A function counts if it refers to a tensor or a module, and so does an object that has a module as an attribute,
    which a property may call.

    >>> unfinished, numbers = find_leaves((1.5, {"steps": map(abs, [1])}))
    >>> [type(item).__name__ for item in (*unfinished, *numbers)]
    ['map', 'float']
    """
    unfinished: list[Any] = []
    numbers: list[Any] = []
    visited: dict[int, Any] = {}
    pending = deque([(result, True)])
    while pending and len(visited) < _MAX_OBJECTS:
        value, is_direct = pending.popleft()
        if id(value) in visited or isinstance(value, _NOT_FOLLOWED):
            continue
        visited[id(value)] = value
        kind = type(value)
        if kind is float or hasattr(kind, "__array__") or hasattr(kind, "__array_interface__"):
            numbers.append(value)
        elif kind in VALUE_TYPES:
            continue
        elif any(hasattr(kind, name) for name in ("__next__", "__anext__", "__await__")) or _is_future(value):
            unfinished.append(value)
        elif isinstance(value, _FUNCTIONS):
            if is_direct and _refers_to_tensors(value):
                unfinished.append(value)
        elif isinstance(value, Mapping):
            pending += [(item, is_direct) for item in value.values()]
        elif isinstance(value, _CONTAINERS):
            pending += [(item, is_direct) for item in value]
        else:
            attributes = list(getattr(value, "__dict__", {}).values())
            if any(isinstance(item, nn.Module) for item in attributes):
                unfinished.append(value)
            pending += [(item, hasattr(kind, "__dataclass_fields__")) for item in attributes]
    return unfinished, numbers


def _is_future(value: Any) -> bool:
    return isinstance(value, (Future, torch.futures.Future, torch.jit.Future))


def _refers_to_tensors(function: Any) -> bool:
    visited: set[int] = set()
    pending = [function]
    while pending and len(visited) < _MAX_OBJECTS:
        value = pending.pop()
        if id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, _COMPUTE):
            return True
        if isinstance(value, MethodType):
            pending += [value.__self__, value.__func__]
        kind = FUNCTION if isinstance(value, FunctionType) else kind_of(type(value))
        parts = None if kind is None else kind.read(value)
        pending += parts if type(parts) is list else ()
    return False


def code_of(work: Any) -> CodeType | None:
    """Return the code that unfinished work runs, None if it is not Python's."""
    while isinstance(work, (MethodType, partial)):
        work = work.__func__ if isinstance(work, MethodType) else work.func
    codes = (getattr(work, name, None) for name in ("gi_code", "cr_code", "ag_code", "__code__"))
    return next((code for code in codes if isinstance(code, CodeType)), None)


def is_finished(work: Any) -> bool | None:
    """Return whether nothing is left to compute, None if unknown.

    >>> steps = map(abs, [1])
    >>> is_finished(steps), list(steps), is_finished(steps)
    (False, [1], True)
    """
    if isinstance(work, GeneratorType):
        return work.gi_frame is None
    if isinstance(work, CoroutineType):
        return work.cr_frame is None
    if isinstance(work, AsyncGeneratorType):
        return work.ag_frame is None
    if _is_future(work) or asyncio.isfuture(work):
        return bool(work.done())
    return _is_exhausted(work) if is_iterator(work) else None


def _is_exhausted(iterator: Iterator[Any]) -> bool | None:
    """Return whether a built-in iterator has ended: if one that it reads has."""
    try:
        return length_hint(iterator) == 0 if hasattr(iterator, "__length_hint__") else _have_ended(iterator)
    except TypeError:  # an iterator of itertools, from Python 3.14 on
        return None


def _have_ended(iterator: Any) -> bool | None:
    _, arguments, *state = iterator.__reduce__()
    parts = (*arguments, *(state[0] if state and type(state[0]) is tuple else state))
    inner = [is_finished(item) for item in parts if hasattr(type(item), "__next__")]
    if not inner:
        return True
    return any(inner) if None not in inner else None


def address_of_array(array: Any) -> int:
    """Return the address of an array's memory, 0 if it has none, such as an image."""
    data = getattr(array, "__array_interface__", {}).get("data")
    return int(data[0]) if isinstance(data, tuple) else 0


def describe_array(array: Any) -> TensorSpec:
    """Return the spec of an array, an image, a table or a number, as bytes if torch lacks its dtype."""
    dtype = "float64" if type(array) is float else str(getattr(array, "dtype", ""))
    is_known = isinstance(getattr(torch, dtype, None), torch.dtype)
    shape = getattr(array, "shape", getattr(array, "size", ()))
    return TensorSpec(tuple(map(int, shape)) if isinstance(shape, tuple) else (), dtype if is_known else "uint8")
