"""Run tasks on a Ray cluster (the extra `ray`); every row arrives once, also when nodes die.

Each Ray task hands its model to a worker process of its own machine, as a local sweep does, so that limits of time and
memory hold there too: Ray itself cannot stop a task after a time without knowing when it began.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import wait
from dataclasses import dataclass, replace
from typing import Any

from fvflops import __version__
from fvflops.capture.errors.model_errors import describe_error
from fvflops.paths import PACKAGE
from fvflops.sources.imports import import_library
from fvflops.sweep.count_model import OnTick, Task, start_row
from fvflops.sweep.local_pool import NO_LIMITS, WorkerLimits, WorkerPool
from fvflops.sweep.model_count import ModelCount

_TICK = 1.0  # seconds
_QUEUED = 2  # tasks for each core of the cluster that are submitted ahead of time
_RETRIES = 5  # of a task whose node or worker died


class RayError(RuntimeError):
    """A cluster that cannot be reached, or whose nodes lack what a sweep needs."""


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """What a node needs to run tasks; `folder` is the working directory, used where it exists."""

    version: str
    folder: str
    path: tuple[str, ...]
    limits: WorkerLimits


class RayPool:
    """The cores of a Ray cluster, one model on each at a time.

    `address` is that of the cluster, such as `auto` or `ray://host:10001`. The memory of the limits is also requested
    of Ray, so that a node runs no more models than fit. A task whose node dies runs again on another, at most 5 times.
    """

    def __init__(self, address: str, limits: WorkerLimits = NO_LIMITS) -> None:
        self._address = address
        self._memory = limits.memory
        # The driver's modules are importable where the nodes share its file system, or have them installed.
        path = (str(PACKAGE.parent), *(folder for folder in sys.path if folder and os.path.isabs(folder)))
        self._settings = NodeSettings(__version__, os.getcwd(), path, limits)

    def run(self, tasks: Iterable[Task], on_tick: OnTick = lambda names: None) -> Iterator[ModelCount]:
        """Yield the row of each task as it is done; raise RayError where the cluster cannot be reached."""
        ray = import_library("ray")
        started = self._connect(ray)
        try:
            yield from self._run(ray, iter(tasks), on_tick)
        finally:
            if started:
                ray.shutdown()

    def _connect(self, ray: Any) -> bool:
        """Connect to the cluster, and return whether this process was not connected before."""
        if ray.is_initialized():
            return False
        try:
            ray.init(
                address=self._address,
                log_to_driver=False,
                logging_level="ERROR",
                runtime_env={"env_vars": _find_environment()},
            )
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise RayError(f"no Ray cluster at {self._address!r}: {describe_error(error)}") from None
        return True

    def _run(self, ray: Any, waiting: Iterator[Task], on_tick: OnTick) -> Iterator[ModelCount]:
        requested = {} if self._memory is None else {"memory": self._memory}
        remote = ray.remote(num_cpus=1, max_retries=_RETRIES, retry_exceptions=False, **requested)(_run_on_node)
        settings = ray.put(self._settings)
        pending: dict[Any, Task] = {}
        while True:
            capacity = max(1, int(ray.cluster_resources().get("CPU", 1))) * _QUEUED
            while len(pending) < capacity and (task := next(waiting, None)) is not None:
                pending[remote.remote(task, settings)] = task
            if not pending:
                return
            on_tick([task.name for task in list(pending.values())[: capacity // _QUEUED]])
            done, _ = ray.wait(list(pending), num_returns=1, timeout=_TICK)
            for reference in done:
                yield _read(ray, reference, pending.pop(reference))


def _find_environment() -> dict[str, str]:
    """Return the environment in which workers find the fvflops of a checkout; elsewhere they have one installed."""
    if "site-packages" in PACKAGE.parts:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))}


def _read(ray: Any, reference: Any, task: Task) -> ModelCount:
    try:
        row: ModelCount = ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        if isinstance(cause, RayError):
            raise cause from None
        return _fail(task, "error", describe_error(cause))
    except ray.exceptions.RayError as error:
        return _fail(task, "killed", f"after {_RETRIES} retries: {describe_error(error)}")
    return row


def _fail(task: Task, failure: str, error: str) -> ModelCount:
    return replace(start_row(task.name, task.options, task.settings), failure=failure, error=error)


# The worker process of this Ray worker, which runs one task after the other.
_pools: dict[NodeSettings, WorkerPool] = {}


def _run_on_node(task: Task, settings: NodeSettings) -> ModelCount:
    if settings.version != __version__:
        raise RayError(f"a node has fvflops {__version__}, this machine {settings.version}: install the same on all")
    if settings not in _pools:
        sys.path.extend(folder for folder in settings.path if folder not in sys.path)
        if os.path.isdir(settings.folder):
            os.chdir(settings.folder)
        _pools[settings] = WorkerPool(1, settings.limits)
    pool = _pools[settings]
    future = pool.schedule(task)
    wait([future])
    return pool.read(future, task)
