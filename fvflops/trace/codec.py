"""Encode a Trace as JSON text, decode and validate it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from fvflops.text import checksum, parse_json
from fvflops.trace.calls import RegionSignature, Signature
from fvflops.trace.module_tree import ModuleInfo, ModuleTree
from fvflops.trace.records import PHASES, Event, Region, StopsAt, Storage, TraceError, TraceFields
from fvflops.trace.spec import Symbol, TensorSpec, Value, decode_value, encode_value

SCHEMA = 1
_FORMAT = "fvflops.trace"
_HEADER_LENGTH = 100  # characters in which a trace names its format, even if it was re-indented
_CHECKSUM = "checksum"
_SEAL = f',"{_CHECKSUM}":"{{}}"}}}}'  # how a trace ends
_MAX_SHOWN, _MAX_QUOTED = 200, 60  # characters of an error and of an invalid value in a message
_LARGEST = 1 << 63  # limit of torch's element and byte counts
_DEEPEST = 10_000  # modules around a call

T = TypeVar("T", bound=TraceFields)


def encode(trace: TraceFields) -> str:
    """Return a trace as JSON text, its events in columnar form."""
    text = _dump(
        {
            "format": _FORMAT,
            "schema": SCHEMA,
            "about": dict(trace.about),
            "complete": trace.complete,
            "stops_at": {"names": sorted(trace.stops_at.names), "everything": trace.stops_at.everything},
            "decomposed": sorted(trace.decomposed),
            "active": sorted(trace.active),
            "modules": trace.modules.encode(),
            "regions": trace.regions,
            "stacks": trace.stacks,
            "ops": {item.op: [list(item.names), item.schema] for item in trace.signatures},
            "signatures": [
                [item.op, *encode_value((item.inputs, item.outputs)), *([item.source] if item.source else [])]
                for item in trace.signatures
            ],
            "region_signatures": [
                [item.region, *encode_value((item.inputs, item.outputs))] for item in trace.region_signatures
            ],
            "calls": [[*key, count] for key, count in trace.calls.items()],
            "region_calls": [[*key, count] for key, count in trace.region_calls.items()],
            "events": None if trace.events is None else _encode_events(trace.events),
            "storages": list(trace.storages),
            **({"lines": list(trace.lines)} if trace.lines else {}),
        }
    )
    return text[:-1] + _SEAL.format(checksum(text))


def _dump(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False, separators=(",", ":"))


def decode(text: str, make: Callable[..., T]) -> T:
    """Decode JSON text into the trace that `make` builds from its fields; invalid text raises TraceError."""
    try:
        record = parse_json(text, finite=True)
    except ValueError as error:
        # `encode` writes the format first; an interrupted save may also leave an empty file.
        if not text.strip() or _FORMAT in text[:_HEADER_LENGTH]:
            raise TraceError(f"incomplete trace: invalid JSON ({error}); save it again") from error
        raise TraceError(f"not a trace: invalid JSON ({error}); pass a file written by Trace.to_json()") from error
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        found = str(record.get("format")) if isinstance(record, dict) else ""
        if re.fullmatch(r"fvflops\.\w{1,40}", found):
            raise TraceError(
                f"a report ({found}), which is not counted or compared again: give the model, or its trace by `fvflops "
                "count --save-trace`; plans of several layouts are compared by `fvflops plan --search`"
            )
        raise TraceError(
            f'not a trace of fvflops: it has no "format": "{_FORMAT}"; `fvflops count --format trace` writes one'
        )
    seal = record.pop(_CHECKSUM, None)
    if type(record.get("schema")) is not int or not 1 <= record["schema"] <= SCHEMA:
        schema = repr(record.get("schema"))[:_MAX_SHOWN]
        raise TraceError(
            f"this trace has schema {schema}, but this version of fvflops reads up to {SCHEMA}: update fvflops"
        )
    sealed = text.rstrip()[: -len(_SEAL.format("00000000"))] + "}"  # the text without its last key
    if seal is not None and seal not in (checksum(sealed), checksum(_dump(record))):  # re-indented text has the second
        raise TraceError(
            "this trace is damaged: its checksum differs; save it again, or if you changed it remove that key"
        )
    try:
        trace = _decode(record, make)
        _validate(trace)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise TraceError(f"this trace is damaged: {kind}{str(error)[:_MAX_SHOWN]}; save it again") from error
    return trace


def _encode_events(events: Sequence[Event]) -> dict[str, Any]:
    columns: dict[str, Any] = {"length": len(events)}
    for index, name in enumerate(Event._fields):
        column = [event[index] for event in events]
        default = Event._field_defaults.get(name)
        if name not in Event._field_defaults or any(value != default for value in column):
            columns[name] = column
    return columns


def _decode_events(columns: dict[str, Any]) -> tuple[Event, ...]:
    if unknown := columns.keys() - {*Event._fields, "length"}:
        raise ValueError(f"events have unknown columns: {sorted(unknown)}")
    length = columns.pop("length")
    for name in columns.keys() & {"reads", "writes"}:
        columns[name] = [tuple(item) for item in columns[name]]
    if any(len(column) != length for column in columns.values()):
        raise ValueError("the columns of its events differ in length")
    return tuple(Event(**dict(zip(columns, row, strict=True))) for row in zip(*columns.values(), strict=True))


def _decode(record: dict[str, Any], make: Callable[..., T]) -> T:
    ops = {op: (tuple(names), schema) for op, (names, schema) in record["ops"].items()}
    return make(
        modules=ModuleTree.decode(record["modules"]),
        regions=tuple(Region(*item) for item in record["regions"]),
        stacks=tuple(tuple(stack) for stack in record["stacks"]),
        signatures=tuple(
            Signature(op, ops[op][0], *_values(inputs, outputs), ops[op][1], *source)
            for op, inputs, outputs, *source in record["signatures"]
        ),
        region_signatures=tuple(
            RegionSignature(item, *_values(*lists)) for item, *lists in record["region_signatures"]
        ),
        calls={(item, stack, phase): count for item, stack, phase, count in record["calls"]},
        region_calls={(item, stack, phase): count for item, stack, phase, count in record["region_calls"]},
        events=None if record["events"] is None else _decode_events(record["events"]),
        storages=tuple(Storage(*item) for item in record["storages"]),
        stops_at=StopsAt(frozenset(record["stops_at"]["names"]), record["stops_at"]["everything"]),
        decomposed=frozenset(record["decomposed"]),
        active=frozenset(record["active"]),
        about=record["about"],
        complete=record["complete"],
        lines=tuple(record.get("lines", ())),
    )


def _values(inputs: Any, outputs: Any) -> tuple[Any, Any]:
    """Return the decoded inputs and outputs of a signature."""
    for record in (inputs, outputs):
        if not isinstance(record, list):
            raise ValueError(f"a signature has {record} instead of a list")
    return decode_value(inputs), decode_value(outputs)


def _validate(trace: TraceFields) -> None:
    """Raise ValueError, in one line, for values that no recording produces, by columns, in linear time."""
    _check_modules(trace.modules.by_name)
    _check_choices("region", (region.kind for region in trace.regions), ("module", "function", "group"))
    _check_types("region", (region.name for region in trace.regions), str)
    for region in trace.regions:
        if region.kind == "module" and region.name not in trace.modules.by_name:
            raise ValueError(f"region {_quote(region.name)} is not a module")
    if any(len(stack) > _DEEPEST for stack in trace.stacks):
        raise ValueError(f"a stack has more than {_DEEPEST:,} modules")
    _check_indexes("stacks", (index for stack in trace.stacks for index in stack), len(trace.regions))
    for signature in trace.signatures:
        _check_types("signature", (signature.op, signature.schema, signature.source, *signature.names), str)
        _check_value(signature.op, (signature.inputs, signature.outputs))
    _check_indexes("region_signatures", (item.region for item in trace.region_signatures), len(trace.regions))
    _check_value("region signature", tuple((item.inputs, item.outputs) for item in trace.region_signatures))
    for name, calls, items in (
        ("calls", trace.calls, len(trace.signatures)),
        ("region_calls", trace.region_calls, len(trace.region_signatures)),
    ):
        columns = list(zip(*calls, strict=True)) or [(), (), ()]
        _check_indexes(f"{name} item", columns[0], items)
        _check_indexes(f"{name} stack", columns[1], len(trace.stacks))
        _check_choices(f"{name} phase", columns[2], PHASES)
        _check_indexes(f"{name} count", calls.values(), _LARGEST)
    _check_indexes("active", trace.active, len(trace.stacks))
    _check_types("decomposed", trace.decomposed, str)
    _check_types("stops_at", trace.stops_at.names, str)
    _check_types("everything and complete", (trace.stops_at.everything, trace.complete), bool)
    _check_types("about", (trace.about,), dict)
    _check_types("about", trace.about.values(), str)
    _check_events(trace)


def _check_modules(by_name: Mapping[str, ModuleInfo]) -> None:
    if "" not in by_name:
        raise ValueError("there is no root module")
    for name, module in by_name.items():
        where, tensors = f"module {_quote(module.name)}", (*module.parameters, *module.buffers)
        names = [tensor.name for tensor in tensors] + [key for key, _ in module.children]
        texts = (module.name, module.canonical, module.class_name, module.extra_repr, *module.classes, *names)
        _check_types(where, texts, str)
        _check_types(where, (module.has_forward, *(tensor.trainable for tensor in tensors)), bool)
        _check_types(where, (tensor.identity for tensor in tensors), int)
        _check_indexes(where, (tensor.stored for tensor in tensors if tensor.stored is not None), _LARGEST)
        for key, path in module.children:  # paths grow downward, so no module contains itself
            if path is not None and path != (f"{module.name}.{key}" if module.name else key):
                raise ValueError(f"{where} has the child {_quote(path)} as {_quote(key)}")
        for value in (*(tensor.spec for tensor in tensors), *module.attributes.values()):
            _check_value(where, value)
        if module.canonical not in by_name:
            raise ValueError(
                f"module {_quote(name)} has the canonical name {_quote(module.canonical)}, which does not exist"
            )


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
    """Raise ValueError where the sizes of a nested tensor's parts do not match its shape."""
    rank = len(shape) - 1
    if rank < 0 or len(values) != shape[0] * rank:
        raise ValueError(f"{where} has a nested tensor of shape {_quote(shape)} with {len(values)} sizes of parts")
    if any(not 0 <= value <= shape[1 + index % rank] for index, value in enumerate(values)):
        raise ValueError(f"{where} has a nested tensor whose parts are larger than its shape {_quote(shape)}")


def _check_events(trace: TraceFields) -> None:
    if trace.storages:
        nbytes, *text_columns = zip(*trace.storages, strict=True)
        _check_indexes("storages", nbytes, _LARGEST)
        for column in text_columns:
            _check_types("storages", column, str)
    if not trace.events:
        return
    kinds, items, stacks, phase, thread, reads, writes, raised, *measured = zip(*trace.events, strict=True)
    tables = {"enter": trace.regions, "exit": trace.region_signatures, "op": trace.signatures, "free": trace.storages}
    _check_choices("event", kinds, tables)
    for kind, table in tables.items():
        of_kind = [item for item, event_kind in zip(items, kinds, strict=True) if event_kind == kind]
        _check_indexes(f"event {kind}", of_kind, len(table))
    _check_indexes("event stack", stacks, len(trace.stacks))
    _check_choices("event phase", phase, PHASES)
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
    return text if len(text) <= _MAX_QUOTED else text[:_MAX_QUOTED] + "…"
