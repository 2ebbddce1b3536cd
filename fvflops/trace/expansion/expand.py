"""Expand the Trace of a shortened model to the full model's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat

from fvflops.trace.expansion.expanded_tables import ExpandedStorages, ExpandedTables
from fvflops.trace.expansion.layer_run import FIRST, SECOND, LayerRun, UnequalLayersError, repeat_periods
from fvflops.trace.expansion.recorded_rows import RecordedRows, Repetition, periods_by_table, storages_of
from fvflops.trace.expansion.repetitions import ListCall, RepetitionFinder
from fvflops.trace.lazy_records import LazyRecords
from fvflops.trace.module_tree import ModuleInfo, ModuleTree, ParameterInfo
from fvflops.trace.records import Event, Storage
from fvflops.trace.spec import Value
from fvflops.trace.trace import Trace

# Kind, item, stack, phase, thread, reads, writes, raised: the columns of an event that shape execution fills.
Row = tuple[str, int, int, str, int, tuple[int, ...], tuple[int, ...], bool]


def expand_modules(modules: ModuleTree, run: LayerRun) -> ModuleTree:
    """Return the full model's module tree from a shortened one's."""
    identities: dict[tuple[int, int], int] = {}

    def number(tensor: ParameterInfo, periods: int) -> ParameterInfo:
        period = run.period_of(tensor.name)
        # A tied tensor has one number under each of its names; layers do not share tensors.
        key = tensor.identity, 0 if period is None else periods
        identity = identities.setdefault(key, len(identities))
        return replace(tensor, name=run.rename(tensor.name, periods), identity=identity)

    def move(module: ModuleInfo, periods: int) -> ModuleInfo:
        return replace(
            module,
            name=run.rename(module.name, periods),
            canonical=run.rename(module.canonical, periods),
            parameters=tuple([number(tensor, periods) for tensor in module.parameters]),
            buffers=tuple([number(tensor, periods) for tensor in module.buffers]),
            attributes=_move_indexes(module, run, periods),
            children=tuple(_expand_children(module, run, periods)),
        )

    moved = repeat_periods(modules.by_name.items(), run)
    return ModuleTree({name: move(module, periods) for name, module, periods in moved})


def _expand_children(module: ModuleInfo, run: LayerRun, periods: int) -> Iterator[tuple[str, str | None]]:
    if module.name != run.path:
        yield from ((key, None if path is None else run.rename(path, periods)) for key, path in module.children)
        return
    for name, *_ in repeat_periods(((path or "", key) for key, path in module.children), run):
        yield name.rpartition(".")[2], name


def _move_indexes(module: ModuleInfo, run: LayerRun, periods: int) -> dict[str, Value]:
    """Return a module's attributes; attributes that count layers are moved by a number of periods."""
    attributes = dict(module.attributes)
    if periods and run.period_of(module.name) is not None:
        below = module.name[len(run.path) + bool(run.path) :].partition(".")[2]
        for path, name in run.index_attributes:
            value = attributes.get(name)
            if path == below and isinstance(value, int):
                attributes[name] = value + periods * run.period
    return attributes


