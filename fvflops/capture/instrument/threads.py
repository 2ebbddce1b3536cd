"""Record threads that a model starts, and functions it submits to thread pools, under the calling module."""

from __future__ import annotations

import _thread
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any

from fvflops.capture.instrument.patching import Patch, Wrapper, calling
from fvflops.capture.recorder.recorder import Recorder

Enter = Callable[[], AbstractContextManager[Any]]

_START = Patch(threading.Thread, "start")
_RAW_START = Patch(_thread, "start_new_thread")
# Methods whose first argument is the function that a pool's worker calls.
_SUBMITS = (
    Patch(ThreadPoolExecutor, "submit"),
    *(Patch(ThreadPool, name) for name in ("apply_async", "_map_async", "imap", "imap_unordered")),
)
# Modules whose worker threads serve all callers: the submitted functions are recorded instead of the threads. Threads
# for processes, and progress bars' monitors, compute nothing.
_WORKERS = frozenset(
    ("concurrent.futures.thread", "concurrent.futures.process", "multiprocessing.pool", "multiprocessing.queues")
) | {"tqdm._monitor"}


def model_threads(recorder: Recorder, enter: Enter) -> list[Wrapper]:
    """Return the wrappers that record other threads, whose dispatch modes and grad mode the context `enter` sets."""
    calls: dict[Patch, Callable[..., Any]] = {
        _START: _start,
        _RAW_START: _start_raw,
        **dict.fromkeys(_SUBMITS, _submit),
    }
    return [(patch, calling(partial(call, recorder, enter), recorder.is_active)) for patch, call in calls.items()]


def _start(recorder: Recorder, enter: Enter, original: Callable[..., Any], thread: threading.Thread) -> None:
    target = getattr(thread, "_target", None)
    kinds = {getattr(target, "__module__", ""), type(thread).__module__}
    if kinds & _WORKERS:
        original(thread)
        return
    run = _recorded(recorder, enter, thread.run)

    def run_recorded() -> None:
        del thread.run
        run()

    thread.run = run_recorded  # type: ignore[method-assign]
    original(thread)
    work = target or getattr(thread, "function", None) or type(thread).run  # a timer's function
    _add_task(recorder, work, lambda: not thread.is_alive(), sys._getframe(1), thread)


def _start_raw(
    recorder: Recorder, enter: Enter, original: Callable[..., Any], function: Callable[..., Any], *args: Any
) -> Any:
    recorded, ended = _recorded(recorder, enter, function), threading.Event()

    def run(*args: Any, **kwargs: Any) -> None:
        try:
            recorded(*args, **kwargs)
        finally:
            ended.set()

    identifier = original(run, *args)
    _add_task(recorder, function, ended.is_set, sys._getframe(1))
    return identifier


def _submit(
    recorder: Recorder, enter: Enter, original: Any, pool: Any, function: Any, /, *args: Any, **kwargs: Any
) -> Any:
    result = original(pool, _recorded(recorder, enter, function), *args, **kwargs)
    # The pool refers to a result, which refers to tensors, until it is complete.
    _add_task(recorder, function, partial(_is_complete, weakref.ref(result)), sys._getframe(1))
    return result


def _is_complete(reference: weakref.ref[Any]) -> bool:
    """Return whether a future, or the result of a pool, is complete or dropped."""
    result = reference()
    if result is None:
        return True
    if hasattr(result, "done"):
        return bool(result.done())
    return bool(result.ready()) if hasattr(result, "ready") else result._index == result._length


def _add_task(recorder: Recorder, function: Any, is_done: Callable[[], bool], *starter: Any) -> None:
    if recorder.unseen is not None:
        recorder.unseen.unfinished.add_task(function, is_done, *starter)


def _recorded(recorder: Recorder, enter: Enter, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that records its thread under the stack of this call while it calls `function`."""
    stack = recorder.thread_state().stack

    def call(*args: Any, **kwargs: Any) -> Any:
        if not recorder.recording or recorder.is_recording_thread():
            return function(*args, **kwargs)
        with enter(), recorder.adopted_thread(stack):
            return function(*args, **kwargs)

    return call
