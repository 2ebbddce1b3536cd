"""Run tasks in worker processes of this machine, each model within a limit of time and memory."""

from __future__ import annotations

import ctypes
import importlib
import logging
import multiprocessing
import os
import platform
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, TimeoutError, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice
from multiprocessing import resource_tracker
from typing import Any

import torch

from fvflops.capture.errors.model_errors import describe_error
from fvflops.sources.imports import import_library
from fvflops.sweep.count_model import OnTick, Task, failed_row, ignore_tick, run_task
from fvflops.sweep.model_count import ModelCount


def keep_freed_memory() -> bool:
    """Keep up to a GiB of freed memory in this process, from now on; return whether the C library can."""
    library = _glibc()
    if library is None:
        return False
    mmap_threshold, trim_threshold = -3, -1  # of malloc.h
    # Blocks above 2 GiB are returned when they are freed.
    return bool(library.mallopt(mmap_threshold, (1 << 31) - 1) and library.mallopt(trim_threshold, 1 << 30))


def return_freed_memory() -> None:
    """Return all memory that is free now to the system."""
    library = _glibc()
    if library is not None:
        library.malloc_trim(0)


@cache
def _glibc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


_TICK = 1.0  # seconds


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Seconds, after which it is stopped, and bytes (on Linux) for a model; and modules that a worker imports first."""

    timeout: float | None = None
    memory: int | None = None
    imports: tuple[str, ...] = ()


NO_LIMITS = WorkerLimits()


class WorkerPool:
    """Running worker processes, each with one thread; without pebble raise ValueError."""

    def __init__(self, workers: int, limits: WorkerLimits) -> None:
        self._limits = limits
        self._pool = import_pebble().ProcessPool(
            max_workers=workers,
            initializer=prepare_worker,
            initargs=(limits, os.getpid()),
            context=multiprocessing.get_context("spawn"),
        )

    def schedule(self, task: Task) -> Future[ModelCount]:
        """Queue a task and return its future."""
        with _interrupts_blocked():
            future: Future[ModelCount] = self._pool.schedule(_run_prepared, args=(task,), timeout=self._limits.timeout)
        return future

    def read(self, future: Future[ModelCount], task: Task) -> ModelCount:
        """Return the row of a task when its future is done."""
        error = future.exception()
        if error is None:
            return future.result()
        if isinstance(error, TimeoutError):
            seconds = float(self._limits.timeout or 0)
            return replace(failed_row(task, "timeout", f"stopped after {seconds:g} s"), seconds=seconds)
        if isinstance(error, import_pebble().ProcessExpired):
            return failed_row(task, "killed", describe_exit(error.exitcode))
        return failed_row(task, "error", describe_error(error))

    def stop(self) -> None:
        self._pool.stop()
        self._pool.join()


def run_in_workers(
    tasks: Iterable[Task], on_tick: OnTick = ignore_tick, *, workers: int, limits: WorkerLimits = NO_LIMITS
) -> Iterator[ModelCount]:
    """Yield the row of each task as one of the processes has done it; without pebble raise ValueError."""
    pool = WorkerPool(workers, limits)
    try:
        yield from run_queued(tasks, on_tick, lambda: workers, pool.schedule, pool.read)
    finally:
        pool.stop()


def run_queued(
    tasks: Iterable[Task],
    on_tick: OnTick,
    count_workers: Callable[[], int],
    schedule: Callable[[Task], Future[ModelCount]],
    read: Callable[[Future[ModelCount], Task], ModelCount],
) -> Iterator[ModelCount]:
    """Schedule tasks, two for each worker at a time, and yield what `read` returns of each as it is done."""
    waiting, pending = iter(tasks), dict[Future[ModelCount], Task]()
    while True:
        workers = count_workers()
        for task in islice(waiting, max(0, 2 * workers - len(pending))):
            pending[schedule(task)] = task
        if not pending:
            return
        on_tick([task.name for task in islice(pending.values(), workers)])  # workers take them in their order
        done, _ = wait(pending, timeout=_TICK, return_when=FIRST_COMPLETED)
        for future in done:
            yield read(future, pending.pop(future))


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block SIGINT for the threads and processes started here: the pool stops workers, without a traceback each."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # a process of multiprocessing; to start it unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def import_pebble() -> Any:
    """Return the module pebble; without it raise ValueError that names the extra."""
    return import_library("pebble", extra="sweep")


def describe_exit(code: int) -> str:
    """Return why a process ended.

    >>> describe_exit(-9), describe_exit(3)
    ('the worker was killed by SIGKILL (out of memory?)', 'the worker ended with exit code 3')
    """
    if code >= 0:
        return f"the worker ended with exit code {code}"
    name = signal.Signals(-code).name
    return f"the worker was killed by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")


_import_errors: list[BaseException] = []


def prepare_worker(limits: WorkerLimits, parent: int) -> None:
    """Prepare this process for counting: silent, with one thread and a limit of memory; it ends when `parent` does."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    torch.set_num_threads(1)
    keep_freed_memory()
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    if limits.memory is not None and sys.platform == "linux":
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (limits.memory, hard))
    try:
        for name in limits.imports:
            importlib.import_module(name)
    except Exception as error:  # raised for each task: a pool whose workers cannot start has no rows
        _import_errors.append(error)


def _run_prepared(task: Task) -> ModelCount:
    if _import_errors:
        raise _import_errors[0]
    try:
        return run_task(task)
    finally:
        return_freed_memory()


def _end_with(parent: int) -> None:
    """End this process when its parent has ended: a killed sweep leaves no workers behind."""
    while os.getppid() == parent:
        time.sleep(_TICK)
    os._exit(1)
