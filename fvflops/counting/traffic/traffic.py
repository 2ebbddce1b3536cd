"""Memory traffic: the bytes that each op call must read and write, by its signature.

What is counted is the compulsory traffic of every op on its own: each number that it needs is read once, each that it
gives is written once. Caches change that (what one op leaves in them the next need not fetch), so does fusion (what is
between two fused ops never reaches memory), and a kernel may read again what does not fit on the chip.

    views              move nothing; whether `reshape`, `contiguous` or `to` copied is known by the storages in a
                       trace's events. In a trace without events it is not known, and such ops are UNKNOWN
    in place, out=     what is written is read too, unless it is only overwritten: out=, copy_, zero_, fill_
    broadcast inputs   a tensor with stride 0 is bounded by its storage where there are events; a slice of a larger
                       storage that is then expanded, or one in a trace without events, counts with its expanded shape
    looking up         the rows that were asked for, not the table; the indices are read as well
    sparse tensors     stored elements and their int64 indices; of blocked layouts the elements alone
    nested tensors     as if each part were as large as the largest
    fused attention    q, k, v, mask, output and what is kept for the backward pass; scores stay on the chip
    conditions         an assignment by a mask of bools counts as if the mask were true everywhere
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
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
    """The bytes that one call reads and writes."""

    read: int
    written: int


class StorageInfo(NamedTuple):
    """What the storages of a call tell of it.

    `moved` says whether its results are new memory (False: views of what went in; None: not known); `held` is the
    number of bytes that the storages of its arguments hold, where that is less than their shapes say, else None.
    """

    moved: bool | None = None
    held: int | None = None


_UNSEEN = StorageInfo()


def op_traffic(signature: Signature, sight: StorageInfo = _UNSEEN) -> Traffic | None:
    """Return what one call of an op must read and write, in bytes; None where it cannot be known.

    It cannot where a weight is hidden in an object, of an op that no dispatch mode saw, and of one that copies only
    where it must, if its storages are not known.

    >>> from fvflops.trace import TensorSpec
    >>> vector = TensorSpec((1000,), "float32")
    >>> schema = "aten::add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)"
    >>> op_traffic(Signature("aten::add_.Tensor", ("self", "other", "alpha"), (vector, vector, 1), (vector,), schema))
    Traffic(read=8000, written=4000)
    """
    if signature.packet in MOVES_NOTHING or _gives_back(signature):
        return Traffic(0, 0)
    if _is_opaque(signature):
        return None
    schema = _read_schema(signature.schema)
    gives_views = sight.moved is False or (sight.moved is None and _gives_views(signature, schema))
    if gives_views and not any(argument.written for argument in schema.arguments.values()):
        may_copy = sight.moved is None and signature.packet in MAY_COPY
        return None if may_copy else Traffic(0, 0)
    try:
        read = sum(_bytes_read(signature, schema))
        written = sum(_bytes_written(signature, schema, sight.moved))
    except KeyError:  # a dtype whose size is not known
        return None
    return Traffic(read if sight.held is None else min(read, sight.held), written)


@dataclass(frozen=True, slots=True)
class _Argument:
    """Whether an op writes to an argument, and whether it does no more than that."""

    written: bool
    only_written: bool


_READ = _Argument(False, False)


@dataclass(frozen=True, slots=True)
class _Schema:
    """Of the arguments that hold tensors what is done with them, and of each result whether it is an argument.

    A result is "" where it is new, "view" of an argument, or the "same" as one that was written.
    """

    arguments: Mapping[str, _Argument] = field(default_factory=dict)
    results: tuple[str, ...] = ()

    def result(self, index: int) -> str:
        """Return what a result is; one for all where the schema has one and the call gave several."""
        if len(self.results) == 1:
            return self.results[0]
        return self.results[index] if index < len(self.results) else ""


_TENSOR = re.compile(r"Tensor(?:\((\w+)(!?)[^)]*\))?(?:\?|\[\w*\])* (\w+)")
_ALIAS = re.compile(r"\(\w+(!?)[^)]*\)")


@lru_cache(maxsize=1 << 12)
def _read_schema(text: str) -> _Schema:
    """Return what the text of a schema says; of one that names no types, that nothing is written in place."""
    head, arrow, results = text.rpartition(") -> ")
    positional, _, keyword_only = head.partition("(")[2].partition("*, ")
    arguments = {
        name: _Argument(bool(mark), bool(mark) and part is keyword_only)
        for part in (positional, keyword_only)
        for _, mark, name in _TENSOR.findall(part)
    }
    if not arrow:
        return _Schema()
    items = results[1:-1].split(", ") if results.startswith("(") else [results]
    found = [_ALIAS.search(item) for item in items if item]
    return _Schema(arguments, tuple("" if alias is None else "same" if alias[1] else "view" for alias in found))


def _is_opaque(signature: Signature) -> bool:
    """Return whether nobody saw the call's arguments, or one of them is an object that may hold a weight."""
    unseen = not signature.inputs and not signature.outputs and signature.schema.endswith("(...)")
    return unseen or any(
        isinstance(value, Symbol) and value.kind == "object" and value.name == "ScriptObject"
        for value in signature.inputs
    )


def _gives_views(signature: Signature, schema: _Schema) -> bool:
    """Return whether an op gives views alone, or may do so, as far as its name and its schema say."""
    if signature.packet in VIEWS or signature.packet in MAY_COPY:
        return True
    kinds = [schema.result(index) for index, value in enumerate(signature.outputs) if any(tensors_in(value))]
    return bool(kinds) and all(kind == "view" for kind in kinds)


def _gives_back(signature: Signature) -> bool:
    """Return whether the arguments say that an op gives back what it got: dropout outside of training."""
    return signature.packet in DROPOUTS and argument_of(signature, "train") is False


def _bytes_read(signature: Signature, schema: _Schema) -> Iterable[int]:
    movement = traffic_rule_of(signature)
    for name, value in _named(signature):
        argument = schema.arguments.get(name, _READ)
        if name in movement.reads:
            yield movement.reads[name](signature)
        elif not (argument.only_written or (argument.written and signature.packet in OVERWRITES)):
            yield bytes_in(value)


def _bytes_written(signature: Signature, schema: _Schema, moved: bool | None) -> Iterable[int]:
    movement = traffic_rule_of(signature)
    for name, value in _named(signature):
        argument = schema.arguments.get(name, _READ)
        if name in movement.writes:
            yield movement.writes[name](signature)
        elif argument.written:
            yield bytes_in(value)
    for index, value in enumerate(signature.outputs):
        kind = schema.result(index)
        if not kind or (kind == "view" and moved):
            yield bytes_in(value)


def _named(signature: Signature) -> Iterable[tuple[str, Value]]:
    """Yield the arguments with their names, "" where an op has no schema."""
    names = signature.names or ("",) * len(signature.inputs)
    return zip(names, signature.inputs, strict=False)
