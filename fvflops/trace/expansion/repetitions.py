"""Find where a Trace repeats: ranges of its events, storages and lists that belong to two equal periods of layers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, takewhile

from fvflops.trace.expansion.layer_run import FIRST, KEPT, SECOND, UnequalLayersError
from fvflops.trace.expansion.recorded_rows import RecordedRows, Repetition, count_registered, storages_of
from fvflops.trace.records import Event
from fvflops.trace.spec import TensorSpec, tensors_in


class ListCall:
    """An op call on lists of tensors that have an element for each layer, such as an optimizer's foreach op.

    `reads` and `writes` are the repetitions in the event's storages, `elements` in each list. The result of aten::stack
    is not a list but a vector: it grows with its input.
    """

    def __init__(self, rows: RecordedRows, position: int) -> None:
        event = rows.events[position]
        signature = rows.trace.signatures[event.item]
        lists = [value for value in signature.inputs if isinstance(value, tuple) and value]
        self.length = len(lists[0]) if lists else 0
        self.reads = repetitions_in(rows, event.reads)
        self.elements = [item for item in self.reads if item.end <= self.length]
        outputs = signature.outputs
        spec = lists[0][0] if lists else None
        vector = (replace(spec, shape=(self.length,)),) if isinstance(spec, TensorSpec) else None
        is_stack = signature.op == "aten::stack" and outputs == vector
        if is_stack:
            outputs = ()
            copied = sum(item.length for item in self.elements)
            rows.vectors[event.writes[0]] = (self.length, self.length + rows.run.added * copied)
        is_list_call = (
            self.length > 1
            and len(event.reads) >= self.length
            and all(isinstance(value, tuple) and len(value) == self.length for value in (*lists, *outputs))
        )
        if not is_list_call or not self.elements:
            raise UnequalLayersError(f"{signature.op} reads tensors of several layers")
        for value in (*lists, *outputs):
            assert isinstance(value, tuple)
            if any(value[item.first : item.second] != value[item.second : item.end] for item in self.elements):
                raise UnequalLayersError(f"{signature.op} has lists whose elements differ between equal layers")
        begin, end = rows.storages_before[position], rows.storages_before[position + 1]
        if end > begin and not is_stack:
            if list(event.writes) != list(range(begin, begin + self.length)) or end != begin + self.length:
                raise UnequalLayersError(f"{signature.op} does not return one tensor for each element of its lists")
            for item in self.elements:
                created = Repetition(begin + item.first, begin + item.second, begin + item.end, item.step)
                if not rows.add_repetition(created):
                    raise UnequalLayersError(f"{signature.op} returns tensors that differ between equal layers")
        self.writes = repetitions_in(rows, event.writes)


def grow_results(rows: RecordedRows, event: Event) -> None:
    """Record which results of a call grow with its input, a vector with an element for each layer."""
    signature = rows.trace.signatures[event.item]
    lengths = {rows.vectors[index] for index in event.reads if index in rows.vectors}
    shapes = {spec.shape for spec in tensors_in((*signature.inputs, *signature.outputs))}
    if len(lengths) > 1 or not shapes <= {(), *((length,) for length, _ in lengths)}:
        raise UnequalLayersError(f"{signature.op} combines a tensor with an element for each layer with others")
    if any(spec.shape for spec in tensors_in(signature.outputs)):
        rows.vectors.update(dict.fromkeys(event.writes, lengths.pop()))


def repetitions_in(rows: RecordedRows, storages: Sequence[int]) -> list[Repetition]:
    """Return the repetitions in a sequence of distinct storages, as ranges of its positions."""
    positions = {index: position for position, index in enumerate(storages)}
    found: list[Repetition] = []
    position = 0
    while position < len(storages):
        repetition = _repetition_at(rows, storages, positions, position)
        if repetition is not None:
            found.append(repetition)
        position = position + 1 if repetition is None else repetition.end
    return found


def _repetition_at(
    rows: RecordedRows, storages: Sequence[int], positions: dict[int, int], first: int
) -> Repetition | None:
    place = rows.places[storages[first]]
    if place is None:
        return None
    step = 1 if place.period == FIRST else -1
    of_storages = rows.repetitions[place.repetition]
    begin = of_storages.second if of_storages.step == step else of_storages.first
    second = positions.get(begin + place.offset, -1)
    repetition = Repetition(first, second, 2 * second - first, step)
    if second <= first or repetition.end > len(storages):
        return None
    is_equal = all(rows.follows_storage(*pair, repetition) for pair in repetition.pairs(storages))
    return repetition if is_equal else None


def _add_registered(rows: RecordedRows) -> None:
    """Find the repetitions among the storages of parameters and buffers, which are in the order of the modules."""
    periods = rows.named_periods[: count_registered(rows.storages)]
    position = 0
    while FIRST in periods[position:]:
        first = periods.index(FIRST, position)
        try:
            second = periods.index(SECOND, first)
            end = periods.index(SECOND + 1, second)
        except ValueError:
            raise UnequalLayersError(
                f"the parameters of {rows.run.path!r} are not in the order of its layers"
            ) from None
        if not rows.add_repetition(Repetition(first, second, end, 1)):
            raise UnequalLayersError(f"layers of {rows.run.path!r} hold different parameters or buffers")
        position = end


def _add_copies(rows: RecordedRows) -> None:
    """Find the repetitions among copies of all parameters that were made before the run, such as master weights.

    They are the first storages after the model's, with the bytes of their parameters times a common factor.
    """
    registered = count_registered(rows.storages)
    registered_rows = enumerate(rows.storages[:registered])
    parameters = [index for index, item in registered_rows if item.origin == "parameter" and item.nbytes]
    copies = rows.storages[registered : registered + len(parameters)]
    pairs = [(rows.storages[index].nbytes, copy.nbytes) for index, copy in zip(parameters, copies, strict=False)]
    if len(copies) < len(parameters) or any(size * pairs[0][0] != nbytes * pairs[0][1] for nbytes, size in pairs):
        return
    positions = {index: registered + position for position, index in enumerate(parameters)}
    for repetition in list(rows.repetitions):
        inside = [positions[index] for index in range(repetition.first, repetition.second) if index in positions]
        if inside:
            begin, length = inside[0], len(inside)
            rows.add_repetition(Repetition(begin, begin + length, begin + 2 * length, repetition.step))


class RepetitionFinder:
    """Search of a Trace for repetitions: of parameters and their copies, then of events, from the first one on."""

    def __init__(self, rows: RecordedRows) -> None:
        _add_registered(rows)
        _add_copies(rows)
        self._rows = rows
        self._events = rows.events
        self._periods = list(map(rows.period_of_event, self._events))
        # Events whose period depends on storages.
        self._by_storage = [
            position
            for position, event in enumerate(self._events)
            if event.kind == "free" or (event.kind == "op" and rows.periods["stack"][event.stack] is None)
        ]
        self._index_periods(0)

    def find(self) -> tuple[list[Repetition], dict[int, ListCall]]:
        """Return the events' repetitions in order, and list calls by event; add the storages' to the rows."""
        rows, events = self._rows, self._events
        found: list[Repetition] = []
        lists: dict[int, ListCall] = {}
        position = 0
        while position < len(events):
            event = events[position]
            is_open = event.kind == "op" and self._periods[position] is None
            if is_open and {FIRST, SECOND} <= {*map(rows.period_of_storage, storages_of(event))}:
                lists[position] = ListCall(rows, position)
                self._index_periods(position)
            elif event.kind == "op" and not rows.vectors.keys().isdisjoint(event.reads):
                grow_results(rows, event)
            repetition = None
            if self._periods[position] in (FIRST, SECOND):
                repetition = self._frees_at(position) if event.kind == "free" else self._calls_at(position)
            if repetition is None:
                position += 1
                continue
            found.append(repetition)
            position = repetition.end if event.kind == "free" else self._end_of(repetition)
            self._index_periods(position)
        return found, lists

    def _index_periods(self, begin: int) -> None:
        """Update the periods of events from `begin` on, and their positions by period."""
        for position in self._by_storage[bisect_right(self._by_storage, begin - 1) :]:
            self._periods[position] = self._rows.period_of_event(self._events[position])
        self._positions: dict[int, list[int]] = {period: [] for period in range(KEPT)}
        for position in range(begin, len(self._events)):
            period = self._periods[position]
            if period is not None and period < KEPT and self._events[position][0] != "free":
                self._positions[period].append(position)

    def _calls_at(self, first: int) -> Repetition | None:
        """Return the repetition that begins at an event: each of its periods begins with its first call."""
        step = 1 if self._periods[first] == FIRST else -1
        others = self._positions[SECOND if step > 0 else FIRST]
        index = bisect_right(others, first)
        if index == len(others) or 2 * others[index] - first > len(self._events):
            return None
        second, end = others[index], 2 * others[index] - first
        repetition = Repetition(first, second, end, step)
        counts = self._rows.storages_before
        if not self._rows.add_repetition(Repetition(counts[first], counts[second], counts[end], step)):
            return None
        unplaced: list[tuple[int, int]] = []
        if self._is_equal(repetition, unplaced) and self._place(unplaced, step):
            return repetition
        self._rows.remove_repetition()
        return None

    def _place(self, pairs: Sequence[tuple[int, int]], step: int) -> bool:
        """Add storages created for all layers at once, as by an optimizer; if they differ, return False."""
        if not pairs:
            return True
        length = abs(pairs[0][1] - pairs[0][0])
        ahead = step if pairs[0][1] > pairs[0][0] else -step
        begin = min(map(min, pairs))
        repetition = Repetition(begin, begin + length, begin + 2 * length, ahead)
        is_regular = all(
            second - first == pairs[0][1] - pairs[0][0] and min(first, second) < begin + length
            for first, second in pairs
        )
        fits = repetition.end <= len(self._rows.storages)
        return is_regular and fits and self._rows.add_repetition(repetition)

    def _frees_at(self, first: int) -> Repetition | None:
        """Return the repetition that begins at an event within a sequence of freed storages."""
        events = takewhile(lambda event: event.kind == "free", islice(self._events, first, None))
        freed = [event.item for event in events]
        positions = {index: position for position, index in enumerate(freed)}
        found = _repetition_at(self._rows, freed, positions, 0)
        if found is None:
            return None
        repetition = Repetition(first, first + found.second, first + found.end, found.step)
        return repetition if self._is_equal(repetition) else None

    def _is_equal(self, repetition: Repetition, unplaced: list[tuple[int, int]] | None = None) -> bool:
        """Return whether two ranges of events are equal; pairs of storages without places are added to `unplaced`."""
        follows = self._rows.follows
        return all(follows(*pair, repetition, unplaced) for pair in repetition.pairs(self._events))

    def _end_of(self, repetition: Repetition) -> int:
        """Return the end of the events that equal the events a period earlier: no repetition begins before it."""
        position, events = repetition.end, self._events
        while position < len(events) and self._rows.looks_like(
            events[position - repetition.length], events[position], repetition.step
        ):
            position += 1
        return position
