"""The counting of one model as a value that is sent to a worker process, and the interface of what runs it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from torch import nn

from fvflops.sources.input_specs import make_arguments, parse_input
from fvflops.sources.loaded_model import LoadedModel
from fvflops.sources.meta import building_on
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
        row = count_model(task.name, task.options, task.settings)
    else:
        row = count_built(task.name, partial(call_factory, task.factory), task.options, task.settings)
    if row.device != "meta":
        gc.collect()  # weights in reference cycles would count against the next model
    return row


def call_factory(factory: Factory, options: SourceOptions) -> LoadedModel:
    """Return the module that a factory returns, and its inputs or those of the options."""
    with building_on(options.device):
        result = factory()
        model, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        if not isinstance(model, nn.Module):
            raise ValueError(
                f"a factory returned {type(model).__name__}: return a torch.nn.Module, or (module, inputs)"
            )
    specs = tuple(parse_input(text) for text in options.inputs)
    if inputs is not None and not specs:
        return LoadedModel(model, inputs, {}, assumed=False)
    if not specs:
        raise ValueError("the model has no inputs: return (module, inputs), or pass options=SourceOptions(inputs=...)")
    parameter = next(model.parameters(), None)
    args, kwargs = make_arguments(specs, "cpu" if parameter is None else parameter.device)
    return LoadedModel(model, args, kwargs, assumed=False)
