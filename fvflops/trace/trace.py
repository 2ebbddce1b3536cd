"""The Trace: what ran, in order, where and on what shapes; the currency between recording and counting."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from fvflops.trace import validation
from fvflops.trace.module_tree import ModuleTree
from fvflops.trace.notebook import write_notebook_table
from fvflops.trace.signature import RegionSignature, Signature, packet_of
from fvflops.trace.spec import Value, decode_value, encode_value

SCHEMA = 1
# In the order in which a training step has them; "forward" is all that is none of the others.
PHASES = ("forward", "recompute", "backward", "optimizer")
_FORMAT = "fvflops.trace"
_ROWS = 20  # in a notebook
_SHOWN = 200  # characters of what is wrong


class TraceError(ValueError):
    """A trace that cannot be read, or cannot answer what it is asked."""


class Event(NamedTuple):
    """One thing that happened, in order; a column that a recording does not fill keeps its default.

    `kind` is "enter" or "exit" (of a region), "op" or "free" (of a storage). `item` is an index: of the region's
    signature for exit, of the region for enter, of the op call's signature for op, of the storage for free. `stack` is
    the index of the stack it ran under, `thread` is 0 for the thread that started the recording, `reads` and `writes`
    are indexes of storages. Times are in nanoseconds, memory in bytes. `line` is the index of the line of source that
    called an op, where lines were recorded.
    """

    kind: str
    item: int
    stack: int = 0
    phase: str = "forward"
    thread: int = 0
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    raised: bool = False
    rank: int | None = None
    start_ns: int | None = None
    duration_ns: int | None = None
    memory_before: int | None = None
    memory_after: int | None = None
    memory_peak: int | None = None
    line: int | None = None


class Region(NamedTuple):
    """A "module" or an autograd "function" that can be entered, or a parameter "group" that an optimizer works for.

    `name` is a module's canonical name, a function's class, or the optimizer's class and the group's name or number.
    """

    kind: str
    name: str


class Storage(NamedTuple):
    """A block of memory; `origin` is where it came from: "parameter", "buffer", "input", "op" or "outside".

    Of what existed before the run, and an optimizer held when it made a step, it is "gradient" or "optimizer state".
    """

    nbytes: int
    device: str
    origin: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class StopsAt:
    """The ops and regions that a recording does not look into.

    With `everything` false these are `names`; with `everything` true all but `names`. A name without an overload stands
    for all overloads.

    >>> "aten::linear" in StopsAt(frozenset({"aten::linear"}))
    True
    >>> "aten::add.Tensor" in StopsAt(frozenset({"aten::add"}))
    True
    >>> "aten::conv2d" in StopsAt(frozenset({"aten::conv2d"}), everything=True)
    False
    """

    names: frozenset[str] = frozenset()
    everything: bool = False

    def __contains__(self, name: str) -> bool:
        return (name in self.names or packet_of(name) in self.names) != self.everything

    def including(self, names: Iterable[str]) -> StopsAt:
        """Return a set that holds `names` too."""
        if self.everything:
            return StopsAt(self.names - frozenset(names), True)
        return StopsAt(self.names | frozenset(names), False)


@dataclass(frozen=True, slots=True)
class Trace:
    """What one run of a model did: plain data, no tensors.

    `stacks` are tuples of indexes of `regions`, innermost last; stack 0 is the root. `calls` is the aggregated form,
    (signature, stack, phase) → number of calls, and `region_calls` the same for regions that returned; `events` is the
    ordered form, or None where only the aggregated form was kept. `decomposed` are the composite ops that were looked
    into and `active` the stacks in which any op was seen. `about` names versions, vocabulary and execution; `complete`
    is False where the run raised. `lines` are lines of source, such as "net.py:12", where they were recorded. Merged
    traces share one module tree.

    >>> from fvflops import record_call
    >>> import torch
    >>> trace = record_call(torch.relu, (torch.ones(2),))
    >>> [trace.signatures[event.item].op for event in trace.events if event.kind == "op"]
    ['aten::relu']
    >>> Trace.from_json(trace.to_json()) == trace
    True
    """

    modules: ModuleTree
    regions: tuple[Region, ...]
    stacks: tuple[tuple[int, ...], ...]
    signatures: tuple[Signature, ...]
    region_signatures: Sequence[RegionSignature]
    calls: Mapping[tuple[int, int, str], int]
    region_calls: Mapping[tuple[int, int, str], int]
    events: Sequence[Event] | None = None
    storages: Sequence[Storage] = ()
    stops_at: StopsAt = StopsAt()
    decomposed: frozenset[str] = frozenset()
    active: frozenset[int] = frozenset()
    about: Mapping[str, str] = field(default_factory=dict)
    complete: bool = True
    lines: tuple[str, ...] = ()
    _scopes: list[tuple[str, ...]] = field(init=False, repr=False, compare=False, default_factory=list)

    def scope_of(self, stack: int) -> tuple[str, ...]:
        """Return the names of the modules in a stack, root first; its last is the owner of what ran there."""
        regions = self.regions
        return tuple([regions[index].name for index in self.stacks[stack] if regions[index].kind == "module"])

    def scopes(self) -> list[tuple[str, ...]]:
        """Return the scope of every stack."""
        if self._scopes:
            return self._scopes
        names = [region.name if region.kind == "module" else None for region in self.regions]
        known: dict[tuple[int, ...], tuple[str, ...]] = {}
        scopes = self._scopes
        for stack in self.stacks:
            outer = known.get(stack[:-1])
            if outer is None:
                scope = tuple([name for name in map(names.__getitem__, stack) if name is not None])
            else:
                name = names[stack[-1]]
                scope = outer if name is None else (*outer, name)
            known[stack] = scope
            scopes.append(scope)
        return scopes

    def aggregate(self) -> Trace:
        """Return the same trace without its ordered events and storages."""
        return replace(self, events=None, storages=(), lines=())

    def _repr_html_(self) -> str:
        """Return what a notebook shows of the trace: how often each op ran in each phase, those that ran most."""
        calls: Counter[str] = Counter()
        by_phase: Counter[tuple[str, str]] = Counter()
        for (index, _, phase), count in self.calls.items():
            op = self.signatures[index].op
            calls[op] += count
            by_phase[op, phase] += count
        phases = [phase for phase in PHASES if any(phase == other for _, _, other in self.calls)]
        rows = [[op, *(f"{by_phase[op, phase]:,}" for phase in phases)] for op, _ in calls.most_common(_ROWS)]
        left = f"{_ROWS} of {len(calls):,} ops; " if len(calls) > _ROWS else ""
        broken = "" if self.complete else "; the run raised, this is what ran before"
        note = f"{left}{sum(calls.values()):,} calls in {len(self.modules.places):,} modules{broken}"
        return write_notebook_table(f"Trace of {self.modules.root.class_name}", ["Op", *phases], rows, note=note)

    def to_json(self) -> str:
        """Return the trace as JSON text, which `Trace.from_json` reads; events are written by column."""
        return json.dumps(
            {
                "format": _FORMAT,
                "schema": SCHEMA,
                "about": dict(self.about),
                "complete": self.complete,
                "stops_at": {"names": sorted(self.stops_at.names), "everything": self.stops_at.everything},
                "decomposed": sorted(self.decomposed),
                "active": sorted(self.active),
                "modules": self.modules.encode(),
                "regions": [list(region) for region in self.regions],
                "stacks": [list(stack) for stack in self.stacks],
                "ops": {item.op: [list(item.names), item.schema] for item in self.signatures},
                "signatures": [
                    [
                        *(item.op, encode_value(item.inputs), encode_value(item.outputs)),
                        *((item.source,) if item.source else ()),
                    ]
                    for item in self.signatures
                ],
                "region_signatures": [
                    [item.region, encode_value(item.inputs), encode_value(item.outputs)]
                    for item in self.region_signatures
                ],
                "calls": [[*key, count] for key, count in self.calls.items()],
                "region_calls": [[*key, count] for key, count in self.region_calls.items()],
                "events": None if self.events is None else _columns(self.events),
                "storages": [list(storage) for storage in self.storages],
                **({"lines": list(self.lines)} if self.lines else {}),
            },
            allow_nan=False,
            separators=(",", ":"),
        )

    @staticmethod
    def from_json(text: str) -> Trace:
        """Return the trace that `to_json` wrote; text that is no trace, is cut short or newer raises TraceError."""
        try:
            record = json.loads(text)
        except ValueError as error:
            raise TraceError(f"this is no whole trace: it is not JSON ({error}); save it again") from error
        except RecursionError:
            raise TraceError("this is no trace: it is nested too deeply") from None
        if not isinstance(record, dict) or record.get("format") != _FORMAT:
            raise TraceError(f'this is no trace of fvflops: it lacks the mark "format": "{_FORMAT}"')
        if type(record.get("schema")) is not int or not 1 <= record["schema"] <= SCHEMA:
            schema = repr(record.get("schema"))[:_SHOWN]
            raise TraceError(f"this trace has schema {schema}, and this fvflops reads up to {SCHEMA}: update fvflops")
        try:
            trace = _decode(record)
            validation.validate(trace, PHASES)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError) as error:
            kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
            raise TraceError(f"this trace is damaged: {kind}{str(error)[:_SHOWN]}; save it again") from error
        return trace

    @staticmethod
    def merge(traces: Iterable[Trace]) -> Trace:
        """Return the aggregated trace of several runs of one model; two different module trees raise TraceError."""
        parts = list(traces)
        if not parts:
            raise TraceError("merging needs at least one trace")
        first = parts[0]
        for part in parts[1:]:
            if _classes(part) != _classes(first) or part.stops_at != first.stops_at:
                raise TraceError("only traces of one model, recorded with the same stops, can be merged")
        regions: dict[Region, int] = {}
        stacks: dict[tuple[int, ...], int] = {}
        signatures: dict[Signature, int] = {}
        region_signatures: dict[RegionSignature, int] = {}
        calls: Counter[tuple[int, int, str]] = Counter()
        region_calls: Counter[tuple[int, int, str]] = Counter()
        active: set[int] = set()
        for part in parts:
            region_at = [regions.setdefault(region, len(regions)) for region in part.regions]
            stack_at = [
                stacks.setdefault(tuple(region_at[index] for index in stack), len(stacks)) for stack in part.stacks
            ]
            signature_at = [signatures.setdefault(item, len(signatures)) for item in part.signatures]
            region_signature_at = [
                region_signatures.setdefault(replace(item, region=region_at[item.region]), len(region_signatures))
                for item in part.region_signatures
            ]
            for (signature, stack, phase), count in part.calls.items():
                calls[signature_at[signature], stack_at[stack], phase] += count
            for (signature, stack, phase), count in part.region_calls.items():
                region_calls[region_signature_at[signature], stack_at[stack], phase] += count
            active.update(stack_at[stack] for stack in part.active)
        outsiders = [name for part in parts for name in part.modules.outsiders()]
        return Trace(
            modules=first.modules.including(dict.fromkeys(outsiders)),
            regions=tuple(regions),
            stacks=tuple(stacks),
            signatures=tuple(signatures),
            region_signatures=tuple(region_signatures),
            calls=dict(calls),
            region_calls=dict(region_calls),
            stops_at=first.stops_at,
            decomposed=frozenset().union(*(part.decomposed for part in parts)),
            active=frozenset(active),
            about=first.about,
            complete=all(part.complete for part in parts),
        )


def _classes(trace: Trace) -> dict[str, str]:
    outsiders = trace.modules.outsiders()
    return {name: place.class_name for name, place in trace.modules.places.items() if name not in outsiders}


def _columns(events: Sequence[Event]) -> dict[str, Any]:
    columns: dict[str, Any] = {"length": len(events)}
    for index, name in enumerate(Event._fields):
        column = [event[index] for event in events]
        default = Event._field_defaults.get(name)
        if name not in Event._field_defaults or any(value != default for value in column):
            columns[name] = column
    return columns


def _events(columns: dict[str, Any]) -> tuple[Event, ...]:
    unknown = columns.keys() - set(Event._fields) - {"length"}
    if unknown:
        raise ValueError(f"events have columns that this version does not know: {sorted(unknown)}")
    names = [name for name in Event._fields if name in columns]
    for name in ("reads", "writes"):
        if name in columns:
            columns[name] = [tuple(item) for item in columns[name]]
    if any(len(columns[name]) != columns["length"] for name in names):
        raise ValueError("the columns of its events differ in length")
    return tuple(
        Event(**dict(zip(names, row, strict=True))) for row in zip(*(columns[name] for name in names), strict=True)
    )


def _decode(record: dict[str, Any]) -> Trace:
    ops = {op: (tuple(names), schema) for op, (names, schema) in record["ops"].items()}
    return Trace(
        modules=ModuleTree.decode(record["modules"]),
        regions=tuple(Region(*item) for item in record["regions"]),
        stacks=tuple(tuple(stack) for stack in record["stacks"]),
        signatures=tuple(
            Signature(op, ops[op][0], _values(inputs), _values(outputs), ops[op][1], *source)
            for op, inputs, outputs, *source in record["signatures"]
        ),
        region_signatures=tuple(
            RegionSignature(region, _values(inputs), _values(outputs))
            for region, inputs, outputs in record["region_signatures"]
        ),
        calls={(item, stack, phase): count for item, stack, phase, count in record["calls"]},
        region_calls={(item, stack, phase): count for item, stack, phase, count in record["region_calls"]},
        events=None if record["events"] is None else _events(record["events"]),
        storages=tuple(Storage(*item) for item in record["storages"]),
        stops_at=StopsAt(frozenset(record["stops_at"]["names"]), record["stops_at"]["everything"]),
        decomposed=frozenset(record["decomposed"]),
        active=frozenset(record["active"]),
        about=record["about"],
        complete=record["complete"],
        lines=tuple(record.get("lines", ())),
    )


def _values(record: list[Any]) -> tuple[Value, ...]:
    value = decode_value(record)
    if not isinstance(value, tuple):
        raise ValueError(f"a signature holds {record} where a list belongs")
    return value


def check_phase(phase: str, recorded: tuple[str, ...]) -> str:
    """Return a phase that was recorded; one that was not raises TraceError, one that does not exist ValueError.

    >>> check_phase("backward", ("forward",))
    Traceback (most recent call last):
    fvflops.trace.trace.TraceError: no backward pass was run, so there is nothing to tell of it: give a loss; recorded \
was forward
    """
    if phase in recorded:
        return phase
    if phase not in PHASES:
        raise ValueError(f"there is no phase {phase!r}: phases are {', '.join(PHASES)}")
    raise TraceError(f"{_NOT_RUN[phase]}; recorded was {', '.join(recorded) or 'nothing'}")


_NOT_RUN = {
    "forward": "no forward pass was run, so there is nothing to tell of it",
    "recompute": "nothing was run again in a backward pass, so there is nothing to tell of that",
    "backward": "no backward pass was run, so there is nothing to tell of it: give a loss",
    "optimizer": "no optimizer made a step, so there is nothing to tell of it: record a loop with fvflops.record",
}
