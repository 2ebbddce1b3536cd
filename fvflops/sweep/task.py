"""The counting of one model as a value that is sent to a worker process, and the interface of what runs it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from fvflops.sources.load import load_from_factory
from fvflops.sources.options import DEFAULT_OPTIONS, SourceOptions
from fvflops.sweep.count_model import DEFAULT_SETTINGS, CountSettings, count_built, count_model
from fvflops.sweep.model_count import ModelCount

# Returns a module, or (module, inputs).
Factory = Callable[[], Any]
# Is called about once a second with the names of the models that are being counted.
OnTick = Callable[[Sequence[str]], None]


@dataclass(frozen=True, slots=True)
class Task:
    """One model to count; without a `factory`, `name` is a MODEL argument."""

    name: str
    factory: Factory | None = None
    options: SourceOptions = DEFAULT_OPTIONS
    settings: CountSettings = DEFAULT_SETTINGS


class Executor(Protocol):
    """Runs tasks, in this process, in worker processes or on a cluster."""

    def run(self, tasks: Iterable[Task], on_tick: OnTick = ...) -> Iterator[ModelCount]:
        """Yield exactly one row for each task as it is done; `tasks` are taken as they are needed."""


class InProcess:
    """Runs tasks in this process, in their order, without limits of time and memory."""

    def run(self, tasks: Iterable[Task], on_tick: OnTick = lambda names: None) -> Iterator[ModelCount]:
        """Yield the row of each task."""
        for task in tasks:
            on_tick((task.name,))
            yield run_task(task)


def run_task(task: Task) -> ModelCount:
    """Return the row of a task; whatever the model raises is the row's error."""
    if task.factory is None:
        return count_model(task.name, task.options, task.settings)
    build = partial(load_from_factory, task.factory, task.name)
    return count_built(task.name, build, task.options, task.settings)
