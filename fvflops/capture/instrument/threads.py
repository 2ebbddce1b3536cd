"""Record threads that a model starts, and functions it submits to thread pools, under the calling module."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any

from fvflops.capture.instrument.patching import Patch, Wrapper
from fvflops.capture.recorder.recorder import Recorder

Enter = Callable[[], AbstractContextManager[Any]]

_START = Patch(threading.Thread, "start")
# Methods whose first argument is the function that a pool's worker calls.
_POOLS = (
    Patch(ThreadPoolExecutor, "submit"),
    *(Patch(ThreadPool, name) for name in ("apply_async", "_map_async", "imap", "imap_unordered")),
)
# Modules whose worker threads serve all callers: the submitted functions are recorded instead of the threads.
_WORKERS = frozenset({"concurrent.futures.thread", "multiprocessing.pool"})


def model_threads(recorder: Recorder, enter: Enter) -> list[Wrapper]:
    """Return the wrappers that record work in other threads.

    `enter` creates the context for such a thread: dispatch modes and grad mode are per thread.
    """
    return [
        (_START, partial(_around_start, recorder, enter)),
        *((patch, partial(_around_submit, recorder, enter)) for patch in _POOLS),
    ]


def _around_start(recorder: Recorder, enter: Enter, original: Callable[..., Any]) -> Callable[..., Any]:
    def start(thread: threading.Thread) -> None:
        target = getattr(thread, "_target", None)
        if recorder.is_recording_thread() and not recorder.paused and getattr(target, "__module__", "") not in _WORKERS:
            run = _recorded(recorder, enter, thread.run)

            def run_recorded() -> None:
                del thread.run
                run()

            thread.run = run_recorded  # type: ignore[method-assign]
        original(thread)

    return start


def _around_submit(recorder: Recorder, enter: Enter, original: Callable[..., Any]) -> Callable[..., Any]:
    def submit(pool: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if recorder.is_recording_thread() and not recorder.paused:
            function = _recorded(recorder, enter, function)
        return original(pool, function, *args, **kwargs)

    return submit


def _recorded(recorder: Recorder, enter: Enter, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that records its thread under the stack of this call while it calls `function`."""
    stack = recorder.thread_state().stack

    def call(*args: Any, **kwargs: Any) -> Any:
        if not recorder.recording or recorder.is_recording_thread():
            return function(*args, **kwargs)
        with enter(), recorder.adopted_thread(stack):
            return function(*args, **kwargs)

    return call
