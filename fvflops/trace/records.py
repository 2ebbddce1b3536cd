"""Records that a Trace consists of: events, regions, storages, its fields, and notes on what a run depends on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from fvflops.text import short_repr
from fvflops.trace.calls import RegionSignature, Signature, packet_of
from fvflops.trace.module_tree import ModuleTree

# In the order of a training step. "other" is work without gradients on results of a backward pass or an optimizer step,
# such as gradient clipping and moving averages; "forward" is everything that belongs to no other phase.
PHASES = ("forward", "recompute", "backward", "optimizer", "other")
# In place of the names of arguments: all lists of integers, one-dimensional tensors.
ALL_LISTS = ("*",)


class TraceError(ValueError):
    """A trace that cannot be read, or lacks the requested data."""


class Event(NamedTuple):
    """One event of a run, in order; a column that a recording does not fill keeps its default.

    `kind` is "enter" or "exit" (of a region), "op" or "free" (of a storage). `item` is an index: the region's
    signature for exit, the region for enter, the op call's signature for op, the storage for free. `stack` is
    the index of its stack of regions, `thread` is 0 for the thread that started the recording. `reads` are the indexes
    of the storages of an op's tensor arguments, `writes` of its results: a view has its input's storage, and an
    argument that an op modifies without returning it is only in `reads`. Times are in nanoseconds, memory in bytes.
    `raised`: an exception ended the region. `rank` is the rank of a distributed process, or None. `line` is the index
    of the source line that called an op, where lines were recorded.
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


def event_of_row(
    kind: str,
    item: int,
    stack: int = 0,
    phase: str = "forward",
    thread: int = 0,
    reads: Iterable[int] = (),
    writes: Iterable[int] = (),
    *others: Any,
) -> Event:
    """Return the event of a row of a recording, each of whose storages is named once."""
    unique = dict.fromkeys
    return Event(kind, item, stack, phase, thread, tuple(unique(reads)), tuple(unique(writes)), *others)


class Region(NamedTuple):
    """A "module", a "function" (torch.autograd.Function), or a parameter "group" during an optimizer's step.

    `name` is a module's canonical name, a function's class, or the optimizer's class and the group's name or number.
    """

    kind: str
    name: str


class Storage(NamedTuple):
    """A tensor storage; `origin` is "parameter", "buffer", "input", "op" (created by a recorded op) or "outside".

    "outside": any other storage, such as a tensor that the program created before the run, or in unrecorded code. Such
    a storage has "gradient" or "optimizer state" instead if an optimizer's parameter has it as its gradient or state.
    """

    nbytes: int
    device: str
    origin: str
    name: str = ""


@dataclass(frozen=True, slots=True, repr=False)
class StopsAt:
    """The composite ops and regions that a recording does not decompose, and the tensor values that it keeps.

    With `everything` false these are `names`; with `everything` true all but `names`. A name without an overload
    matches all overloads. `values` maps ops to the names of the arguments whose values their cost depends on, or to
    ALL_LISTS: every list of integers. They are not compared and not saved with a Trace, whose specs have the values.

    >>> "aten::linear" in StopsAt(frozenset({"aten::linear"}))
    True
    >>> "aten::add.Tensor" in StopsAt(frozenset({"aten::add"}))
    True
    >>> "aten::conv2d" in StopsAt(frozenset({"aten::conv2d"}), everything=True)
    False
    """

    names: frozenset[str] = frozenset()
    everything: bool = False
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        return short_repr(self, "", f"{'all but ' * self.everything}{len(self.names):,} names")

    def __contains__(self, name: str) -> bool:
        return (name in self.names or packet_of(name) in self.names) != self.everything

    @property
    def key(self) -> tuple[StopsAt, frozenset[tuple[str, tuple[str, ...]]]]:
        """A key, equal for equal recordings: it includes the values."""
        return self, frozenset(self.values.items())

    def values_of(self, op: str) -> tuple[str, ...]:
        """Return the names of the arguments of an op whose values are kept.

        >>> StopsAt(values={"mylib::scan": ("offsets",)}).values_of("mylib::scan.out")
        ('offsets',)
        """
        return self.values.get(op) or self.values.get(packet_of(op), ())

    def including(self, names: Iterable[str], values: Mapping[str, tuple[str, ...]]) -> StopsAt:
        """Return a StopsAt that also contains `names` and, in place of their own, `values`."""
        changed = self.names.difference(names) if self.everything else self.names.union(names)
        return StopsAt(changed, self.everything, {**self.values, **values})


