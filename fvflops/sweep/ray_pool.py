"""Run tasks on a Ray cluster (the extra `ray`), each in a worker process of its machine, which holds the limits."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from fvflops import __version__
from fvflops.capture.errors.model_errors import describe_error
from fvflops.paths import PACKAGE
from fvflops.sources.imports import import_library
from fvflops.sweep.count_model import OnTick, Task, failed_row, ignore_tick
from fvflops.sweep.local_pool import NO_LIMITS, WorkerLimits, WorkerPool, run_queued
from fvflops.sweep.model_count import ModelCount

_RETRIES = 5  # of a task whose node or worker died


class RayError(RuntimeError):
    """A cluster that cannot be reached, or whose nodes lack a sweep's needs."""


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """Needs of a node to run tasks; `folder` is the working directory, used where it exists."""

    version: str
    folder: str
    path: tuple[str, ...]
    limits: WorkerLimits


def run_on_cluster(
    tasks: Iterable[Task], on_tick: OnTick = ignore_tick, *, address: str, limits: WorkerLimits = NO_LIMITS
) -> Iterator[ModelCount]:
    """Yield the row of each task as a core of a Ray cluster has done it, one model on each at a time.

    `address` is the cluster's, such as `auto` or `ray://host:10001`; one that cannot be reached raises RayError. The
    memory of the limits is also requested of Ray, so that a node runs no more models than fit. A task whose node dies
    runs again on another, at most 5 times.
    """
    ray = import_library("ray")
    started = _connect(ray, address)
    try:
        requested = {} if limits.memory is None else {"memory": limits.memory}
        remote = ray.remote(num_cpus=1, max_retries=_RETRIES, retry_exceptions=False, **requested)(_run_on_node)
        # The driver's modules are importable where the nodes share its file system, or have them installed.
        path = (str(PACKAGE.parent), *filter(os.path.isabs, sys.path))
        settings = ray.put(NodeSettings(__version__, os.getcwd(), path, limits))
        yield from run_queued(
            tasks,
            on_tick,
            lambda: max(1, int(ray.cluster_resources().get("CPU", 1))),
            lambda task: remote.remote(task, settings).future(),
            partial(_read, ray),
        )
    finally:
        if started:
            ray.shutdown()


def _connect(ray: Any, address: str) -> bool:
    """Connect to the cluster, and return whether this process was not connected before."""
    if ray.is_initialized():
        return False
    # Workers find the fvflops of a checkout by this path; elsewhere they have one installed.
    path = os.pathsep.join(filter(None, (str(PACKAGE.parent), os.environ.get("PYTHONPATH"))))
    environment = {"env_vars": {} if "site-packages" in PACKAGE.parts else {"PYTHONPATH": path}}
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", runtime_env=environment)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise RayError(f"no Ray cluster at {address!r}: {describe_error(error)}") from None
    return True


def _read(ray: Any, future: Future[ModelCount], task: Task) -> ModelCount:
    try:
        return future.result()
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, Exception) else error
        if isinstance(cause, RayError):
            raise cause from None
        return failed_row(task, "error", describe_error(cause))
    except ray.exceptions.RayError as error:
        return failed_row(task, "killed", f"after {_RETRIES} retries: {describe_error(error)}")


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
