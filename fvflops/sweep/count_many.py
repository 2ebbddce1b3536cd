"""Count many models, named or created by factories, in this process or in workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

from fvflops.formulas import FormulaTable, resolve_table
from fvflops.sources.load import check_options
from fvflops.sources.options import DEFAULT_OPTIONS, SourceOptions
from fvflops.sweep.count_model import CountSettings, Factory, Task, run_here
from fvflops.sweep.local_pool import WorkerLimits, run_in_workers
from fvflops.sweep.model_count import ModelCount
from fvflops.text import explaining_arguments, require_int

Candidate: TypeAlias = str | Factory | tuple[str, Factory]


@explaining_arguments
def count_many(
    models: Iterable[Candidate],
    *,
    options: SourceOptions = DEFAULT_OPTIONS,
    table: str | FormulaTable = "default",
    execution: str = "auto",
    peak_memory: bool = False,
    workers: int = 0,
    timeout: float | None = None,
    memory: int | None = None,
) -> Iterator[ModelCount]:
    """Yield a row for each model as it is counted; a model that fails has a row with its error.

    `models` are names such as `timm:resnet50`, functions that return a module or (module, inputs), or pairs of a name
    and such a function; it may be a generator, and no model is kept. Functions are called on the meta
    device, and again without it if the model cannot be counted there. `options` apply to every model: the device, and
    the inputs of modules without their own. Memory traffic is in every row, `peak_memory` only if asked for, since it
    needs a second recording.

    With `workers` processes (the extra `sweep`) a model is stopped after `timeout` seconds, and may allocate `memory`
    bytes; functions must then be importable, and rows come in order of completion. With workers=0 models are counted in
    this process, in their order, and `memory` limits only the weights of models that cannot be counted without weights.
    An unknown table, an option that no model accepts, and a timeout without workers raise ValueError.

    >>> from functools import partial
    >>> from torch import nn
    >>> widths = {f"width {width}": partial(nn.Linear, 8, width) for width in (16, 32)}
    >>> rows = count_many(widths.items(), options=SourceOptions(inputs=("1,8",)))
    >>> [(row.model, row.flops) for row in rows]
    [('width 16', 128), ('width 32', 256)]
    """
    require_int("workers", workers, least=0)
    if isinstance(models, str):
        raise ValueError(f"models={models!r} is one name: pass a list of names, [{models!r}]")
    check_options(options)
    if timeout is not None and not workers:
        raise ValueError(f"timeout={timeout}: a model in this process cannot be stopped: pass workers=1 or more")
    settings = CountSettings(resolve_table(table), execution, peak_memory=peak_memory, memory=memory)
    tasks = _list_tasks(models, options, settings)
    return run_in_workers(tasks, workers=workers, limits=WorkerLimits(timeout, memory)) if workers else run_here(tasks)


def _list_tasks(models: Iterable[Candidate], options: SourceOptions, settings: CountSettings) -> Iterator[Task]:
    for number, model in enumerate(models, start=1):
        if isinstance(model, str):
            yield Task(model, None, options, settings)
        else:
            name, factory = model if isinstance(model, tuple) else (getattr(model, "__qualname__", ""), model)
            is_nameless = not isinstance(model, tuple) and (not name or "<" in name)
            yield Task(f"model {number}" if is_nameless else name, factory, options, settings)
