"""Events, storages and stacks of a Trace with the period of a layer run to which each belongs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from fvflops.trace.expansion.layer_run import FIRST, SECOND, LayerRun, UnequalLayersError
from fvflops.trace.records import Event, Storage
from fvflops.trace.signature import Signature
from fvflops.trace.trace import Trace

# Kind, item, stack, phase, thread, reads, writes, raised: the columns of an event that shape execution fills.
Row = tuple[str, int, int, str, int, tuple[int, ...], tuple[int, ...], bool]
_UNMEASURED = Event("", 0)[8:]


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
        """The length of one range."""
        return self.second - self.first

    @property
    def periods(self) -> tuple[int, int]:
        """The periods of the two ranges."""
        return (FIRST, SECOND) if self.step > 0 else (SECOND, FIRST)


class Place(NamedTuple):
    """The place of a storage in a repetition of storages: the number of the repetition, an offset and a period."""

    repetition: int
    offset: int
    period: int


class RecordedRows:
    """A Trace's events and storages as rows.

    `storages_before[i]` is the number of storages that exist before event i. `places` are those of the storages that
    are in one of `repetitions`, None for the others. `vectors` are the storages of vectors that have an element for
    each layer, with their lengths in the recording and in the full model.
    """

    def __init__(self, trace: Trace, run: LayerRun) -> None:
        self.trace = trace
        self.run = run
        self.events: list[Row] = [_read_row(event) for event in trace.events or ()]
        self.storages: list[Storage] = list(trace.storages)
        self.regions = trace.regions
        self.region_signatures = list(trace.region_signatures)
        self.repetitions: list[Repetition] = []
        self.vectors: dict[int, tuple[int, int]] = {}
        self.places: list[Place | None] = [None] * len(self.storages)
        self.named_periods = [run.period_of(storage.name) if storage.name else None for storage in self.storages]
        region_periods = [run.period_of(region.name) if region.kind == "module" else None for region in trace.regions]
        self.region_periods = region_periods
        self.stack_periods = [_only({region_periods[index] for index in stack}) for stack in trace.stacks]
        # Those of an op call that names a layer in a text, such as a marker for a profiler.
        self.signature_periods = [_only(periods_in(signature, run)) for signature in trace.signatures]
        self.storages_before = self._count_storages()
        self._equal_stacks: dict[tuple[int, int, int], bool] = {}
        self._equal_exits: dict[tuple[int, int, int], bool] = {}

    def period_of_storage(self, index: int) -> int | None:
        """Return the period of a storage, None if it has none or that is not known yet."""
        place = self.places[index]
        return self.named_periods[index] if place is None else place.period

    def period_of_event(self, row: Row) -> int | None:
        """Return the period of an event's stack, else that of its storages, None if they have several."""
        kind, item, stack = row[:3]
        period = self.stack_periods[stack]
        if kind == "free":
            return self.period_of_storage(item)
        if period is None and kind == "enter":
            period = self.region_periods[item]
        elif period is None and kind == "exit":
            period = self.region_periods[self.region_signatures[item].region]
        elif period is None and kind == "op":
            periods = {self.period_of_storage(index) for index in (*row[5], *row[6])}
            periods = (periods | {self.signature_periods[item]}) - {None}
            period = periods.pop() if len(periods) == 1 else None
        return period

    def add_repetition(self, repetition: Repetition) -> None:
        """Give the storages of a repetition their places."""
        number = len(self.repetitions)
        self.repetitions.append(repetition)
        for begin, period in zip((repetition.first, repetition.second), repetition.periods, strict=True):
            for offset in range(repetition.length):
                self.places[begin + offset] = Place(number, offset, period)

    def remove_repetition(self) -> None:
        """Undo the last `add_repetition`."""
        repetition = self.repetitions.pop()
        self.places[repetition.first : repetition.end] = [None] * (repetition.end - repetition.first)

    def are_equal_storages(self, repetition: Repetition) -> bool:
        """Return whether the storages of two ranges are equal but for the layers in their names."""
        length = repetition.length
        return repetition.end - repetition.second == length and all(
            self.places[index] is None
            and self.places[index + length] is None
            and self._rename(self.storages[index], repetition.step) == self.storages[index + length]
            for index in range(repetition.first, repetition.second)
        )

    def follows(
        self, first: Row, second: Row, repetition: Repetition, unplaced: list[tuple[int, int]] | None = None
    ) -> bool:
        """Return whether an event of the first range is equal to one of the second, with all that belongs to it."""
        kind, item, stack, phase, thread, reads, writes, raised = second
        if first[0] != kind or first[3] != phase or first[4] != thread or first[7] != raised:
            return False
        if len(first[5]) != len(reads) or len(first[6]) != len(writes):
            return False
        if kind == "op":
            is_equal = self.is_equal_call(first[1], item, repetition.step)
        elif kind == "enter":
            is_equal = self._is_equal_region(first[1], item, repetition.step)
        elif kind == "exit":
            is_equal = self.is_equal_exit(first[1], item, repetition.step)
        else:
            is_equal = self.follows_storage(first[1], item, repetition, unplaced)
        return (
            is_equal
            and self.is_equal_stack(first[2], stack, repetition.step)
            and all(self.follows_storage(*pair, repetition, unplaced) for pair in zip(first[5], reads, strict=True))
            and all(self.follows_storage(*pair, repetition, unplaced) for pair in zip(first[6], writes, strict=True))
        )

    def looks_like(self, first: Row, second: Row, step: int) -> bool:
        """Return whether an event is the same as an earlier one, one layer later, by those storages that are known."""
        if first[0] != second[0] or not self.is_equal_stack(first[2], second[2], step):
            return False
        if first[0] == "enter":
            return self._is_equal_region(first[1], second[1], step)
        if first[0] == "exit":
            return self.is_equal_exit(first[1], second[1], step)
        periods = self.period_of_event(first), self.period_of_event(second)
        return (first[0] == "free" or self.is_equal_call(first[1], second[1], step)) and (
            periods[1] is None or (periods[0] is not None and periods[1] == periods[0] + step)
        )

    def follows_storage(
        self, first: int, second: int, repetition: Repetition, unplaced: list[tuple[int, int]] | None = None
    ) -> bool:
        """Return whether the first range refers to a storage as the second one does to another.

        Both refer to one storage that is of no layer, or to the same storage of their own period or of a neighbour. At
        the start and the end of the run, the neighbour's storages have no place: they are compared by size and name.
        Two storages without a place are added to `unplaced`, if given.
        """
        places = self.places[first], self.places[second]
        if first == second:
            return places[0] is None and first not in self.vectors
        if places[0] is not None and places[1] is not None:
            return places[0][:2] == places[1][:2] and places[1].period - places[0].period == repetition.step
        if self._rename(self.storages[first], repetition.step) != self.storages[second]:
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

    def is_equal_stack(self, first: int, second: int, step: int) -> bool:
        """Return whether a stack is equal to another but for the layer, which is `step` periods further."""
        if first == second:
            return self.stack_periods[first] is None
        key = first, second, step
        known = self._equal_stacks.get(key)
        if known is None:
            pairs = self.trace.stacks[first], self.trace.stacks[second]
            known = len(pairs[0]) == len(pairs[1]) and all(
                self._is_equal_region(*pair, step) for pair in zip(*pairs, strict=True)
            )
            self._equal_stacks[key] = known
        return known

    def is_equal_call(self, first: int, second: int, step: int) -> bool:
        """Return whether an op call's signature is equal to another but for the layer that it names."""
        signatures = self.trace.signatures
        if first == second:
            return self.signature_periods[first] is None
        if self.signature_periods[first] is None:
            return False
        return rename_signature(signatures[first], self.run, step) == signatures[second]

    def is_equal_exit(self, first: int, second: int, step: int) -> bool:
        """Return whether a region's signature is equal to another but for the layer."""
        key = first, second, step
        known = self._equal_exits.get(key)
        if known is None:
            one, other = self.region_signatures[first], self.region_signatures[second]
            known = (
                self._is_equal_region(one.region, other.region, step)
                and one.inputs == other.inputs
                and one.outputs == other.outputs
            )
            self._equal_exits[key] = known
        return known

    def _is_equal_region(self, first: int, second: int, step: int) -> bool:
        one, other = self.regions[first], self.regions[second]
        if self.region_periods[first] is None:
            return one == other
        return one.kind == other.kind and self.run.rename(one.name, step) == other.name

    def _rename(self, storage: Storage, periods: int) -> Storage:
        return storage._replace(name=self.run.rename(storage.name, periods)) if storage.name else storage

    def _count_storages(self) -> list[int]:
        """Return the number of storages that exist before each event, and after the last one.

        Indexes are in the order of creation: those below a storage that was read or written existed then. One that no
        event has named yet counts as created later, in each period alike.
        """
        counts = [count_registered(self.storages)]
        for row in self.events:
            counts.append(max(counts[-1], 1 + max(storages_of(row), default=-1)))
        counts[-1] = len(self.storages)
        return counts


