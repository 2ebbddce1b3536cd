"""Expand the Trace of a shortened model to that of the full model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fvflops.trace.expansion.expanded_events import ExpandedEvents
from fvflops.trace.expansion.expanded_modules import expand_modules
from fvflops.trace.expansion.expanded_tables import ExpandedStorages, ExpandedTables
from fvflops.trace.expansion.layer_run import FIRST, SECOND, LayerRun, UnequalLayersError
from fvflops.trace.expansion.recorded_rows import RecordedRows, Row, periods_in, storages_of
from fvflops.trace.expansion.repetitions import find_repetitions
from fvflops.trace.lazy_records import LazyRecords
from fvflops.trace.records import Event, Storage
from fvflops.trace.trace import Trace


@dataclass(frozen=True, slots=True)
class Expansion:
    """A Trace of a full model.

    `positions` is the index of each event of the recording among its events; one more is the number of all events.
    """

    trace: Trace
    positions: Sequence[int]

    @classmethod
    def unchanged(cls, trace: Trace) -> Expansion:
        """Return a Trace as its own expansion."""
        return cls(trace, range(len(trace.events or ()) + 1))

    def then(self, further: Expansion) -> Expansion:
        """Return this expansion followed by another, of its Trace."""
        return Expansion(further.trace, [further.positions[position] for position in self.positions])


def expand_layers(trace: Trace, run: LayerRun) -> Expansion:
    """Return the Trace of the full model from one that was recorded with a shortened model.

    In every phase, the events between the start of period 1 and that of period 2 must be equal to those between 2 and
    3 but for names and storages, and refer to storages of the same or the neighbouring period in the same way; they
    are repeated for the periods that the shortened model lacks. Everything else remains, with the names and storages
    of the full model: events, storages, regions, counts of calls, the module tree and the lists of foreach ops.

    A Trace without ordered events, or with times or source lines, and layers that did not run equally, raise
    UnequalLayersError.
    """
    if trace.events is None or trace.lines:
        raise UnequalLayersError("only a trace with ordered events and without source lines can be expanded")
    rows = RecordedRows(trace, run)
    repetitions, lists = find_repetitions(rows)
    _check_unused(rows)
    storages, tables = ExpandedStorages(rows), ExpandedTables(rows)
    expanded = ExpandedEvents(rows, repetitions, lists, storages, tables)
    events = expanded.rows
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
    """Return the active stacks of the full model, also those without an op of their own."""
    active = set()
    for stack in trace.active:
        period = rows.stack_periods[stack]
        added = rows.run.added
        if period in (FIRST, SECOND):
            active |= {tables.stack(stack, move) for move in range(FIRST - period, added + SECOND - period + 1)}
        else:
            active.add(tables.stack(stack, rows.run.place(period, high=False)))
    return active


def _check_unused(rows: RecordedRows) -> None:
    """Raise UnequalLayersError if no event uses a storage, such as state of a frozen parameter: layers may have one."""
    used = {index for row in rows.events for index in storages_of(row)}
    for index, storage in enumerate(rows.storages):
        if storage.nbytes and not storage.name and rows.places[index] is None and index not in used:
            raise UnequalLayersError(f"{storage.nbytes:,} bytes were allocated that no call uses")


def _check_uses(events: Sequence[Row], rows: RecordedRows, storages: ExpandedStorages) -> None:
    """Raise UnequalLayersError unless the storages of added periods are used as often as others: a part may be missing.

    The first and the last layer may use those of their neighbour more or less often: one that gets no gradient, say.
    """
    calls, frees = [0] * len(storages.storages), [0] * len(storages.storages)
    for row in events:
        if row[0] == "free":
            frees[row[1]] += 1
        elif row[0] == "op":
            for index in row[5]:
                calls[index] += 1
            for index in row[6]:
                calls[index] += 1
    for repetition, begin in zip(rows.repetitions, storages.begins, strict=True):
        length = repetition.length
        begins = [begin + period * length for period in range(rows.run.added + SECOND)]
        for uses in (calls, frees):
            first, *added, last = (uses[at : at + length] for at in begins)
            is_equal = all(of_period == added[0] for of_period in added) and all(
                use in ends for use, *ends in zip(added[0], first, last, strict=True)
            )
            if not is_equal:
                raise UnequalLayersError(f"layers of {rows.run.path!r} use their tensors unequally")


def _check_calls(events: Sequence[Row], tables: ExpandedTables, run: LayerRun) -> None:
    """Raise UnequalLayersError unless equally many calls belong to each period."""
    regions = [run.period_of(region.name) if region.kind == "module" else None for region in tables.regions]
    stacks = [next((regions[index] for index in stack if regions[index] is not None), None) for stack in tables.stacks]
    texts = [next(iter(periods_in(signature, run)), None) for signature in tables.signatures]
    exits = [regions[signature.region] for signature in tables.region_signatures]
    by_item = {"op": texts, "enter": regions, "exit": exits}
    calls = Counter([(row[0], stacks[row[2]], by_item[row[0]][row[1]]) for row in events if row[0] != "free"])
    by_period: dict[int, Counter[tuple[str, bool]]] = {}
    for (kind, period, named), count in calls.items():
        for is_named, of_period in ((False, period), (True, named)):
            if of_period is not None:
                by_period.setdefault(of_period, Counter())[kind, is_named] += count
    expected = by_period.get(FIRST)
    if any(by_period.get(period) != expected for period in range(FIRST, run.added + SECOND + 1)):
        raise UnequalLayersError(f"layers of {run.path!r} make unequal numbers of calls")
