"""Encode a Trace as JSON text, decode and validate it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from fvflops.text import checksum, parse_json
from fvflops.trace.module_tree import ModuleTree
from fvflops.trace.records import PHASES, Event, Region, StopsAt, Storage, TraceError, TraceFields
from fvflops.trace.signature import RegionSignature, Signature
from fvflops.trace.spec import Value, decode_value, encode_value
from fvflops.trace.trace_validation import validate

SCHEMA = 1
_FORMAT = "fvflops.trace"
_HEADER_LENGTH = 100  # characters in which a trace names its format, even if it was re-indented
_CHECKSUM = "checksum"
_SEAL = f',"{_CHECKSUM}":"{{}}"}}}}'  # how a trace ends
_MAX_SHOWN = 200  # characters of an invalid value in a message

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
                [
                    *(item.op, encode_value(item.inputs), encode_value(item.outputs)),
                    *((item.source,) if item.source else ()),
                ]
                for item in trace.signatures
            ],
            "region_signatures": [
                [item.region, encode_value(item.inputs), encode_value(item.outputs)] for item in trace.region_signatures
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


def _read_seal(text: str) -> str:
    """Return the checksum of a text as `encode` writes it, without its last key."""
    return checksum(text.rstrip()[: -len(_SEAL.format("00000000"))] + "}")


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
    if seal is not None and seal not in (_read_seal(text), checksum(_dump(record))):  # re-indented text has the second
        raise TraceError(
            "this trace is damaged: its checksum differs; save it again, or if you changed it remove that key"
        )
    try:
        trace = _decode(record, make)
        validate(trace, PHASES)
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
    unknown = columns.keys() - set(Event._fields) - {"length"}
    if unknown:
        raise ValueError(f"events have unknown columns: {sorted(unknown)}")
    names = [name for name in Event._fields if name in columns]
    for name in ("reads", "writes"):
        if name in columns:
            columns[name] = [tuple(item) for item in columns[name]]
    if any(len(columns[name]) != columns["length"] for name in names):
        raise ValueError("the columns of its events differ in length")
    return tuple(
        Event(**dict(zip(names, row, strict=True))) for row in zip(*(columns[name] for name in names), strict=True)
    )


def _decode(record: dict[str, Any], make: Callable[..., T]) -> T:
    ops = {op: (tuple(names), schema) for op, (names, schema) in record["ops"].items()}
    return make(
        modules=ModuleTree.decode(record["modules"]),
        regions=tuple(Region(*item) for item in record["regions"]),
        stacks=tuple(tuple(stack) for stack in record["stacks"]),
        signatures=tuple(
            Signature(op, ops[op][0], _values(inputs), _values(outputs), ops[op][1], *source)
            for op, inputs, outputs, *source in record["signatures"]
        ),
        region_signatures=tuple(
            RegionSignature(region, _values(inputs), _values(outputs))
            for region, inputs, outputs in record["region_signatures"]
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


def _values(record: list[Any]) -> tuple[Value, ...]:
    value = decode_value(record)
    if not isinstance(value, tuple):
        raise ValueError(f"a signature has {record} instead of a list")
    return value
