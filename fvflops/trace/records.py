"""The records that a Trace consists of: events, regions, storages, and its columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fvflops.trace.module_tree import ModuleTree
from fvflops.trace.signature import RegionSignature, Signature, packet_of

# In the order in which a training step has them; "forward" is all that is none of the others.
PHASES = ("forward", "recompute", "backward", "optimizer")


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
class RunInfo:
    """What a Trace says of its run; in its JSON these are the texts of `about`, with others that are only shown.

    `execution` is "shapes", "real" or "fake", `vocabulary` "core" or "composite". `device` is that which a run by
    shapes was for, or a profile ran on, and `inputs` the model's, "" where they are not known. `measured` holds "time"
    and "memory". `assumed` tells, by op, of what data-dependent ops were taken to give, and `upper_bounds` names those
    whose results were taken to be as large as they can be. A profile made so many `warmup` runs, or `steps` of a
    schedule; `overhead_ns` was subtracted for the profiling as a whole, and `overhead_ns_per_op` from each op.
    """

    execution: str = ""
    vocabulary: str = ""
    device: str = ""
    inputs: str = ""
    measured: frozenset[str] = frozenset()
    assumed: str = ""
    upper_bounds: tuple[str, ...] = ()
    warmup: int = 0
    steps: int = 0
    overhead_ns: int = 0
    overhead_ns_per_op: int = 0

    @classmethod
    def read(cls, about: Mapping[str, str]) -> RunInfo:
        """Return what texts say; a number that is none is 0.

        >>> RunInfo.read({"measured": "time, memory", "warmup": "2"}).measured == {"time", "memory"}
        True
        """
        return cls(
            execution=about.get("execution", ""),
            vocabulary=about.get("vocabulary", ""),
            device=about.get("device", ""),
            inputs=about.get("inputs", ""),
            measured=frozenset(_names(about.get("measured", ""))),
            assumed=about.get("supposed", ""),
            upper_bounds=tuple(_names(about.get("bounds", ""))),
            warmup=_number(about.get("warmup", "")),
            steps=_number(about.get("steps", "")),
            overhead_ns=_number(about.get("overhead_ns", "")),
            overhead_ns_per_op=_number(about.get("overhead_ns_per_op", "")),
        )


def _names(text: str) -> list[str]:
    return text.split(", ") if text else []


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


@dataclass(frozen=True, slots=True)
class TraceColumns:
    """What of a Trace is saved as JSON; `Trace` says what each column holds."""

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