class ExpandedEvents:
    """The full model's events as rows; `positions` are the recorded events' indexes there, then the number of all."""

    def __init__(self, rows: RecordedRows, repetitions: Sequence[Repetition], lists: Mapping[int, ListCall]) -> None:
        self._rows = rows
        self.storages = ExpandedStorages(rows)
        self.tables = ExpandedTables(rows)
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
        middle, rows = end, self._rows
        if high_before != high_after:
            outermost = SECOND + 1 if high_after else FIRST - 1
            positions = range(begin, end)
            middle = next((at for at in positions if rows.period_of_event(rows.events[at]) == outermost), end)
        self._move(begin, middle, high=high_before)
        self._move(middle, end, high=high_after)

    def _move(self, begin: int, end: int, *, high: bool) -> None:
        for position in range(begin, end):
            self.positions.append(len(self.rows))
            self.rows.append(self._move_row(position, high=high))

    def _move_row(self, position: int, *, high: bool) -> Row:
        rows, tables, place = self._rows, self.tables, self._rows.run.shift
        kind, item, stack, phase, thread, reads, writes, raised = rows.events[position][:8]
        call = self._lists.get(position)
        if call is not None:
            item = tables.list_call(item, call.elements, rows.vectors.get(writes[0]) if writes else None)
        elif kind == "free":
            item = self._storage(item, high=high)
        elif kind == "op" and rows.vectors and (lengths := next(filter(None, map(rows.vectors.get, reads)), None)):
            item = tables.grown_call(item, *lengths)
        else:
            item = tables.index(kind, item, place(rows.periods[kind][item], high=high))
        stack = tables.index("stack", stack, place(rows.periods["stack"][stack], high=high))
        if reads:
            reads = tuple(self._expand_list(reads, () if call is None else call.reads, high=high))
        if writes:
            writes = tuple(self._expand_list(writes, () if call is None else call.writes, high=high))
        return kind, item, stack, phase, thread, reads, writes, raised

    def _storage(self, index: int, *, high: bool) -> int:
        place = self._rows.places[index]
        return self.storages.at(index, 0 if place is None else self._rows.run.shift(place.period, high=high))

    def _copy(self, repetition: Repetition) -> None:
        """Append the events of the added periods, made column by column."""
        moves = repetition.moves(self._rows.run.added)
        copies = [self._copy_row(*pair, repetition.step, moves) for pair in repetition.pairs(self._rows.events)]
        self.rows += chain.from_iterable(zip(*copies, strict=True))

    def _copy_row(self, first: Event, second: Event, step: int, moves: range) -> Iterator[Row]:
        kind, item, stack, phase, thread, reads, writes, raised = second[:8]
        is_free = kind == "free"
        columns = (
            self._copy_storage(first.item, item, step, moves) if is_free else self._indexes(kind, item, moves),
            self._indexes("stack", stack, moves),
            *(repeat(phase), repeat(thread)),
            self._copy_storages(first.reads, reads, step, moves),
            self._copy_storages(first.writes, writes, step, moves),
            repeat(raised),
        )
        return zip(repeat(kind, len(moves)), *columns)  # noqa: B905 - some columns are endless

    def _copy_storages(
        self, first: Sequence[int], second: Sequence[int], step: int, moves: range
    ) -> Iterable[tuple[int, ...]]:
        if not second:
            return repeat(())
        return zip(*[self._copy_storage(*pair, step, moves) for pair in zip(first, second, strict=True)])  # noqa: B905

    def _copy_storage(self, first: int, second: int, step: int, moves: range) -> Iterable[int]:
        """Return the index of a storage for each copy; one that belongs to no layer is the same for all."""
        if first == second:
            return repeat(self.storages.at(second, 0))
        index, begin = second, moves[0]
        if self._rows.places[second] is None:  # the last range refers to a storage at the end of the run
            index, begin = first, moves[0] + step
        at, stride = (self.storages.at(index, begin), moves.step * self.storages.stride(index))
        return range(at, at + stride * len(moves), stride)

    def _expand_list(self, storages: Sequence[int], repetitions: Sequence[Repetition], *, high: bool) -> Iterator[int]:
        position = 0
        for repetition in repetitions:
            starts_high = repetition.step < 0
            first, second, end, step = repetition
            yield from (self._storage(index, high=high) for index in storages[position:first])
            yield from (self._storage(index, high=starts_high) for index in storages[first:second])
            moves = repetition.moves(self._rows.run.added)
            copies = [self._copy_storage(*pair, step, moves) for pair in repetition.pairs(storages)]
            yield from chain.from_iterable(zip(*copies))  # noqa: B905
            yield from (self._storage(index, high=not starts_high) for index in storages[second:end])
            high, position = not starts_high, end
        yield from (self._storage(index, high=high) for index in storages[position:])

    def _indexes(self, table: str, index: int, moves: range) -> Iterable[int]:
        """Return the index in a table of the full model for each copy."""
        if self._rows.periods[table][index] is None:
            return repeat(self.tables.index(table, index, 0))
        key = table, index, moves.step
        if key not in self._known_indexes:
            self._known_indexes[key] = [self.tables.index(table, index, periods) for periods in moves]
        return self._known_indexes[key]


@dataclass(frozen=True, slots=True)
class Expansion:
    """A full model's Trace; `positions` are the recorded events' indexes there, then the number of all."""

    trace: Trace
    positions: Sequence[int]

    @classmethod
    def unchanged(cls, trace: Trace) -> Expansion:
        return cls(trace, range(len(trace.events or ()) + 1))

    def then(self, further: Expansion) -> Expansion:
        """Return this expansion followed by another, of its Trace."""
        return Expansion(further.trace, [further.positions[position] for position in self.positions])


