"""Count a model at several sizes and fit the polynomial of its cost."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple, TypedDict

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from fvflops.analysis.model_counts import FlopCountAnalysis, parameter_count
from fvflops.analysis.model_run import bind_inputs
from fvflops.capture.run import Loss, Model, record_call
from fvflops.comparison.cost_functions import Axis, CostExpression, ScalingError, Sizes, format_sizes
from fvflops.comparison.fitting import agrees, find_fit, interpolate
from fvflops.counting.metrics import METRICS, MetricCounts
from fvflops.formulas import FormulaTable, resolve_table
from fvflops.text import Unpack, explaining_arguments, shown
from fvflops.torch_internals import disable_dispatch_modes
from fvflops.trace import Status, Trace

Range = range | tuple[int, int] | tuple[int, int, int]
# Called with the number of runs so far.
Progress = Callable[[int], None]


class Sample(NamedTuple):
    """Counts at one choice of sizes."""

    total: int
    modules: Mapping[str, int]
    operators: Mapping[str, int]
    unsupported: Mapping[str, int]
    about: Mapping[str, str] = MappingProxyType({})


class CostOptions(TypedDict, total=False):
    """Options of a cost, as `cost_of` describes them."""

    metric: Annotated[str, "flops"]
    table: Annotated[str | FormulaTable, "default"]
    device: Annotated[str | torch.device | None, None]
    progress: Annotated[Progress | None, None]


@explaining_arguments
def cost_of(
    model: Model,
    inputs: Any = None,
    *,
    vary: Mapping[str, Range],
    kwargs: Any = None,
    execution: str = "auto",
    assume: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    **options: Unpack[CostOptions],
) -> CostExpression:
    """Return a model's cost as a function of sizes: an exact polynomial where there is one, verified at other sizes.

    `vary` gives each size that is varied (first, last), or (first, last, step), both ends included, or a range.
    `inputs` and `kwargs` are as for an analysis, or functions of sizes, by their names, that return them. `model`
    is a model, or a function of sizes that builds one, or returns (model, inputs) where `inputs` is None; it is called
    under the meta device where that works. `metric` is "flops", "macs", "activations", "parameters" or "bytes"; with
    `loss`, a function of the model's result that returns a scalar, the backward pass is counted too. The other options
    are as in FlopCountAnalysis. `progress` is called after each run with the number of runs.

    A name that nothing uses, sizes that the model does not accept, and a range of fewer than two sizes raise
    ScalingError, which names them.

    >>> cost = cost_of(
    ...     lambda width: nn.Linear(width, 4 * width),
    ...     lambda batch, width: torch.zeros(batch, width),
    ...     vary={"batch": (1, 64), "width": (8, 512)},
    ... )
    >>> print(cost, cost(batch=2, width=8))
    4·B·d² 512
    """
    metric, table = options["metric"], resolve_table(options["table"])
    if metric not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}; got {shown(metric)}")
    axes = tuple(read_axis(name, sizes) for name, sizes in vary.items())
    if not axes:
        raise ScalingError("vary is empty: pass the range of a size, such as vary={'batch': (1, 64)}")
    source = _Source(model, inputs, kwargs, tuple(axis.name for axis in axes))
    run: Any = {"execution": execution, "device": options["device"], "assume": assume}

    def count(sizes: Sizes) -> Sample:
        built, args, keywords = source.make(sizes)
        if metric == "parameters":
            return _count_parameters(built)
        with BoundsCheckedEmbedding():
            if loss is not None:
                args, keywords = bind_inputs(built, args, keywords)
                trace = record_call(built, args, keywords, loss=loss, stops_at=table.stops_at, **run)
            else:
                trace = FlopCountAnalysis(built, args, kwargs=keywords, table=table, warn=False, **run).trace()
        return read_sample(trace, table, metric)

    return describe_costs(metric, axes, count, progress=options["progress"])


def read_axis(name: str, sizes: Range) -> Axis:
    """Return the axis of a varied size.

    >>> read_axis("batch", (1, 64)), read_axis("image", range(32, 129, 32))
    (Axis(name='batch', first=1, last=64, step=1), Axis(name='image', first=32, last=128, step=32))
    """
    if isinstance(sizes, range):
        if not sizes:
            raise ScalingError(f"{name}={sizes} is empty: write the smaller size first")
        return Axis(name, sizes[0], sizes[-1], sizes.step)
    if not (isinstance(sizes, (tuple, list)) and len(sizes) in (2, 3) and all(type(size) is int for size in sizes)):
        raise ScalingError(f"{name} must be (first, last), (first, last, step) or a range; got {shown(sizes)}")
    return Axis(name, *sizes)


def describe_costs(
    metric: str, axes: tuple[Axis, ...], sample: Callable[[Sizes], Sample], *, progress: Progress | None = None
) -> CostExpression:
    """Return the cost that `sample` counts at sizes; an error that it raises names the sizes."""
    names = tuple(axis.name for axis in axes)
    samples: dict[Sizes, Sample] = {}
    totals: dict[Sizes, int] = {}

    def count(sizes: Sizes) -> int:
        if sizes not in samples:
            try:
                samples[sizes] = sample(sizes)
            except ScalingError:
                raise
            except Exception as error:
                raise ScalingError(_describe_error(names, sizes, error)) from error
            totals[sizes] = samples[sizes].total
            if progress is not None:
                progress(len(samples))
        return totals[sizes]

    # The ends first, so that a size that the model does not accept fails before the other runs.
    count(tuple(axis.first for axis in axes))
    count(tuple(axis.last for axis in axes))
    fit = find_fit(CostExpression(metric, axes, None, axes), count, totals)
    unsupported: Counter[str] = Counter()
    about: dict[str, str] = {}
    for counts in samples.values():
        unsupported |= Counter(counts.unsupported)
        about |= counts.about
    fit = replace(fit, unsupported=unsupported, about=about)
    modules = _express_parts(fit, {sizes: value.modules for sizes, value in samples.items()})
    operators = _express_parts(fit, {sizes: value.operators for sizes, value in samples.items()})
    return replace(_with_counts(fit, totals), modules=modules, operators=operators)


def _with_counts(fit: CostExpression, counted: dict[Sizes, int]) -> CostExpression:
    polynomial = interpolate(fit, counted) if fit.fitted else None
    is_right = polynomial is not None and agrees(fit, polynomial, counted)
    return replace(fit, polynomial=polynomial if is_right else None, counted=counted)


def _express_parts(fit: CostExpression, counts: Mapping[Sizes, Mapping[str, int]]) -> dict[str, CostExpression]:
    """Return the cost of each module or operator; equal counts share one expression."""
    by_counts: dict[tuple[int, ...], CostExpression] = {}
    parts: dict[str, CostExpression] = {}
    for name in dict.fromkeys(name for part in counts.values() for name in part):
        counted = {sizes: part.get(name, 0) for sizes, part in counts.items()}
        key = tuple(counted.values())
        if key not in by_counts:
            by_counts[key] = _with_counts(fit, counted)
        parts[name] = by_counts[key]
    return parts


class _Source:
    """The model and its inputs, fixed or as functions of sizes."""

    def __init__(self, model: Model, inputs: Any, kwargs: Any, names: tuple[str, ...]) -> None:
        self._names, self._model, self._inputs, self._kwargs = names, model, inputs, kwargs
        self._builds = () if isinstance(model, nn.Module) else self._sizes_of(model)
        if not set(self._builds) <= set(names):
            self._builds = ()  # a model that is a function of tensors
        functions = [function for function in (inputs, kwargs) if _is_function(function)]
        used = {*self._builds, *(name for function in functions for name in self._sizes_of(function))}
        for name in used.difference(names):
            raise ScalingError(f"{name!r} is an argument of the inputs, but vary has only {', '.join(names)}")
        for name in names:
            if name not in used:
                raise ScalingError(f"{name} is varied, but neither the model nor the inputs are functions of it")

    def make(self, sizes: Sizes) -> tuple[Any, Any, Any]:
        """Return the model, its inputs and its keyword arguments at sizes."""
        by_name = dict(zip(self._names, sizes, strict=True))
        model = self._build(by_name) if self._builds else self._model
        inputs, kwargs = (
            value(**{name: by_name[name] for name in self._sizes_of(value)}) if _is_function(value) else value
            for value in (self._inputs, self._kwargs)
        )
        if self._builds and inputs is None and isinstance(model, tuple) and len(model) == 2:
            model, inputs = model
        return model, inputs, kwargs

    def _build(self, by_name: Mapping[str, int]) -> Any:
        build: Any = self._model
        sizes = {name: by_name[name] for name in self._builds}
        try:
            with torch.device("meta"):
                return build(**sizes)
        except Exception:  # it may need real values; any other error is raised again
            return build(**sizes)

    def _sizes_of(self, function: Any) -> tuple[str, ...]:
        """Return the sizes and required arguments of a function; one with **kwargs has all sizes."""
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):  # written in C
            return ("?",)
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            return self._names
        return tuple(name for name, item in parameters.items() if name in self._names or item.default is item.empty)


def _is_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, torch.Tensor)


def _count_parameters(model: Any) -> Sample:
    if not isinstance(model, nn.Module):
        raise ScalingError(f"{type(model).__name__} has no parameters: pass a torch.nn.Module")
    counts = parameter_count(model)
    return Sample(counts[""], dict(counts), {}, {})


def read_sample(trace: Trace, table: FormulaTable, metric: str) -> Sample:
    """Return a run's counts in a metric: the total, by module and operator, and the Trace's `about`."""
    counts = MetricCounts(trace, table)[metric]
    modules = {name: labels.total() for name, labels in counts.by_module_and_operator().items()}
    return Sample(counts.total(), modules, counts.by_label(), counts.ledger()[Status.UNSUPPORTED], trace.about)


def _describe_error(names: Sequence[str], sizes: Sizes, error: Exception) -> str:
    message = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(": ")
    message = message if len(message) <= 300 else message[:300] + " ..."
    return f"the model does not accept {format_sizes(names, sizes)}: {message}; narrow the range, or add a step"


class BoundsCheckedEmbedding(TorchFunctionMode):
    """Raise IndexError where an embedding is indexed beyond its last row, as real execution does; a context manager.

    Only indices with values are checked, such as token and position ids in shape execution.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        indices, rows = (args[0], args[1].shape[0]) if func is F.embedding and len(args) > 1 else (None, 0)
        if type(indices) is torch.Tensor and indices.device.type != "meta" and indices.numel():
            with disable_dispatch_modes():
                highest = int(indices.max())
            if highest >= rows:
                raise IndexError(f"an embedding of {rows:,} rows has no row {highest:,} (counted from 0)")
        return func(*args, **(kwargs or {}))
