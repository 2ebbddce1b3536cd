"""Count one model of many: build it without weights where that is possible, and report a failure as its row's error."""

from __future__ import annotations

import gc
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from importlib import metadata
from typing import Any

import torch

from fvflops import __version__
from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.analysis.trace_file import load_trace
from fvflops.capture.errors.model_errors import describe_error
from fvflops.capture.model.model_index import read_modules
from fvflops.capture.restore.global_state import seeded
from fvflops.counting.metrics import METRICS, MetricCounts
from fvflops.counting.uncounted_work import describe_ignored_products, find_unsupported_locations
from fvflops.formulas import FormulaTable, resolve_table
from fvflops.plan.memory.predict_memory import predict_memory
from fvflops.reports.terminal.op_coverage import format_locations
from fvflops.sources.load import SOURCES, check_trace_options, is_saved_trace, load_from_factory, load_model
from fvflops.sources.loaded_model import LoadedModel, with_input_hint
from fvflops.sources.options import DEFAULT_OPTIONS, SourceOptions
from fvflops.sources.transformers.shrink_config import shrink_model
from fvflops.sweep.model_count import ModelCount
from fvflops.trace import ModuleTree, Status
from fvflops.units import format_bytes

_META = "meta"
_SMALLER = "smaller"
# Beginnings of the names of ops outside the dispatcher.
UNSEEN = ("unseen::", "prim::PythonOp.", "triton::")
# In the message of an allocation that failed, or was not tried.
_MEMORY_WORDS = ("MemoryError", "OutOfMemoryError", "t allocate memory", "not enough memory", "its weights take")

# Is called about once a second with the names of the models that are being counted.
OnTick = Callable[[Sequence[str]], None]
Build = Callable[[SourceOptions], LoadedModel]
# Returns a module, or (module, inputs).
Factory = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class CountSettings:
    """How each of many models is counted, as values that a worker process can be sent.

    `table`, `execution` and `assume` are as for FlopCountAnalysis; `train` counts models in training mode. Without
    `peak_memory` a row lacks it: it needs a second recording. `memory` limits the bytes of weights of a model that
    cannot be counted without weights; None is the memory of this machine. `kernels` is the torch device whose
    kernels are recorded, such as cuda; None is the model's.
    """

    table: str | FormulaTable = "default"
    execution: str = "auto"
    assume: Mapping[str, int | float] = field(default_factory=dict)
    train: bool = False
    peak_memory: bool = True
    memory: int | None = None
    kernels: str | None = None


DEFAULT_SETTINGS: CountSettings = CountSettings()


@dataclass(frozen=True, slots=True)
class Task:
    """One model to count; without a `factory`, `name` is a MODEL argument."""

    name: str
    factory: Factory | None = None
    options: SourceOptions = DEFAULT_OPTIONS
    settings: CountSettings = DEFAULT_SETTINGS


# Yields exactly one row for each task as it is done; tasks are taken as they are needed.
Executor = Callable[[Iterable[Task], OnTick], Iterator[ModelCount]]


def ignore_tick(names: Sequence[str]) -> None:
    """Show nothing of the models that are being counted."""


def run_here(tasks: Iterable[Task], on_tick: OnTick = ignore_tick) -> Iterator[ModelCount]:
    """Yield the row of each task, counted in this process, in their order, without limits of time and memory."""
    for task in tasks:
        on_tick((task.name,))
        yield run_task(task)


def count_model(
    name: str, options: SourceOptions = DEFAULT_OPTIONS, settings: CountSettings = DEFAULT_SETTINGS
) -> ModelCount:
    """Return the row of a model that a MODEL argument names, such as `timm:resnet50`; it never raises for a model.

    Unless `options` name a device, the model is built on the meta device, and one that cannot be counted there is built
    with random weights. Where a default configuration of transformers does not fit into memory, a smaller one is
    counted, which the row's `built` describes. The row of a saved Trace lacks the model's device and dtype, and the
    peak memory. An unknown table raises as in `load_table`.

    >>> row = count_model("zoo:lenet5")
    >>> row.model, row.parameters, row.flops, row.peak_memory, row.error
    ('zoo:lenet5', 61706, 416520, 287592, '')
    >>> count_model("zoo:lenet6").error
    "no model 'lenet6' in the zoo: did you mean 'lenet5'?"
    """
    return run_task(Task(name, None, options, settings))


