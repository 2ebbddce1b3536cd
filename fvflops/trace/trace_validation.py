"""Validate a decoded Trace: types of all fields, ranges of all indexes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Any

from fvflops.trace.module_tree import ModuleInfo
from fvflops.trace.records import TraceFields
from fvflops.trace.spec import Symbol, TensorSpec, Value

_LARGEST = 1 << 63  # limit of torch's element and byte counts
_MAX_SHOWN = 60
_DEEPEST = 10_000  # modules around a call


def validate(trace: TraceFields, phases: Collection[str]) -> None:
    """Raise ValueError, in one line, where a Trace contains values that no recording produces.

    Takes linear time; checks whole columns rather than single events.
    """
    _check_modules(trace.modules.by_name)
    _check_regions(trace)
    _check_signatures(trace)
    for name, calls, items in (
        ("calls", trace.calls, len(trace.signatures)),
        ("region_calls", trace.region_calls, len(trace.region_signatures)),
    ):
        columns = list(zip(*calls, strict=True)) or [(), (), ()]
        _check_indexes(f"{name} item", columns[0], items)
        _check_indexes(f"{name} stack", columns[1], len(trace.stacks))
        _check_choices(f"{name} phase", columns[2], phases)
        _check_indexes(f"{name} count", calls.values(), _LARGEST)
    _check_indexes("active", trace.active, len(trace.stacks))
    _check_types("decomposed", trace.decomposed, str)
    _check_types("stops_at", trace.stops_at.names, str)
    _check_types("everything and complete", (trace.stops_at.everything, trace.complete), bool)
    _check_types("about", (trace.about,), dict)
    _check_types("about", trace.about.values(), str)
    _check_events(trace, phases)


def _check_modules(by_name: Any) -> None:
    if "" not in by_name:
        raise ValueError("there is no root module")
    for name, module in by_name.items():
        _check_module(module)
        if module.canonical not in by_name:
            raise ValueError(
                f"module {_quote(name)} has the canonical name {_quote(module.canonical)}, which does not exist"
            )


def _check_module(module: ModuleInfo) -> None:
    where = f"module {_quote(module.name)}"
    _check_types(where, (module.name, module.canonical, module.class_name, module.extra_repr, *module.classes), str)
    _check_types(where, (module.has_forward,), bool)
    _check_types(where, (key for key, _ in module.children), str)
    for key, path in module.children:  # paths grow downward, so no module contains itself
        if path is not None and path != (f"{module.name}.{key}" if module.name else key):
            raise ValueError(f"{where} has the child {_quote(path)} as {_quote(key)}")
    for parameter in (*module.parameters, *module.buffers):
        _check_types(where, (parameter.name,), str)
        _check_types(where, (parameter.identity,), int)
        _check_types(where, (parameter.trainable,), bool)
        if parameter.stored is not None:
            _check_indexes(where, (parameter.stored,), _LARGEST)
        _check_value(where, parameter.spec)
    for value in module.attributes.values():
        _check_value(where, value)


def _check_regions(trace: TraceFields) -> None:
    _check_choices("region", (region.kind for region in trace.regions), ("module", "function", "group"))
    _check_types("region", (region.name for region in trace.regions), str)
    for region in trace.regions:
        if region.kind == "module" and region.name not in trace.modules.by_name:
            raise ValueError(f"region {_quote(region.name)} is not a module")
    if any(len(stack) > _DEEPEST for stack in trace.stacks):
        raise ValueError(f"a stack has more than {_DEEPEST:,} modules")
    _check_indexes("stacks", (index for stack in trace.stacks for index in stack), len(trace.regions))


def _check_signatures(trace: TraceFields) -> None:
    for signature in trace.signatures:
        _check_types("signature", (signature.op, signature.schema, signature.source, *signature.names), str)
        _check_value(signature.op, (signature.inputs, signature.outputs))
    _check_indexes("region_signatures", (item.region for item in trace.region_signatures), len(trace.regions))
    for item in trace.region_signatures:
        _check_value("region signature", (item.inputs, item.outputs))


def _check_value(where: str, value: Value) -> None:
    if isinstance(value, tuple):
        for item in value:
            _check_value(where, item)
    elif isinstance(value, TensorSpec):
        _check_indexes(f"{where}, a shape", (*value.shape, *(() if value.nnz is None else (value.nnz,))), _LARGEST)
        _check_types(where, (value.dtype, value.device, value.layout), str)
        _check_types(where, value.values or (), int)
        if value.layout == "nested" and value.values is not None:
            _check_parts(where, value.shape, value.values)
        if math.prod(value.shape) >= _LARGEST:
            raise ValueError(f"{where} has a tensor of the invalid shape {_quote(value.shape)}")
    elif isinstance(value, Symbol):
        _check_types(where, (value.kind, value.name), str)


def _check_parts(where: str, shape: tuple[int, ...], values: tuple[int, ...]) -> None:
    """Raise ValueError where the sizes of a nested tensor's parts are not those of its shape."""
    rank = len(shape) - 1
    if rank < 0 or len(values) != shape[0] * rank:
        raise ValueError(f"{where} has a nested tensor of shape {_quote(shape)} with {len(values)} sizes of parts")
    if any(not 0 <= value <= shape[1 + index % rank] for index, value in enumerate(values)):
        raise ValueError(f"{where} has a nested tensor whose parts are larger than its shape {_quote(shape)}")


def _check_events(trace: TraceFields, phases: Collection[str]) -> None:
    if trace.storages:
        nbytes, *text_columns = zip(*trace.storages, strict=True)
        _check_indexes("storages", nbytes, _LARGEST)
        for column in text_columns:
            _check_types("storages", column, str)
    if not trace.events:
        return
    kinds, items, stacks, phase, thread, reads, writes, raised, *measured = zip(*trace.events, strict=True)
    ends = {
        "enter": len(trace.regions),
        "exit": len(trace.region_signatures),
        "op": len(trace.signatures),
        "free": len(trace.storages),
    }
    _check_choices("event", kinds, ends)
    for kind, end in ends.items():
        _check_indexes(
            f"event {kind}", [item for item, event_kind in zip(items, kinds, strict=True) if event_kind == kind], end
        )
    _check_indexes("event stack", stacks, len(trace.stacks))
    _check_choices("event phase", phase, phases)
    _check_indexes("event thread", thread, _LARGEST)
    for column in (reads, writes):
        _check_indexes("event storage", (index for indexes in column for index in indexes), len(trace.storages))
    _check_types("event raised", raised, bool)
    for column in measured:
        _check_types("event measure", column, int, type(None))


def _check_types(where: str, values: Iterable[Any], *types: type) -> None:
    items = list(values)
    if not set(map(type, items)) <= set(types):
        wrong = next(value for value in items if type(value) not in types)
        expected = " or ".join("null" if kind is type(None) else kind.__name__ for kind in types)
        raise ValueError(f"{where} has {_quote(wrong)} instead of {expected}")


def _check_choices(where: str, values: Iterable[Any], choices: Collection[str]) -> None:
    items = list(values)
    _check_types(where, items, str)
    if not set(items) <= set(choices):
        wrong = next(value for value in items if value not in choices)
        raise ValueError(f"{where} must be one of {', '.join(choices)}; got {_quote(wrong)}")


def _check_indexes(where: str, values: Iterable[Any], end: int) -> None:
    items = list(values)
    _check_types(where, items, int)
    if items and (min(items) < 0 or max(items) >= end):
        wrong = min(items) if min(items) < 0 else max(items)
        raise ValueError(f"{where} is {_quote(wrong)}, out of range 0 to {end - 1}")


def _quote(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…"
