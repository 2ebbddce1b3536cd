"""Events of an expanded Trace: those of the recording, and copies of its second equal period for each added one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat

from fvflops.trace.expansion.expanded_tables import ExpandedStorages, ExpandedTables
from fvflops.trace.expansion.layer_run import FIRST, SECOND
from fvflops.trace.expansion.recorded_rows import RecordedRows, Repetition, Row
from fvflops.trace.expansion.repetitions import ListCall


class ExpandedEvents:
    """The events of the full model, as rows of a Trace's columns.

    `positions` are those of the recorded events among them, and the number of all.
    """

    def __init__(
        self,
        rows: RecordedRows,
        repetitions: Sequence[Repetition],
        lists: Mapping[int, ListCall],
        storages: ExpandedStorages,
        tables: ExpandedTables,
    ) -> None:
        self._rows = rows
        self._storages = storages
        self._tables = tables
        self._lists = lists
        self.rows: list[Row] = []
        self.positions: list[int] = []
        self._known_indexes: dict[tuple[str, int, int], list[int]] = {}
        position = 0
        high = False  # whether the last repetition ended at the end of the run
        for repetition in repetitions:
            starts_high = repetition.step < 0
            self._move_between(position, repetition.first, high, starts_high)
            self._move(repetition.first, repetition.second, high=starts_high)
            self._copy(repetition)
            high = not starts_high
            self._move(repetition.second, repetition.end, high=high)
            position = repetition.end
        self._move_between(position, len(rows.events), high, high)
        self.positions.append(len(self.rows))

    def _move_between(self, begin: int, end: int, high_before: bool, high_after: bool) -> None:
        """Append the events between two repetitions, lower edge first: next to the period with which the former ended.

        The latter begins at the other end of the run with the first event of its outermost period, if not there.
        """
        middle = end
        if high_before != high_after:
            outermost = SECOND + 1 if high_after else FIRST - 1
            events, rows = self._rows.events, self._rows
            periods = (
                position for position in range(begin, end) if rows.period_of_event(events[position]) == outermost
            )
            middle = next(periods, end)
        self._move(begin, middle, high=high_before)
        self._move(middle, end, high=high_after)

    def _move(self, begin: int, end: int, *, high: bool) -> None:
        """Append events of the recording."""
        for position in range(begin, end):
            row = self._rows.events[position]
            self.positions.append(len(self.rows))
            if position in self._lists:
                self.rows.append(self._expand_list_call(row, self._lists[position], high=high))
            else:
                self.rows.append(self._move_row(row, high=high))

    def _move_row(self, row: Row, *, high: bool) -> Row:
        kind, item, stack, phase, thread, reads, writes, raised = row
        rows, tables, place = self._rows, self._tables, self._rows.run.place
        if kind == "enter":
            item = tables.region(item, place(rows.region_periods[item], high=high))
        elif kind == "exit":
            item = tables.exit(item, place(rows.region_periods[rows.region_signatures[item].region], high=high))
        elif kind == "op" and rows.vectors and (lengths := next(filter(None, map(rows.vectors.get, reads)), None)):
            item = tables.grown_call(item, *lengths)
        elif kind == "op":
            item = tables.call(item, place(rows.signature_periods[item], high=high))
        else:
            item = self._storage(item, high=high)
        stack = tables.stack(stack, place(rows.stack_periods[stack], high=high))
        if reads:
            reads = tuple([self._storage(index, high=high) for index in reads])
        if writes:
            writes = tuple([self._storage(index, high=high) for index in writes])
        return kind, item, stack, phase, thread, reads, writes, raised

    def _storage(self, index: int, *, high: bool) -> int:
        place = self._rows.places[index]
        return self._storages.at(index, 0 if place is None else self._rows.run.place(place.period, high=high))

    def _copy(self, repetition: Repetition) -> None:
        """Append the events of the added periods, made column by column."""
        added = self._rows.run.added
        # By how many periods each copy is further than the second range, in the order of the events.
        moves = range(added) if repetition.step > 0 else range(added, 0, -1)
        events = self._rows.events
        pairs = zip(
            events[repetition.first : repetition.second], events[repetition.second : repetition.end], strict=True
        )
        copies = [self._copy_row(first, second, repetition.step, moves) for first, second in pairs]
        self.rows += chain.from_iterable(zip(*copies, strict=True))

    def _copy_row(self, first: Row, second: Row, step: int, moves: range) -> Iterator[Row]:
        kind, item, stack, phase, thread, reads, writes, raised = second
        rows, tables = self._rows, self._tables
        items: Iterable[int]
        if kind == "enter":
            items = self._indexes(tables.region, item, rows.region_periods[item], moves)
        elif kind == "exit":
            items = self._indexes(tables.exit, item, rows.region_periods[rows.region_signatures[item].region], moves)
        elif kind == "op":
            items = self._indexes(tables.call, item, rows.signature_periods[item], moves)
        else:
            items = self._copy_storage(first[1], item, step, moves)
        stacks = self._indexes(tables.stack, stack, rows.stack_periods[stack], moves)
        copied_reads = self._copy_storages(first[5], reads, step, moves)
        copied_writes = self._copy_storages(first[6], writes, step, moves)
        columns = items, stacks, repeat(phase), repeat(thread), copied_reads, copied_writes, repeat(raised)
        return zip(repeat(kind, len(moves)), *columns)  # noqa: B905 - some columns are endless

    def _copy_storages(
        self, first: Sequence[int], second: Sequence[int], step: int, moves: range
    ) -> Iterable[tuple[int, ...]]:
        if not second:
            return repeat(())
        return zip(*[self._copy_storage(*pair, step, moves) for pair in zip(first, second, strict=True)])  # noqa: B905

    def _copy_storage(self, first: int, second: int, step: int, moves: range) -> Iterable[int]:
        """Return the index of a storage for each copy; one that is of no layer is the same for all."""
        if first == second:
            return repeat(self._storages.at(second, 0))
        index, begin = second, moves[0]
        if self._rows.places[second] is None:  # the last range refers to a storage at the end of the run
            index, begin = first, moves[0] + step
        at, stride = self._storages.at(index, begin), moves.step * self._storages.stride(index)
        return range(at, at + stride * len(moves), stride)

    def _expand_list_call(self, row: Row, call: ListCall, *, high: bool) -> Row:
        rows = self._rows
        kind, item, stack, phase, thread, reads, writes, raised = row
        return (
            kind,
            self._tables.list_call(item, call.elements, rows.vectors.get(writes[0]) if writes else None),
            self._tables.stack(stack, 0),
            phase,
            thread,
            tuple(self._expand_list(reads, call.reads, high=high)),
            tuple(self._expand_list(writes, call.writes, high=high)),
            raised,
        )

    def _expand_list(self, storages: Sequence[int], repetitions: Sequence[Repetition], *, high: bool) -> Iterator[int]:
        position = 0
        for repetition in repetitions:
            starts_high = repetition.step < 0
            first, second = (storages[begin:end] for begin, end in itertools.pairwise(repetition[:3]))
            yield from (self._storage(index, high=high) for index in storages[position : repetition.first])
            yield from (self._storage(index, high=starts_high) for index in first)
            moves = range(self._rows.run.added) if repetition.step > 0 else range(self._rows.run.added, 0, -1)
            copies = [self._copy_storage(*pair, repetition.step, moves) for pair in zip(first, second, strict=True)]
            yield from chain.from_iterable(zip(*copies))  # noqa: B905
            yield from (self._storage(index, high=not starts_high) for index in second)
            high, position = not starts_high, repetition.end
        yield from (self._storage(index, high=high) for index in storages[position:])

    def _indexes(self, find: Callable[[int, int], int], index: int, period: int | None, moves: range) -> Iterable[int]:
        """Return the index in a table of the full model for each copy."""
        if period is None:
            return repeat(find(index, 0))
        key = find.__name__, index, moves.step
        if key not in self._known_indexes:
            self._known_indexes[key] = [find(index, periods) for periods in moves]
        return self._known_indexes[key]