def run_task(task: Task) -> ModelCount:
    """Return the row of a task; whatever the model raises is the row's error."""
    begun, row = time.perf_counter(), start_row(task)
    if task.factory is None and is_saved_trace(task.name):
        row = _count_trace(row, task)
    else:
        load = partial(load_from_factory, task.factory) if task.factory is not None else load_model
        row = _Attempts(row, task).run(partial(load, task.name))
    return replace(row, seconds=round(time.perf_counter() - begun, 3))


def start_row(task: Task) -> ModelCount:
    """Return the row of a model before it is built."""
    return ModelCount(
        task.name,
        options=describe_options(task.options, task.settings),
        table=resolve_table(task.settings.table).name,
        versions=find_versions(task.name.partition(":")[0]),
    )


def _count_trace(row: ModelCount, task: Task) -> ModelCount:
    settings, table = task.settings, resolve_table(task.settings.table)
    run = {"--assume": settings.assume, "--train": settings.train, "--execution real": settings.execution == "real"}
    try:
        check_trace_options(task.name, task.options, run)
        flops = FlopCountAnalysis.from_trace(load_trace(task.name), table=table, warn=False)
        parameters = MetricCounts(flops.trace(), table, flops.counts())["parameters"].total()
        return replace(_with_counts(row, flops, table), parameters=parameters)
    except Exception as error:
        return replace(row, failure="error", error=describe_error(error))


class _Attempts:
    """Attempts at counting one model: on the meta device, with random weights, and a smaller one."""

    def __init__(self, row: ModelCount, task: Task) -> None:
        self._row = row
        self._task = task
        self._weights: int | None = None  # bytes
        self._errors: dict[str, list[str]] = {}  # error → attempts

    def run(self, build: Build) -> ModelCount:
        """Return the row of the first attempt that succeeds, or one with the errors of all."""
        options = self._task.options
        # Some sources build on the meta device unless told otherwise.
        devices = [options.device or str(torch.get_default_device())]
        if options.device is None and self._task.settings.execution != "real":
            devices.insert(0, _META)
        if options.device is None and _META not in devices:
            with suppress(Exception):  # building it with weights raises the same, or succeeds
                self._weights = _weigh(read_modules(build(replace(options, device=_META)).model))
        for device in devices:
            attempt = device if device == _META else "with weights"
            if device != _META and (excess := self._describe_excess()):
                self._errors[excess] = [attempt]
            elif self._try(build, replace(options, device=device), attempt):
                return self._row
        if self._lacks_memory() and self._try_smaller(build):
            return self._row
        errors = list(self._errors)
        if len(devices) > 1 and len(errors) > 1:
            errors = [f"{', '.join(attempts)}: {error}" for error, attempts in self._errors.items()]
        failure = "out of memory" if self._lacks_memory() else "error"
        return replace(self._row, failure=failure, error=" | ".join(errors))

    def _lacks_memory(self) -> bool:
        return any(word in error for error in self._errors for word in _MEMORY_WORDS)

    def _try(self, build: Build, options: SourceOptions, attempt: str) -> bool:
        loaded = None
        try:
            with seeded(0):
                loaded = build(options)
                modules = read_modules(loaded.model)
                self._weights = _weigh(modules)
                self._row = _describe_weights(self._row, modules)
                self._row = _count(self._row, loaded, self._task.settings)
        except (Exception, SystemExit) as error:
            self._errors.setdefault(describe_error(error), []).append(attempt)
            return False
        finally:
            del loaded
            if options.device != _META:
                gc.collect()  # weights in reference cycles would count against the next attempt, or the next model
        return True

    def _try_smaller(self, build: Build) -> bool:
        named, smaller = self._row, None
        try:
            smaller = shrink_model(self._task.name, self._task.options)
        except Exception as error:
            self._errors.setdefault(describe_error(error), []).append(_SMALLER)
        if smaller is not None:
            self._row = replace(named, built=smaller.changes)
            if self._try(build, smaller.options, _SMALLER):
                return True
        self._row = named
        return False

    def _describe_excess(self) -> str:
        """Return a message if the weights need more memory than there is, or ""."""
        limit = machine_memory() if self._task.settings.memory is None else self._task.settings.memory
        if self._weights is None or limit is None or self._weights <= limit:
            return ""
        return f"its weights take {format_bytes(self._weights)}, more than the limit of {format_bytes(limit)}"