def rename_signature(signature: Signature, run: LayerRun, periods: int) -> Signature:
    """Return a signature with the layers moved that its texts name."""
    inputs = [run.rename_in(value, periods) if isinstance(value, str) else value for value in signature.inputs]
    return replace(signature, inputs=tuple(inputs))


def periods_in(signature: Signature, run: LayerRun) -> set[int | None]:
    """Return the periods of the layers that the texts of a signature name."""
    return {period for value in signature.inputs if isinstance(value, str) for period in run.periods_in(value)}


def count_registered(storages: Iterable[Storage]) -> int:
    """Return how many storages of parameters and buffers come first: a recording registers them before it starts."""
    count = 0
    for storage in storages:
        if storage.origin not in ("parameter", "buffer"):
            break
        count += 1
    return count


def storages_of(row: Row) -> tuple[int, ...]:
    """Return the storages that an event reads, writes or frees."""
    return (row[1],) if row[0] == "free" else (*row[5], *row[6])


def _read_row(event: Event) -> Row:
    if event[8:] != _UNMEASURED:
        raise UnequalLayersError("events with times, memory or source lines cannot be repeated")
    return event[:8]


def _only(periods: set[int | None]) -> int | None:
    found = periods - {None}
    if len(found) > 1:
        raise UnequalLayersError("a call is inside several layers at once")
    return found.pop() if found else None
