"""Events, storages and tables of a Trace with the period of a layer run to which each item belongs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, takewhile
from typing import Any, NamedTuple, TypeVar

from fvflops.trace.calls import RegionSignature, Signature
from fvflops.trace.expansion.layer_run import FIRST, SECOND, LayerRun, UnequalLayersError
from fvflops.trace.records import Event, Region, Storage
from fvflops.trace.trace import Trace

T = TypeVar("T")
_UNMEASURED = Event("", 0)[8:]


def are_equal_runs(first: Trace, second: Trace) -> bool:
    """Return whether two traces with ordered events have equal events and storages, however their tables are ordered.

    >>> from fvflops import record_call
    >>> import torch
    >>> trace = record_call(torch.relu, (torch.ones(2),))
    >>> are_equal_runs(trace, trace), are_equal_runs(trace, record_call(torch.relu, (torch.ones(3),)))
    (True, False)
    """
    if first.events is None or second.events is None or list(first.storages) != list(second.storages):
        return False
    if len(first.events) != len(second.events):
        return False
    known: set[tuple[str, int, int]] = set()
    for one, other in zip(first.events, second.events, strict=True):
        if one[0] != other[0] or one[3:] != other[3:]:
            return False
        for key in (("stack", one.stack, other.stack), (one.kind, one.item, other.item)):
            if key not in known:
                table, index, other_index = key
                if read_item(first, table, index) != read_item(second, table, other_index):
                    return False
                known.add(key)
    return True


def read_item(trace: Trace, table: str, index: int, read_region: Callable[[int], Any] | None = None) -> Any:
    """Return the object at an index of an event, a "stack", or an item by the kind of the event, with its regions."""
    read_region = read_region or trace.regions.__getitem__
    if table == "stack":
        return tuple([read_region(region) for region in trace.stacks[index]])
    if table == "exit":
        signature = trace.region_signatures[index]
        return read_region(signature.region), signature.inputs, signature.outputs
    if table == "enter":
        return trace.regions[index]
    return trace.signatures[index] if table == "op" else index


class Repetition(NamedTuple):
    """Two equal successive ranges of a sequence, `first` to `second` and `second` to `end`.

    `step` is 1 if they belong to the periods `FIRST` and `SECOND`, -1 if to `SECOND` and `FIRST`.
    """

    first: int
    second: int
    end: int
    step: int

    @property
    def length(self) -> int:
        return self.second - self.first

    @property
    def periods(self) -> tuple[int, int]:
        return (FIRST, SECOND) if self.step > 0 else (SECOND, FIRST)

    def pairs(self, items: Sequence[T]) -> Iterator[tuple[T, T]]:
        """Pair the items of the first range with the second's."""
        return zip(items[self.first : self.second], items[self.second : self.end], strict=True)

    def moves(self, added: int) -> range:
        """Return how many periods later than the second range each copy is, in the order of the copies."""
        return range(added) if self.step > 0 else range(added, 0, -1)


class Place(NamedTuple):
    """The place of a storage in a repetition of storages: the number of the repetition, an offset and a period."""

    repetition: int
    offset: int
    period: int