# Between the locations in an entry of `about`.
LOCATION_SEPARATOR = "; "
# Keys of `about` that are not the names in RunInfo.
_KEYS = {"op_set": "vocabulary", "assumed": "supposed", "upper_bounds": "bounds"}


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Metadata of a recorded run, stored as strings in a Trace's `about`, next to entries that are only displayed.

    Three have other keys there: `op_set` is "vocabulary", `assumed` is "supposed" and `upper_bounds` is "bounds".

    `execution` is "shapes", "real" or "fake" (as "real", on FakeTensors of the program). `op_set` is "composite" (ops
    as called, without autograd) or "core" (ops as decomposed by autograd). `device` is the target device of a shape
    execution or the device of a profile, `inputs` the model's inputs; "" where unknown. `measured` may contain "time"
    and "memory". `assumed` describes, by op, the assumed results of data-dependent ops, and `upper_bounds` names the
    ops whose results were assumed to have their maximum size. `random` and `data_dependent` are the locations, such as
    "'encoder' at net.py:42", where Python read a random draw or a value of the data. A profile has the number of
    `warmup` runs, or of `steps` of a torch.profiler schedule; `overhead_ns` is the subtracted profiling overhead in
    total, `overhead_ns_per_op` per op.
    """

    execution: str = ""
    op_set: str = ""
    device: str = ""
    inputs: str = ""
    measured: frozenset[str] = frozenset()
    assumed: str = ""
    upper_bounds: tuple[str, ...] = ()
    random: tuple[str, ...] = ()
    data_dependent: tuple[str, ...] = ()
    warmup: int = 0
    steps: int = 0
    overhead_ns: int = 0
    overhead_ns_per_op: int = 0

    @classmethod
    def read(cls, about: Mapping[str, str]) -> RunInfo:
        """Parse the strings of `about`; an invalid number is read as 0.

        >>> RunInfo.read({"measured": "time, memory", "warmup": "2"}).measured == {"time", "memory"}
        True
        """
        values: dict[str, Any] = {}
        for item in fields(cls):
            text = about.get(_KEYS.get(item.name, item.name), "")
            if isinstance(item.default, int):
                values[item.name] = int(text) if text.isdecimal() else 0
            elif isinstance(item.default, str):
                values[item.name] = text
            else:
                separator = LOCATION_SEPARATOR if item.name in ("random", "data_dependent") else ", "
                names = text.split(separator) if text else []
                values[item.name] = frozenset(names) if item.name == "measured" else tuple(names)
        return cls(**values)


@dataclass(frozen=True, slots=True)
class TraceFields:
    """The fields of a Trace that are saved as JSON, documented in `Trace`."""

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


# Key of a Trace's `about` → its sentence.
_SENTENCES = {
    "bounds": "Upper bound: the output of {} is assumed to have its maximum size.",
    "given": "Given for data-dependent ops: {}.",
    "supposed": "ASSUMED (data-dependent): {}.",
    "random": "Random: Python read a random draw in {}. Another draw may cost more or less.",
    "data_dependent": "Data-dependent: values of the data were read in {}. Other data may cost more or less.",
    "peaks": "Peak memory: the largest of the runs {}.",
    "draws": "{}.",
}


def list_run_notes(about: Mapping[str, str], escape: Callable[[str], str] = str) -> Iterator[str]:
    """Yield the sentences for a Trace's `about`; `escape` is applied to each text in them.

    >>> list(list_run_notes({"given": "aten::nonzero=100"}))
    ['Given for data-dependent ops: aten::nonzero=100.']
    """
    for key, sentence in _SENTENCES.items():
        if key in about:
            yield sentence.format(escape(about[key]))


def merge_reads(abouts: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """Return the locations of reads in several runs, each once, for the `about` of their merged Trace."""
    merged: dict[str, dict[str, None]] = {"random": {}, "data_dependent": {}}
    for about in abouts:
        for key in merged.keys() & about.keys():
            merged[key].update(dict.fromkeys(about[key].split(LOCATION_SEPARATOR)))
    return {key: LOCATION_SEPARATOR.join(locations) for key, locations in merged.items() if locations}


def reads_of(info: RunInfo) -> dict[str, list[str]]:
    """Return where Python read a random draw or a value of the data, as a report's data."""
    return {"random": list(info.random), "data_dependent": list(info.data_dependent)}
