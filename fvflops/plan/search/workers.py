"""Run the parts of a search in forked processes, which have the model without copying it."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

# What forked processes call: a model need not be pickled.
_SHARED: dict[int, Callable[[Any], Any]] = {}


class Workers(Generic[T]):
    """Calls of one function in some processes, or in this one, in the order in which they are submitted."""

    def __init__(self, function: Callable[[Any], T], pool: ProcessPoolExecutor | None, jobs: int) -> None:
        self._function = function
        self._pool = pool
        self._jobs = jobs
        self._running: dict[Future[T], int] = {}

    def run(self, pending: Iterator[tuple[int, Any]]) -> Iterator[tuple[int, T]]:
        """Yield the number and the result of each call when it is done; `pending` is read when one can start."""
        if self._pool is None:
            for number, item in pending:
                yield number, self._function(item)
            return
        while True:
            while len(self._running) < self._jobs and (call := next(pending, None)) is not None:
                self._running[self._pool.submit(_call, id(self._function), call[1])] = call[0]
            if not self._running:
                return
            done, _ = wait(self._running, return_when=FIRST_COMPLETED)
            for future in done:
                yield self._running.pop(future), future.result()


@contextmanager
def workers(function: Callable[[Any], T], jobs: int) -> Iterator[Workers[T]]:
    """Start processes that call `function`; one job, and a system without fork, run it in this process.

    So does a process whose autograd has threads, which its forks would lack: a warning says so.
    """
    if jobs == 1 or "fork" not in multiprocessing.get_all_start_methods():
        yield Workers(function, None, 1)
        return
    _SHARED[id(function)] = function
    context = multiprocessing.get_context("fork")
    pool = ProcessPoolExecutor(jobs, mp_context=context, initializer=torch.set_num_threads, initargs=(1,))
    try:
        if pool.submit(_can_differentiate).result():
            yield Workers(function, pool, jobs)
        else:
            warnings.warn(
                f"the search runs in one process, not in {jobs}: this program's autograd has threads, without which "
                "forked processes cannot run a backward pass",
                stacklevel=4,
            )
            yield Workers(function, None, 1)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        del _SHARED[id(function)]


def _can_differentiate() -> bool:
    try:
        torch.ones(1, requires_grad=True).backward()
    except RuntimeError:  # of autograd's threads, which a forked process does not have
        return False
    return True


def _call(key: int, item: Any) -> Any:
    return _SHARED[key](item)
