"""Count many models, named or created by factories, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from fvflops.formulas import FormulaTable, resolve_table
from fvflops.sources.input_specs import make_arguments, parse_input
from fvflops.sources.loaded_model import LoadedModel
from fvflops.sources.options import DEFAULT_OPTIONS, SourceOptions
from fvflops.sweep.count_model import CountSettings, count_built, count_model
from fvflops.sweep.model_count import ModelCount

# Returns a module, or (module, inputs).
Factory = Callable[[], Any]
Candidate = str | Factory | tuple[str, Factory]


def count_many(
    models: Iterable[Candidate],
    *,
    options: SourceOptions = DEFAULT_OPTIONS,
    table: str | FormulaTable = "default",
    execution: str = "auto",
    peak_memory: bool = False,
) -> Iterator[ModelCount]:
    """Yield a row for each model as it is counted, in their order; a model that fails has a row with its error.

    `models` are names such as `timm:resnet50`, functions that return a module or (module, inputs), or pairs of a name
    and such a function; it may be a generator, and nothing of a model is kept. Functions are called on the meta
    device, and again without it if the model cannot be counted there. `options` apply to every model: the device, and
    the inputs of modules without their own. Memory traffic is in every row, `peak_memory` only if asked for, since it
    needs a second recording. An unknown table raises ValueError.

    >>> from functools import partial
    >>> widths = {f"width {width}": partial(nn.Linear, 8, width) for width in (16, 32)}
    >>> rows = count_many(widths.items(), options=SourceOptions(inputs=("1,8",)))
    >>> [(row.model, row.flops) for row in rows]
    [('width 16', 128), ('width 32', 256)]
    """
    settings = CountSettings(resolve_table(table), execution, peak_memory=peak_memory)
    return _count_each(models, options, settings)


def _count_each(models: Iterable[Candidate], options: SourceOptions, settings: CountSettings) -> Iterator[ModelCount]:
    for number, model in enumerate(models, start=1):
        if isinstance(model, str):
            yield count_model(model, options, settings)
        else:
            name, factory = model if isinstance(model, tuple) else (_name_factory(model, number), model)
            yield count_built(name, partial(call_factory, factory), options, settings)


def call_factory(factory: Factory, options: SourceOptions) -> LoadedModel:
    """Return the module that a factory returns, and its inputs or those of the options."""
    with torch.device(options.device) if options.device is not None else nullcontext():
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


def _name_factory(factory: Factory, number: int) -> str:
    name = getattr(factory, "__qualname__", "")
    return f"model {number}" if not name or "<" in name else name