def describe_options(options: SourceOptions, settings: CountSettings) -> str:
    """Return the settings of building and counting a model that are not the defaults, as JSON, "" for none.

    >>> describe_options(SourceOptions(inputs=("1,3,64,64",)), CountSettings(train=True, memory=1 << 30))
    '{"inputs": ["1,3,64,64"], "train": true}'
    """
    names = ("execution", "assume", "train", "kernels")
    chosen = {**asdict(options), **{name: getattr(settings, name) for name in names}}
    defaults = {**asdict(DEFAULT_OPTIONS), **{name: getattr(DEFAULT_SETTINGS, name) for name in names}}
    changed = {name: value for name, value in chosen.items() if value != defaults[name]}
    return json.dumps(changed, default=dict) if changed else ""


@cache
def find_versions(source: str) -> str:
    """Return the versions of fvflops, torch and the library of a source of models.

    >>> find_versions("zoo") == f"fvflops {__version__}, torch {torch.__version__}"
    True
    """
    versions = [f"fvflops {__version__}", f"torch {torch.__version__}"]
    distribution = {"hf": "transformers", "open_clip": "open_clip_torch"}.get(source, source)
    if source in SOURCES and source != "zoo":
        with suppress(metadata.PackageNotFoundError):  # the row's error says that it is not installed
            versions.append(f"{distribution} {metadata.version(distribution)}")
    return ", ".join(versions)


def _count(row: ModelCount, loaded: LoadedModel, settings: CountSettings) -> ModelCount:
    table = resolve_table(settings.table)
    loaded.train(settings.train, option="--train")
    flops = FlopCountAnalysis(
        loaded.model,
        loaded.inputs,
        kwargs=loaded.kwargs,
        table=table,
        execution=settings.execution,
        device=settings.kernels,
        assume=settings.assume,
        warn=False,
    )
    with_input_hint(loaded, flops.trace)
    row = _with_counts(row, flops, table)
    return replace(row, peak_memory=predict_memory(flops).peak) if settings.peak_memory else row


def _with_counts(row: ModelCount, flops: FlopCountAnalysis, table: FormulaTable) -> ModelCount:
    trace, counts = flops.trace(), flops.counts()
    metrics = MetricCounts(trace, table, counts)
    totals: dict[str, Any] = {name: metrics[name].total() for name in METRICS if name != "parameters"}
    return replace(
        row,
        **totals,
        unsupported=_list_unsupported(flops),
        ignored=describe_ignored_products(trace, counts, table),
        execution=str(trace.about.get("execution", "")),
        inputs=str(trace.about.get("inputs", "")),
    )


def _list_unsupported(flops: FlopCountAnalysis) -> str:
    unsupported = flops.counts().ledger()[Status.UNSUPPORTED]
    places = find_unsupported_locations(flops.trace(), flops.counts()) if unsupported else {}
    return "; ".join(
        f"{op} ×{calls}" + (f" in {format_locations(places[op])}" if op.startswith(UNSEEN) else "")
        for op, calls in sorted(unsupported.items())
    )


def _describe_weights(row: ModelCount, modules: ModuleTree) -> ModelCount:
    """Return the row with the elements of the parameters, the device, and the dtype of most elements."""
    parameters = list(modules.parameters())
    tensors = parameters or list(modules.buffers())
    dtypes: Counter[str] = Counter()
    for tensor in tensors:
        dtypes[tensor.spec.dtype] += tensor.spec.numel
    return replace(
        row,
        parameters=dtypes.total() if parameters else 0,
        device=tensors[0].spec.device if tensors else "",
        dtype=dtypes.most_common(1)[0][0] if dtypes else "",
    )


def _weigh(modules: ModuleTree) -> int:
    return sum(tensor.nbytes for tensor in (*modules.parameters(), *modules.buffers()))


def machine_memory() -> int | None:
    """Return the bytes of memory of this machine, None where the system does not say."""
    if not hasattr(os, "sysconf") or "SC_PHYS_PAGES" not in os.sysconf_names:
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def failed_row(task: Task, failure: str, error: str) -> ModelCount:
    """Return the row of a task that could not be run."""
    return replace(start_row(task), failure=failure, error=error)
