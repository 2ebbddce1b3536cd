"""Interned tables of an expanded Trace: storages, regions, stacks, region signatures and signatures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import repeat
from operator import itemgetter

from fvflops.trace.calls import RegionSignature, Signature
from fvflops.trace.expansion.layer_run import FIRST
from fvflops.trace.expansion.recorded_rows import RecordedRows, Repetition
from fvflops.trace.records import Region, Storage
from fvflops.trace.spec import TensorSpec, Value


class ExpandedStorages:
    """The storages of the full model in the order of their creation, added periods included."""

    def __init__(self, rows: RecordedRows) -> None:
        self._rows = rows
        added = rows.run.added
        self.storages: list[Storage] = []
        self._moved: list[int] = []  # by index in the recording, where a storage has no place
        self.begins = [0] * len(rows.repetitions)  # by repetition: the index of its first storage
        position = 0
        for number, repetition in sorted(enumerate(rows.repetitions), key=itemgetter(1)):
            is_reversed = repetition.step < 0
            self._copy(position, repetition.second, added * is_reversed)
            self.begins[number] = len(self.storages) - repetition.length
            of_period = rows.storages[repetition.second : repetition.end]
            for periods in repetition.moves(added):
                self.storages += [rows.rename(storage, periods) for storage in of_period]
            self._copy(repetition.second, repetition.end, added * (not is_reversed))
            position = repetition.end
        self._copy(position, len(rows.storages), 0)
        for index, (before, after) in rows.vectors.items():
            storage = self.storages[self._moved[index]]
            self.storages[self._moved[index]] = storage._replace(nbytes=storage.nbytes // before * after)

    def at(self, index: int, periods: int) -> int:
        """Return the index of a storage, or of the same storage of a layer `periods` later."""
        place = self._rows.places[index]
        if place is None:
            return self._moved[index]
        repetition = self._rows.repetitions[place.repetition]
        period = place.period + periods
        ahead = period - FIRST if repetition.step > 0 else self._rows.run.added + 2 - period
        return self.begins[place.repetition] + place.offset + ahead * repetition.length

    def stride(self, index: int) -> int:
        """Return the distance of the storages of successive periods, 0 for a storage that belongs to no layer."""
        if (place := self._rows.places[index]) is None:
            return 0
        repetition = self._rows.repetitions[place.repetition]
        return repetition.step * repetition.length

    def _copy(self, begin: int, end: int, moved_by: int) -> None:
        """Append storages of the recording; storages that have a place are shifted by some periods."""
        rows = self._rows
        for index in range(begin, end):
            self._moved.append(len(self.storages))
            is_placed = rows.places[index] is not None
            periods = moved_by if is_placed else rows.run.shift(rows.named_periods[index], high=False)
            self.storages.append(rows.rename(rows.storages[index], periods))


class ExpandedTables:
    """Regions, stacks and signatures of the full model, interned.

    `index(table, index, periods)` returns the index of a recorded item, with the layers that it names shifted.
    """

    def __init__(self, rows: RecordedRows) -> None:
        self._rows = rows
        self.regions: dict[Region, int] = {}
        self.stacks: dict[tuple[int, ...], int] = {(): 0}
        self.region_signatures: dict[RegionSignature, int] = {}
        self.signatures: list[Signature] = []
        self._by_op: dict[str, list[int]] = {}
        self.index = cache(self._index)

    def _index(self, table: str, index: int, periods: int) -> int:
        trace = self._rows.trace
        if table == "enter":
            return self.regions.setdefault(self._rows.moved(table, index, periods), len(self.regions))
        if table == "exit":
            signature = trace.region_signatures[index]
            signature = replace(signature, region=self.index("enter", signature.region, periods))
            return self.region_signatures.setdefault(signature, len(self.region_signatures))
        if table == "op":
            return self._intern(self._rows.moved(table, index, periods))
        path = tuple([self.index("enter", region, periods) for region in trace.stacks[index]])
        for depth in range(1, len(path)):
            self.stacks.setdefault(path[:depth], len(self.stacks))
        return self.stacks.setdefault(path, len(self.stacks))

    def grown_call(self, index: int, before: int, after: int) -> int:
        """Return the index of the signature of a call on a vector that has an element for each layer."""
        return self._intern(grow(self._rows.trace.signatures[index], before, after))

    def list_call(self, index: int, elements: Sequence[Repetition], lengths: tuple[int, int] | None) -> int:
        """Return the index of a new signature, whose lists have elements for the added periods too.

        `lengths` of a vector that it returns are its elements in the recording and in the full model.
        """
        added = self._rows.run.added

        def expand(value: Value) -> Value:
            return tuple(repeat_elements(value, elements, added)) if isinstance(value, tuple) and value else value

        expanded = _map_values(self._rows.trace.signatures[index], expand)
        return self._intern(expanded if lengths is None else grow(expanded, *lengths))

    def _intern(self, signature: Signature) -> int:
        # By equality, since hashing a signature is slow.
        for index in self._by_op.setdefault(signature.op, []):
            if self.signatures[index] == signature:
                return index
        self._by_op[signature.op].append(len(self.signatures))
        self.signatures.append(signature)
        return len(self.signatures) - 1


def repeat_elements(values: Sequence[Value], repetitions: Sequence[Repetition], added: int) -> Iterator[Value]:
    """Yield a list's elements, the second range of each repetition repeated.

    >>> list(repeat_elements("abcxyxyd", [Repetition(3, 5, 7, 1)], 1))
    ['a', 'b', 'c', 'x', 'y', 'x', 'y', 'x', 'y', 'd']
    """
    position = 0
    for repetition in repetitions:
        yield from values[position : repetition.second]
        for copy in repeat(values[repetition.second : repetition.end], added):
            yield from copy
        position = repetition.second
    yield from values[position:]


def grow(signature: Signature, before: int, after: int) -> Signature:
    """Return a signature in which each vector of `before` elements has `after` elements."""

    def grown(value: Value) -> Value:
        if isinstance(value, TensorSpec) and value.shape == (before,):
            return replace(value, shape=(after,))
        return value

    return _map_values(signature, grown)


def _map_values(signature: Signature, function: Callable[[Value], Value]) -> Signature:
    inputs, outputs = (tuple(map(function, values)) for values in (signature.inputs, signature.outputs))
    return replace(signature, inputs=inputs, outputs=outputs)
