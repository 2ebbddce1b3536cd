"""Trace of a run: its op calls in order, with modules, phases and shapes; written by recording, read by counting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from fvflops.text import short_repr
from fvflops.trace import codec
from fvflops.trace.calls import RegionSignature, Signature
from fvflops.trace.notebook_table import write_notebook_table, write_text_table
from fvflops.trace.records import PHASES, Event, Region, RunInfo, TraceError, TraceFields, merge_reads

_MAX_ROWS = 20  # in a notebook
# (signature, stack, phase) → number of calls.
_Calls = Counter[tuple[int, int, str]]

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True, repr=False)
class Trace(TraceFields):
    """One run of a model as plain data, without tensors.

    `regions` are the modules, autograd functions and optimizer groups that enclose ops. `stacks` are tuples of indexes
    of `regions`, innermost last; stack 0 is the root. `calls` is the aggregated form, (signature, stack, phase) →
    number of calls, and `region_calls` the same for regions that returned; `events` is the ordered form, None in an
    aggregated trace. `decomposed` are the composite ops that were recorded as the ops inside them, `active` the stacks
    in which any op ran. `about` has versions and metadata (see `info`); `complete` is False where the run raised.
    `lines` are source lines, such as "net.py:12", where they were recorded. Merged traces share one module tree.

    >>> from fvflops import record_call
    >>> import torch
    >>> trace = record_call(torch.relu, (torch.ones(2),))
    >>> [trace.signatures[event.item].op for event in trace.events if event.kind == "op"]
    ['aten::relu']
    >>> Trace.from_json(trace.to_json()) == trace
    True
    """

    _scopes: list[tuple[str, ...]] = field(init=False, repr=False, compare=False, default_factory=list)

    @property
    def info(self) -> RunInfo:
        """Metadata of the run, parsed from `about`."""
        return RunInfo.read(self.about)

    def scope_of(self, stack: int) -> tuple[str, ...]:
        """Return the names of the modules in a stack, root first; the last one owns the ops of that stack."""
        regions = self.regions
        return tuple([regions[index].name for index in self.stacks[stack] if regions[index].kind == "module"])

    def scopes(self) -> list[tuple[str, ...]]:
        """Return the scope of every stack."""
        if self._scopes:
            return self._scopes
        names = [region.name if region.kind == "module" else None for region in self.regions]
        by_stack: dict[tuple[int, ...], tuple[str, ...]] = {}
        scopes = self._scopes
        for stack in self.stacks:
            outer = by_stack.get(stack[:-1])
            if outer is None:
                scope = tuple([name for name in map(names.__getitem__, stack) if name is not None])
            else:
                name = names[stack[-1]]
                scope = outer if name is None else (*outer, name)
            by_stack[stack] = scope
            scopes.append(scope)
        return scopes

    def aggregate(self) -> Trace:
        """Return the same trace without its ordered events and storages."""
        return replace(self, events=None, storages=(), lines=())

    def __repr__(self) -> str:
        """Return one line: the fields of a Trace contain a whole run."""
        calls = f"{sum(self.calls.values()):,} op calls in {len(self.modules.by_name):,} modules"
        state = "" if self.complete else "incomplete"
        return short_repr(self, self.modules.root.class_name, calls, " and ".join(self._list_phases()), state)

    def __str__(self) -> str:
        return write_text_table(*self._list_ops())

    def _repr_html_(self) -> str:
        """Return an HTML table of the most frequent ops: calls by phase."""
        return write_notebook_table(*self._list_ops())

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return {"text/plain": str(self)}

    def _list_phases(self) -> list[str]:
        recorded = {phase for _, _, phase in self.calls}
        return [phase for phase in PHASES if phase in recorded]

    def _list_ops(self) -> tuple[str, list[str], list[list[str]], str]:
        calls: Counter[str] = Counter()
        by_phase: Counter[tuple[str, str]] = Counter()
        for (index, _, phase), count in self.calls.items():
            op = self.signatures[index].op
            calls[op] += count
            by_phase[op, phase] += count
        phases = self._list_phases()
        rows = [[op, *(f"{by_phase[op, phase]:,}" for phase in phases)] for op, _ in calls.most_common(_MAX_ROWS)]
        shown = f"{_MAX_ROWS} of {len(calls):,} ops; " if len(calls) > _MAX_ROWS else ""
        incomplete = "" if self.complete else "; incomplete, the run raised"
        note = f"{shown}{sum(calls.values()):,} calls in {len(self.modules.by_name):,} modules{incomplete}"
        return f"Trace of {self.modules.root.class_name}", ["Op", *phases], rows, note

    def to_json(self) -> str:
        """Return the trace as JSON text, which `Trace.from_json` reads; events are in columnar form."""
        return codec.encode(self)

    @staticmethod
    def from_json(text: str) -> Trace:
        """Return the trace that `to_json` wrote; invalid text, or text of a newer format version, raises TraceError."""
        return codec.decode(text, Trace)

    @staticmethod
    def merge(traces: Iterable[Trace]) -> Trace:
        """Return the aggregated trace of several runs of one model.

        Different module trees or `stops_at` raise TraceError.
        """
        parts = list(traces)
        if not parts:
            raise TraceError("merging needs at least one trace")
        first = parts[0]
        for index, part in enumerate(parts):
            if _classes(part) != _classes(first):
                raise TraceError(
                    f"traces of different models cannot be merged: trace {index} has other modules than trace 0"
                )
            if part.stops_at != first.stops_at:
                raise TraceError(f"trace {index} was recorded with another stops_at than trace 0: record both with one")
        regions, stacks = dict[Region, int](), dict[tuple[int, ...], int]()
        signatures, region_signatures = dict[Signature, int](), dict[RegionSignature, int]()
        calls, region_calls, active = _Calls(), _Calls(), set[int]()
        for part in parts:
            region_indexes = _intern(part.regions, regions)
            stack_indexes = _intern((tuple(region_indexes[index] for index in stack) for stack in part.stacks), stacks)
            mapped_signatures = (replace(item, region=region_indexes[item.region]) for item in part.region_signatures)
            _add_calls(part.calls, calls, _intern(part.signatures, signatures), stack_indexes)
            _add_calls(part.region_calls, region_calls, _intern(mapped_signatures, region_signatures), stack_indexes)
            active.update(stack_indexes[stack] for stack in part.active)
        pseudo_modules = [name for part in parts for name in part.modules.pseudo_modules()]
        return Trace(
            modules=first.modules.with_pseudo_modules(dict.fromkeys(pseudo_modules)),
            regions=tuple(regions),
            stacks=tuple(stacks),
            signatures=tuple(signatures),
            region_signatures=tuple(region_signatures),
            calls=dict(calls),
            region_calls=dict(region_calls),
            stops_at=first.stops_at,
            decomposed=frozenset().union(*(part.decomposed for part in parts)),
            active=frozenset(active),
            about={**first.about, **merge_reads(part.about for part in parts)},
            complete=all(part.complete for part in parts),
        )


def _intern(items: Iterable[T], indexes: dict[T, int]) -> list[int]:
    return [indexes.setdefault(item, len(indexes)) for item in items]


def _add_calls(
    calls: Mapping[tuple[int, int, str], int], sums: _Calls, item_indexes: list[int], stack_indexes: list[int]
) -> None:
    for (item, stack, phase), count in calls.items():
        sums[item_indexes[item], stack_indexes[stack], phase] += count


def _classes(trace: Trace) -> dict[str, str]:
    pseudo_modules = trace.modules.pseudo_modules()
    return {name: module.class_name for name, module in trace.modules.by_name.items() if name not in pseudo_modules}


def check_phase(phase: str, recorded: tuple[str, ...]) -> str:
    """Return `phase` if it was recorded; else raise TraceError, or ValueError where no such phase exists."""
    if phase in recorded:
        return phase
    if phase not in PHASES:
        raise ValueError(f"phase must be one of {', '.join(PHASES)}; got {phase!r}")
    raise TraceError(f"{_MISSING_PHASE_MESSAGES[phase]}; recorded phases: {', '.join(recorded) or 'none'}")


_MISSING_PHASE_MESSAGES = {
    "forward": "no forward pass was recorded",
    "recompute": "no recomputation in a backward pass was recorded",
    "backward": "no backward pass was recorded: pass a loss",
    "optimizer": "no optimizer step was recorded: record a loop with fvflops.record",
    "other": "no work of other phases, such as gradient clipping, was recorded",
}


class RegionCall:
    """One call of a region, `depth` calls inside others of its thread; compared by identity, as a dictionary key."""

    __slots__ = ("begin", "depth", "parent", "region")

    def __init__(self, region: int, begin: Event, parent: RegionCall | None) -> None:
        self.region = region
        self.begin = begin
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1

    def enclosing(self) -> Iterator[RegionCall]:
        """Yield the enclosing calls, innermost first."""
        call = self.parent
        while call is not None:
            yield call
            call = call.parent


class Visit(NamedTuple):
    """An event and its `call`: the region call that it begins or ends, or the innermost one around an op.

    `kind` is "enter", "exit", "op" or "free", or "unfinished" for a region without an exit, because the recording
    ended or was paused; `event` then is the one that began it. `position` is the index of the event in the trace, for
    an unfinished region the index of the event before which it ends.
    """

    kind: str
    event: Event
    call: RegionCall | None
    position: int


def walk_events(trace: Trace) -> Iterator[Visit]:
    """Yield the events of a Trace in order, none where it has no ordered events; each thread has a stack of its own.

    Every region call that is entered ends once, innermost first: by its "exit", or as "unfinished". An exit without
    an enter, of a region that was entered while the recording was paused, is visited as both.
    """
    innermost: dict[tuple[int | None, int], RegionCall | None] = {}
    position = 0
    for position, event in enumerate(trace.events or ()):
        kind = event.kind
        if kind == "free":
            yield Visit(kind, event, None, position)
            continue
        thread = event.rank, event.thread
        call = innermost.get(thread)
        if kind == "enter":
            call = innermost[thread] = RegionCall(event.item, event, call)
        elif kind == "exit":
            region = trace.region_signatures[event.item].region
            if call is None or all(opened.region != region for opened in (call, *call.enclosing())):
                call = RegionCall(region, event, call)
                yield Visit("enter", event, call, position)
            while call is not None and call.region != region:
                yield Visit("unfinished", call.begin, call, position)
                call = call.parent
            innermost[thread] = None if call is None else call.parent
        yield Visit(kind, event, call, position)
    for call in innermost.values():
        while call is not None:
            yield Visit("unfinished", call.begin, call, position)
            call = call.parent
