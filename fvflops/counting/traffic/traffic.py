"""Memory traffic of each op call: the bytes that it must read and write, by its signature.

Assumes no cache reuse or fusion: each op reads each needed element from memory once, and writes each result element
once. Caches and fusion reduce the actual traffic; a kernel that reads its inputs several times increases it.

    views              no traffic; whether `reshape`, `contiguous` or `to` copied is known from the storages in a
                       trace's events. In a trace without events such ops are unsupported
    in-place, out=     the written tensor is read too, unless it is only overwritten: out=, copy_, zero_, fill_
    broadcast inputs   a tensor with stride 0 is bounded by its storage where there are events; a slice of a larger
                       storage that is then expanded, or one in a trace without events, counts with its expanded shape
    lookups            the selected rows, not the table; the indices are read as well
    sparse tensors     stored elements and their int64 indices; for blocked layouts only the elements
    nested tensors     as if all components had the size of the largest
    fused attention    q, k, v, mask, output and tensors saved for the backward pass; the scores are not stored
    masks              an assignment by a bool mask counts as if the mask were true everywhere
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from fvflops.counting.traffic.traffic_rules import (
    DROPOUTS,
    MAY_COPY,
    MOVES_NOTHING,
    OVERWRITES,
    VIEWS,
    argument_of,
    bytes_in,
    traffic_rule_of,
)
from fvflops.trace import Signature, Symbol, Value, tensors_in


class Traffic(NamedTuple):
    """Bytes read and written by one call."""

    read: int
    written: int


class StorageInfo(NamedTuple):
    """Aliasing and storage sizes of a call.

    `moved` is whether its results are in new storages (False: views of its inputs; None: unknown); `storage_bytes` is
    the total size of its inputs' storages, where that is less than their shapes imply, else None.
    """

    moved: bool | None = None
    storage_bytes: int | None = None


_UNKNOWN_STORAGE = StorageInfo()


def op_traffic(signature: Signature, storage_info: StorageInfo = _UNKNOWN_STORAGE) -> Traffic | None:
    """Return the traffic of one op call in bytes; None where it cannot be determined.

    This applies to weights inside a ScriptObject, to calls that bypassed the dispatcher, and, in a trace without
    storages, to ops that copy only if necessary.
    """
    # Dropout in eval mode returns its input.
    returns_input = signature.packet in DROPOUTS and argument_of(signature, "train") is False
    if signature.packet in MOVES_NOTHING or returns_input:
        return Traffic(0, 0)
    if _is_opaque(signature):
        return None
    schema = _read_schema(signature.schema)
    returns_views = storage_info.moved is False or (storage_info.moved is None and _returns_views(signature, schema))
    if returns_views and not schema.written:
        may_copy = storage_info.moved is None and signature.packet in MAY_COPY
        return None if may_copy else Traffic(0, 0)
    try:
        read = sum(_bytes_read(signature, schema))
        written = sum(_bytes_written(signature, schema, storage_info.moved))
    except KeyError:  # a dtype of unknown size
        return None
    return Traffic(read if storage_info.storage_bytes is None else min(read, storage_info.storage_bytes), written)


class _Schema(NamedTuple):
    """The tensor arguments that an op writes to, the subset that it does not read, and the aliasing of each result.

    A result is "" if it is new, "view" if it is a view of an argument, "same" if it is a written argument.
    """

    written: frozenset[str] = frozenset()
    only_written: frozenset[str] = frozenset()
    results: tuple[str, ...] = ()

    def result(self, index: int) -> str:
        """Return the aliasing of a result; if the schema has a single result, it applies to all."""
        if len(self.results) == 1:
            return self.results[0]
        return self.results[index] if index < len(self.results) else ""


_TENSOR = re.compile(r"Tensor(?:\((\w+)(!?)[^)]*\))?(?:\?|\[\w*\])* (\w+)")
_ALIAS = re.compile(r"\(\w+(!?)[^)]*\)")


@lru_cache(maxsize=1 << 12)
def _read_schema(text: str) -> _Schema:
    """Parse the text of a schema; a schema without types writes nothing in-place."""
    head, arrow, results = text.rpartition(") -> ")
    positional, _, keyword_only = head.partition("(")[2].partition("*, ")
    if not arrow:
        return _Schema()
    read_too, only_written = (
        {name for _, mark, name in _TENSOR.findall(part) if mark} for part in (positional, keyword_only)
    )
    items = results[1:-1].split(", ") if results.startswith("(") else [results]
    found = [_ALIAS.search(item) for item in items if item]
    aliases = tuple("" if alias is None else "same" if alias[1] else "view" for alias in found)
    return _Schema(frozenset(read_too | only_written), frozenset(only_written), aliases)


def _is_opaque(signature: Signature) -> bool:
    """Return whether the call's arguments were not recorded, or one of them is an object that may contain a weight."""
    unrecorded = not signature.inputs and not signature.outputs and signature.schema.endswith("(...)")
    return unrecorded or any(
        isinstance(value, Symbol) and value.kind == "object" and value.name == "ScriptObject"
        for value in signature.inputs
    )


def _returns_views(signature: Signature, schema: _Schema) -> bool:
    """Return whether an op returns only views, or may do so, by its name and its schema."""
    if signature.packet in VIEWS or signature.packet in MAY_COPY:
        return True
    kinds = [schema.result(index) for index, value in enumerate(signature.outputs) if any(tensors_in(value))]
    return bool(kinds) and all(kind == "view" for kind in kinds)


def _bytes_read(signature: Signature, schema: _Schema) -> Iterable[int]:
    reads, _ = traffic_rule_of(signature)
    for name, value in _named(signature):
        overwritten = schema.written if signature.packet in OVERWRITES else schema.only_written
        if name in reads:
            yield reads[name](signature)
        elif name not in overwritten:
            yield bytes_in(value)


def _bytes_written(signature: Signature, schema: _Schema, moved: bool | None) -> Iterable[int]:
    _, writes = traffic_rule_of(signature)
    for name, value in _named(signature):
        if name in writes:
            yield writes[name](signature)
        elif name in schema.written:
            yield bytes_in(value)
    for index, value in enumerate(signature.outputs):
        kind = schema.result(index)
        if not kind or (kind == "view" and moved):
            yield bytes_in(value)


def _named(signature: Signature) -> Iterable[tuple[str, Value]]:
    """Yield the arguments with their names, "" where an op has no schema."""
    names = signature.names or ("",) * len(signature.inputs)
    return zip(names, signature.inputs, strict=False)
