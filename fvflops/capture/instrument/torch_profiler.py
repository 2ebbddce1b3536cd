"""Mark module calls with ranges for torch.profiler, and read its events."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from fvflops.capture.instrument.modules import CALLS, compiled_calls_replaced
from fvflops.capture.model.model_index import ModelIndex
from fvflops.capture.model.read_module_tree import unwrap_compiled
from fvflops.capture.restore.containers import IdentityMapping
from fvflops.torch_internals import RecordFunction
from fvflops.trace.kernel_events import KernelEvent, KernelRun

# Prefix of all ranges; torch.profiler names modules in the same format where it records stacks.
MARK = "nn.Module: "
_MODULE_RANGE = re.compile(re.escape(MARK) + r"(?:(.+) )?\(.*\)")
_BACKWARD = 1  # RecordScope::BACKWARD_FUNCTION
_ALLOCATION = "[memory]"
_PYTHON_FUNCTION = re.compile(r".*\.py\(\d+\): |<built-in |<string>\(\d+\): |nn\.Module: ")
_KIND_BY_PREFIX = {
    "ProfilerStep": "step",
    "Optimizer.step#": "optimizer",
    "Torch-Compiled Region": "compiled",
    "CompiledFunctionBackward": "compiled",
    "autograd::engine::evaluate_function": "node",
}


def name_ranges(model_index: ModelIndex) -> dict[str, str]:
    """Return the name of the range around each module's calls, by module name."""
    classes = {name: model_index.tree.by_name[name].class_name for name in model_index.names.values()}
    texts = {name: f"{MARK}{name} ({cls})" if name else f"{MARK}({cls})" for name, cls in classes.items()}
    # The profiler expects UTF-8, which cannot encode surrogates.
    return {name: text.encode("utf-8", "backslashreplace").decode("utf-8") for name, text in texts.items()}


def module_of_range(range_name: str) -> str | None:
    """Return the module that the name of a range is for, None for other ranges.

    >>> module_of_range("nn.Module: layer1.0 (Block)"), module_of_range("nn.Module: (Net)"), module_of_range("aten::mm")
    ('layer1.0', '', None)
    """
    match = _MODULE_RANGE.fullmatch(range_name)
    return None if match is None else match.group(1) or ""


@contextmanager
def module_ranges(model_index: ModelIndex) -> Iterator[None]:
    """Mark each call of a model's modules with a range for torch.profiler while the context lasts.

    Overhead is about 3 µs per call, and almost none without a running profiler. Code that torch.compile compiles
    meanwhile has no ranges inside and is unchanged; modules compiled by `compile()` get a range around the call.
    """
    range_names = name_ranges(model_index)
    range_of = IdentityMapping([(module, range_names[name]) for module, name in model_index.names.items()])
    is_compiling = torch.compiler.is_compiling

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # An OptimizedModule is not in the model's index, but the module that it wraps is.
            if is_compiling() or not (range_name := range_of.get(module) or range_of.get(unwrap_compiled(module))):
                return original(module, *args, **kwargs)
            with RecordFunction(range_name):
                return original(module, *args, **kwargs)

        return call

    def with_range(module: nn.Module, compiled: Callable[..., Any]) -> Callable[..., Any]:
        return partial(around(lambda _, *args, **kwargs: compiled(*args, **kwargs)), module)

    with CALLS.wrapped(around), compiled_calls_replaced(model_index.names, with_range):
        yield


def read_run(profiler: Any, model_index: ModelIndex, *, complete: bool = True) -> KernelRun:
    """Return the events of the cycle of a `profile` that has just ended, as in its `events()`."""
    inner, launches, memory = profiler.profiler, dict[int, int](), list[tuple[int, int]]()
    modules = {range_name: name for name, range_name in name_ranges(model_index).items()}
    results, cpu = inner.kineto_results, torch.autograd.DeviceType.CPU
    if inner.use_device:  # in older torch versions a FunctionEvent does not contain the op that launched it
        events = (event for event in results.events() if event.device_type() != cpu)
        launches = {event.correlation_id(): event.linked_correlation_id() for event in events}
    if inner.profile_memory:
        begin = results.trace_start_ns()
        records = [event for event in results.events() if event.name() == _ALLOCATION and event.device_type() == cpu]
        memory = [(event.start_ns() - begin, event.nbytes()) for event in records]
        memory.sort(key=lambda change: change[0])  # stable: simultaneous changes remain in order
    return read_events(
        inner.function_events,
        modules,
        memory=memory if inner.profile_memory else None,
        device=inner.use_device or "",
        complete=complete,
        launches=launches,
    )