def expand_layers(trace: Trace, run: LayerRun) -> Expansion:
    """Return the Trace of the full model from one that was recorded with a shortened model.

    In every phase, the events between the starts of periods 1 and 2 must be equal to the events between 2 and 3
    except for names and storages, and refer to storages of the same or the neighbouring period in the same way; they
    are repeated for the periods that the shortened model lacks. Everything else remains, with the names and storages
    of the full model: events, storages, regions, counts of calls, the module tree and the lists of foreach ops.

    A Trace without ordered events, or with times or source lines, and layers that ran differently, raise
    UnequalLayersError.
    """
    if trace.events is None or trace.lines:
        raise UnequalLayersError("only a trace with ordered events and without source lines can be expanded")
    rows = RecordedRows(trace, run)
    repetitions, lists = RepetitionFinder(rows).find()
    _check_unused(rows)
    expanded = ExpandedEvents(rows, repetitions, lists)
    events, storages, tables = expanded.rows, expanded.storages, expanded.tables
    _check_uses(events, rows, storages)
    _check_calls(events, tables, run)
    calls = Counter([row[1:4] for row in events if row[0] == "op"])
    region_calls = Counter([row[1:4] for row in events if row[0] == "exit" and not row[7]])
    active = {stack for _, stack, _ in calls} | _expand_active(trace, rows, tables)
    full = replace(
        trace,
        modules=expand_modules(trace.modules, run),
        regions=tuple(tables.regions),
        stacks=tuple(tables.stacks),
        signatures=tuple(tables.signatures),
        region_signatures=tuple(tables.region_signatures),
        calls=dict(calls),
        region_calls=dict(region_calls),
        events=LazyRecords(Event, events),
        storages=LazyRecords(Storage, storages.storages),
        active=frozenset(active),
    )
    return Expansion(full, expanded.positions)


def _expand_active(trace: Trace, rows: RecordedRows, tables: ExpandedTables) -> set[int]:
    """Return the active stacks of the full model, also stacks without an op of their own."""
    active, last = set(), rows.run.added + SECOND
    for stack in trace.active:
        period = rows.periods["stack"][stack]
        moves: Iterable[int] = (rows.run.shift(period, high=False),)
        if period in (FIRST, SECOND):
            moves = range(FIRST - period, last - period + 1)
        active |= {tables.index("stack", stack, move) for move in moves}
    return active


def _check_unused(rows: RecordedRows) -> None:
    """Raise UnequalLayersError if no event uses a storage, such as state of a frozen parameter: layers may have one."""
    used = {index for row in rows.events for index in storages_of(row)}
    for index, storage in enumerate(rows.storages):
        if storage.nbytes and not storage.name and rows.places[index] is None and index not in used:
            raise UnequalLayersError(f"{storage.nbytes:,} bytes were allocated that no call uses")


def _check_uses(events: Sequence[Row], rows: RecordedRows, storages: ExpandedStorages) -> None:
    """Raise UnequalLayersError unless the storages of added periods are used as often as others: a part may be missing.

    The first and the last layer may use their neighbour's more or less often: one that gets no gradient, say.
    """
    uses = {"op": [0] * len(storages.storages), "free": [0] * len(storages.storages)}
    for row in events:
        if row[0] in uses:
            for index in storages_of(row):
                uses[row[0]][index] += 1
    for repetition, begin in zip(rows.repetitions, storages.begins, strict=True):
        length = repetition.length
        begins = [begin + period * length for period in range(rows.run.added + SECOND)]
        for counts in uses.values():
            first, *added, last = (counts[at : at + length] for at in begins)
            is_equal = all(of_period == added[0] for of_period in added) and all(
                use in ends for use, *ends in zip(added[0], first, last, strict=True)
            )
            if not is_equal:
                raise UnequalLayersError(f"layers of {rows.run.path!r} use their tensors unequally")


def _check_calls(events: Sequence[Row], tables: ExpandedTables, run: LayerRun) -> None:
    """Raise UnequalLayersError unless equally many calls belong to each period."""
    periods = periods_by_table(run, tables.regions, tables.stacks, tables.region_signatures, tables.signatures)
    stacks = periods["stack"]
    calls = Counter([(row[0], stacks[row[2]], periods[row[0]][row[1]]) for row in events if row[0] != "free"])
    by_period: dict[int, Counter[tuple[str, bool]]] = {}
    for (kind, period, named), count in calls.items():
        for is_named, of_period in ((False, period), (True, named)):
            if of_period is not None:
                by_period.setdefault(of_period, Counter())[kind, is_named] += count
    expected = by_period.get(FIRST)
    if any(by_period.get(period) != expected for period in range(FIRST, run.added + SECOND + 1)):
        raise UnequalLayersError(f"layers of {run.path!r} make unequal numbers of calls")