class RecordedRows:
    """A Trace's events and storages, and the items of its tables: a "stack", or an item by the kind of its events.

    `periods` has the period of each item by table; an op call has the period of the layer that it names in a text,
    such as a marker for a profiler. `moved(table, index, periods)` returns an item with the layers moved that it names,
    `is_equal(table, first, second, step)` whether one is equal to another, of the layer `step` periods later.
    `storages_before[i]` is the number of storages that exist before event i. `places` are the storages' places in
    `repetitions`, None for storages in none of them. `vectors` are the storages of vectors that have an element for
    each layer, with their lengths in the recording and in the full model.
    """

    def __init__(self, trace: Trace, run: LayerRun) -> None:
        self.trace = trace
        self.run = run
        self.events = list(trace.events or ())
        if any(event[8:] != _UNMEASURED for event in self.events):
            raise UnequalLayersError("events with times, memory or source lines cannot be repeated")
        self.storages: list[Storage] = list(trace.storages)
        self.repetitions: list[Repetition] = []
        self.vectors: dict[int, tuple[int, int]] = {}
        self.places: list[Place | None] = [None] * len(self.storages)
        self.named_periods = [run.period_of(storage.name) if storage.name else None for storage in self.storages]
        self.periods = periods_by_table(run, trace.regions, trace.stacks, trace.region_signatures, trace.signatures)
        self.storages_before = self._count_storages()
        self.moved = cache(self._move)
        self.is_equal = cache(self._is_equal)

    def period_of_storage(self, index: int) -> int | None:
        """Return the period of a storage, None if it has none or that is not known yet."""
        place = self.places[index]
        return self.named_periods[index] if place is None else place.period

    def period_of_event(self, event: Event) -> int | None:
        """Return the period of an event's stack, else of its item or storages; None if they have several."""
        if event.kind == "free":
            return self.period_of_storage(event.item)
        period = self.periods["stack"][event.stack]
        if period is None:
            periods = {self.period_of_storage(index) for index in (*event.reads, *event.writes)}
            periods = (periods | {self.periods[event.kind][event.item]}) - {None}
            period = periods.pop() if len(periods) == 1 else None
        return period

    def add_repetition(self, repetition: Repetition) -> bool:
        """Assign the storages of two ranges to layers if they are equal except for the layers in their names."""
        length = repetition.length
        if repetition.end - repetition.second != length:
            return False
        for index in range(repetition.first, repetition.second):
            other = index + length
            if self.places[index] is not None or self.places[other] is not None:
                return False
            if self.rename(self.storages[index], repetition.step) != self.storages[other]:
                return False
        number = len(self.repetitions)
        self.repetitions.append(repetition)
        for begin, period in zip((repetition.first, repetition.second), repetition.periods, strict=True):
            self.places[begin : begin + length] = [Place(number, offset, period) for offset in range(length)]
        return True

    def remove_repetition(self) -> None:
        repetition = self.repetitions.pop()
        self.places[repetition.first : repetition.end] = [None] * (repetition.end - repetition.first)

    def follows(
        self, first: Event, second: Event, repetition: Repetition, unplaced: list[tuple[int, int]] | None = None
    ) -> bool:
        """Return whether an event of the first range is equal to one of the second, with all that belongs to it."""
        if (first[0], *first[3:5], first[7]) != (second[0], *second[3:5], second[7]):
            return False
        if len(first.reads) != len(second.reads) or len(first.writes) != len(second.writes):
            return False
        pairs = [*zip(first.reads, second.reads, strict=True), *zip(first.writes, second.writes, strict=True)]
        if first.kind == "free":
            pairs.append((first.item, second.item))
        elif not self.is_equal(first.kind, first.item, second.item, repetition.step):
            return False
        return self.is_equal("stack", first.stack, second.stack, repetition.step) and all(
            self.follows_storage(*pair, repetition, unplaced) for pair in pairs
        )

    def looks_like(self, first: Event, second: Event, step: int) -> bool:
        """Return whether an event is the same as an earlier one, one layer later, by its known storages."""
        if first.kind != second.kind or not self.is_equal("stack", first.stack, second.stack, step):
            return False
        if first.kind != "free" and not self.is_equal(first.kind, first.item, second.item, step):
            return False
        if first.kind in ("enter", "exit"):
            return True
        periods = self.period_of_event(first), self.period_of_event(second)
        return periods[1] is None or (periods[0] is not None and periods[1] == periods[0] + step)

    def follows_storage(
        self, first: int, second: int, repetition: Repetition, unplaced: list[tuple[int, int]] | None = None
    ) -> bool:
        """Return whether the first range refers to a storage as the second one does to another.

        Both refer to one storage that belongs to no layer, or to the same storage of their own period or of a
        neighbour. At the start and the end of the run, the neighbour's storages have no place: they are compared by
        size and name. Two storages without a place are added to `unplaced`, if given.
        """
        places = self.places[first], self.places[second]
        if first == second:
            return places[0] is None and first not in self.vectors
        if places[0] is not None and places[1] is not None:
            return places[0][:2] == places[1][:2] and places[1].period - places[0].period == repetition.step
        if self.rename(self.storages[first], repetition.step) != self.storages[second]:
            return False
        if places == (None, None) and unplaced is not None and not self.storages[first].name:
            unplaced.append((first, second))
            return True
        own_first, own_second = repetition.periods
        if places[1] is not None:  # the first range refers to the period before its own
            return places[1].period == own_first and self.named_periods[first] in (None, own_first - repetition.step)
        return (
            places[0] is not None
            and places[0].period == own_second
            and self.named_periods[second] in (None, own_second + repetition.step)
        )

    def rename(self, storage: Storage, periods: int) -> Storage:
        """Return a storage with the layer moved that its name contains."""
        return storage._replace(name=self.run.rename(storage.name, periods)) if storage.name else storage

    def _is_equal(self, table: str, first: int, second: int, step: int) -> bool:
        # An item is only once in its table.
        if first == second or self.periods[table][first] is None:
            return first == second and self.periods[table][first] is None
        return bool(self.moved(table, first, step) == self.moved(table, second, 0))

    def _move(self, table: str, index: int, periods: int) -> Any:
        run = self.run
        item = read_item(self.trace, table, index, lambda region: self.moved("enter", region, periods))
        if table in ("stack", "exit") or not periods or self.periods[table][index] is None:
            return item
        if table == "enter":
            return item._replace(name=run.rename(item.name, periods))
        inputs = [run.rename_in(value, periods) if isinstance(value, str) else value for value in item.inputs]
        return replace(item, inputs=tuple(inputs))

    def _count_storages(self) -> list[int]:
        """Return the number of storages that exist before each event, and after the last one.

        Indexes are in the order of creation: storages below one that was read or written existed then. One that no
        event has named yet counts as created later, in each period alike.
        """
        highest = (1 + max(storages_of(event), default=-1) for event in self.events)
        counts = list(accumulate(highest, max, initial=count_registered(self.storages)))
        counts[-1] = len(self.storages)
        return counts


def periods_by_table(
    run: LayerRun,
    regions: Iterable[Region],
    stacks: Iterable[tuple[int, ...]],
    region_signatures: Iterable[RegionSignature],
    signatures: Iterable[Signature],
) -> dict[str, list[int | None]]:
    """Return the period of each item of a Trace's tables; a signature's by the layer that its texts name."""
    of_regions = [run.period_of(region.name) if region.kind == "module" else None for region in regions]
    texts = ([value for value in signature.inputs if isinstance(value, str)] for signature in signatures)
    return {
        "enter": of_regions,
        "exit": [of_regions[signature.region] for signature in region_signatures],
        "op": [_only({period for text in items for period in run.periods_in(text)}) for items in texts],
        "stack": [_only({of_regions[index] for index in stack}) for stack in stacks],
    }


def count_registered(storages: Iterable[Storage]) -> int:
    """Return how many storages of parameters and buffers come first: a recording registers them before it starts."""
    return len(list(takewhile(lambda storage: storage.origin in ("parameter", "buffer"), storages)))


def storages_of(row: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the storages that an event, or its row, reads, writes or frees."""
    return (row[1],) if row[0] == "free" else (*row[5], *row[6])


def _only(periods: set[int | None]) -> int | None:
    found = periods - {None}
    if len(found) > 1:
        raise UnequalLayersError("a call is inside several layers at once")
    return found.pop() if found else None