def read_events(
    events: Sequence[Any],
    modules: Mapping[str, str],
    *,
    memory: Sequence[tuple[int, int]] | None = None,
    device: str = "",
    complete: bool = True,
    launches: Mapping[int, int] | None = None,
) -> KernelRun:
    """Return a run from torch.profiler's `FunctionEvent`s.

    `modules` maps range names to module names. `memory` lists allocations and frees on the CPU in order, as
    (nanoseconds from the beginning, bytes). `launches` maps correlation ids of device events to the ids of the ops that
    launched them, if the events do not contain these.
    """
    range_names = {event.name for event in events if _is_on_cpu(event) and _is_range(event, modules)}
    # Ranges are also reported on the device, in addition to the kernels inside them.
    events = [
        event for event in events if _is_on_cpu(event) or not (event.name in range_names or _is_range(event, modules))
    ]
    by_start = sorted(events, key=lambda event: (event.time_range.start, -event.time_range.end))
    # An event can have the same start and end as its parent: parents come first.
    ordered: list[Any] = []
    visited: set[int] = set()
    for event in by_start:
        pending = []
        while event is not None and id(event) not in visited:
            pending.append(event)
            visited.add(id(event))
            event = event.cpu_parent
        ordered += reversed(pending)
    positions = {id(event): position for position, event in enumerate(ordered)}
    launchers = {event.id: position for position, event in enumerate(ordered) if _is_on_cpu(event)}
    allocated = None if memory is None else _AllocatedBytes(memory)
    parents = [_parent(event, positions, launchers, launches or {}) for event in ordered]
    pairs = zip(ordered, parents, strict=True)
    return KernelRun(tuple(_read(*pair, modules, allocated) for pair in pairs), device, complete)


def _is_range(event: Any, modules: Mapping[str, str]) -> bool:
    return bool(event.is_user_annotation) or event.name in modules


def _is_on_cpu(event: Any) -> bool:
    return bool(event.device_type == torch.autograd.DeviceType.CPU)


def _parent(event: Any, positions: Mapping[int, int], launchers: Mapping[int, int], launches: Mapping[int, int]) -> int:
    if not _is_on_cpu(event):
        linked = getattr(event, "linked_correlation_id", None)
        return launchers.get(launches.get(event.id, -1) if linked is None else linked, -1)
    return -1 if event.cpu_parent is None else positions.get(id(event.cpu_parent), -1)


def _read(event: Any, parent: int, modules: Mapping[str, str], allocated: _AllocatedBytes | None) -> KernelEvent:
    kind = _kind(event, modules)
    start, end = (round(event.time_range.start * 1000), round(event.time_range.end * 1000))
    on_device = kind == "device"
    before, after, peak = (None,) * 3 if allocated is None or on_device else allocated.levels(start, end)
    shapes = event.input_shapes
    return KernelEvent(
        name=event.key,
        kind=kind,
        event_id=event.id,
        parent=parent,
        start_ns=start,
        duration_ns=end - start,
        thread=event.thread,
        sequence=event.sequence_nr,
        forward_thread=event.fwd_thread or 0,
        module=modules.get(event.name, ""),
        self_ns=round(event.self_cpu_time_total * 1000),
        device_ns=round(event.device_time_total * 1000),
        self_device_ns=round(event.self_device_time_total * 1000),
        memory=event.cpu_memory_usage,
        self_memory=event.self_cpu_memory_usage,
        device_memory=event.device_memory_usage,
        self_device_memory=event.self_device_memory_usage,
        shapes=str(shapes) if shapes else "",
        stack=tuple(event.stack or ()),
        before=before,
        after=after,
        peak=peak,
    )


def _kind(event: Any, modules: Mapping[str, str]) -> str:
    name = event.name
    if not _is_on_cpu(event):
        return "device"
    if name in modules:
        return "module"
    flag = getattr(event, "is_python_function", None)  # None in older torch
    if _PYTHON_FUNCTION.match(name) if flag is None else flag:
        return "python"
    kind = kind_of_range(name)
    if kind is not None:
        return kind
    if event.scope == _BACKWARD:
        return "node"
    if name == _ALLOCATION:
        return "memory"
    if event.is_user_annotation:
        return "range"
    return "op" if "::" in name and getattr(event, "activity_type", None) in (None, "cpu_op") else "other"


def kind_of_range(name: str) -> str | None:
    """Return the kind of a range that torch names: a step, an optimizer step, compiled code or an autograd node.

    >>> kind_of_range("ProfilerStep#3"), kind_of_range("aten::mm")
    ('step', None)
    """
    return next((kind for prefix, kind in _KIND_BY_PREFIX.items() if name.startswith(prefix)), None)


class _AllocatedBytes:
    """Bytes allocated by the CPU allocator over time, relative to the beginning of the trace."""

    def __init__(self, changes: Sequence[tuple[int, int]]) -> None:
        self._times = [time for time, _ in changes]
        self._levels = [0]
        for _, nbytes in changes:
            self._levels.append(self._levels[-1] + nbytes)

    def levels(self, start: int, end: int) -> tuple[int, int, int]:
        """Return the bytes allocated before and after an interval, and the peak during it."""
        first, last = bisect_left(self._times, start), bisect_right(self._times, end)
        return self._levels[first], self._levels[last], max(self._levels[first : last + 1])
