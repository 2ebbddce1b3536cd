"""The lifetime and kind of each storage of a recorded run, and its peak memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from fvflops.plan.memory.buffers import find_buffers
from fvflops.plan.memory.workspaces import kernels_with_unknown_workspace, workspace_of
from fvflops.text import require_int, short_repr, shown_by_fields
from fvflops.trace import Event, Storage, Trace, TraceError
from fvflops.trace.module_tree import innermost, modules_above
from fvflops.units import format_bytes

# Kinds of memory. An activation is created in a forward pass, or in its recompute, and alive when the next backward
# op runs. Communication buffers are parameters that FSDP2 has gathered, and other tensors that collectives read or
# write and that are not activations or gradients. A temporary is created by an op and is none of the others.
KINDS = (
    "parameter",
    "buffer",
    "input",
    "gradient",
    "optimizer state",
    "activation",
    "temporary",
    "communication",
    "workspace",
)
# Device type → the multiple of bytes to which its allocator rounds; others do not round.
GRANULARITY = {"cuda": 512}

HOST_DEVICE = "cpu:0"  # the device of tensors that shape execution offloads (capture/shapes/offloading.py)
_BEFORE = -1  # event index of blocks that exist before the first event
_BACKWARD = ("backward", "recompute")
_LINEAR = "torch.nn.Linear"


@shown_by_fields
class Block(NamedTuple):
    """An allocation that is alive from the event `begin` of a Trace, -1 for before the run, until the event `end`.

    `end` is None for a block alive at the end of the run. `storage` is an index into the Trace's storages, None for a
    kernel's workspace and for estimated memory. `nbytes` is rounded as by the allocator, `module` is the name of the
    owner, and `op` the op that allocated it, "" for none.
    """

    storage: int | None
    nbytes: int
    kind: str
    module: str
    op: str
    begin: int
    end: int | None

    def is_alive(self, event: int) -> bool:
        return self.begin <= event and (self.end is None or event < self.end)


@shown_by_fields
class MemoryMoment(NamedTuple):
    """The memory allocated at one event of a run, in bytes.

    `op` is the op, or the kind of another event ("enter", "exit", "free"), or "" before the run; `module`
    and `phase` are where it happened. `by_kind` has only the kinds present; `by_module` sums over each module with its
    submodules, "" being the model.
    """

    event: int
    op: str
    module: str
    phase: str
    nbytes: int
    by_kind: Counter[str]
    by_module: Counter[str]


@dataclass(frozen=True, slots=True, repr=False)
class MemoryTimeline:
    """The memory of a run on one device, at each event of its Trace; all values in bytes.

    `blocks` are all allocations; every other value derives from them. `settings` are the run's assumptions, by name.
    `unseen` is op → calls for ops with an unknown workspace; the peak may be higher by those workspaces.

    >>> import torch
    >>> from fvflops import record_call
    >>> timeline = read_memory(record_call(torch.nn.Linear(3, 2), (torch.ones(4, 3),)))
    >>> timeline.baseline, timeline.peak, timeline.at_peak().op
    (80, 112, 'aten::addmm')
    >>> dict(timeline.at_peak().by_kind)
    {'parameter': 32, 'input': 48, 'temporary': 32}
    """

    device: str
    granularity: int
    blocks: tuple[Block, ...]
    unseen: Counter[str]
    trace: Trace = field(repr=False)
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    _totals: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_totals", _sweep(self.blocks, len(self.trace.events or ())))

    def __repr__(self) -> str:
        unknown = f"{sum(self.unseen.values()):,} kernels with unknown workspace" if self.unseen else ""
        peak = f"peak {format_bytes(self.peak)} on {self.device}"
        return short_repr(self, self.trace.modules.root.class_name, peak, unknown)

    @property
    def baseline(self) -> int:
        """The memory allocated before the run."""
        return self._totals[0]

    @property
    def peak(self) -> int:
        """The peak memory over all events."""
        return max(self._totals)

    def at_peak(self) -> MemoryMoment:
        """Return the first event at which the memory is at its peak."""
        return self.at(self._totals.index(self.peak) - 1)

    def at(self, event: int) -> MemoryMoment:
        """Return the memory allocated at an event, -1 for before the run; an index out of range raises IndexError."""
        events = self.trace.events or ()
        if not _BEFORE <= event < len(events):
            raise IndexError(f"no event {event}: the run has events 0 to {len(events) - 1}, and -1 is before the run")
        by_kind: Counter[str] = Counter()
        by_module: Counter[str] = Counter()
        for block in self.blocks:
            if block.is_alive(event):
                by_kind[block.kind] += block.nbytes
                by_module.update(dict.fromkeys((*modules_above(block.module), block.module), block.nbytes))
        op = module = phase = ""
        if event != _BEFORE:
            row = events[event]
            op = self.trace.signatures[row.item].op if row.kind == "op" else row.kind
            module, phase = _owner(self.trace, row.stack), row.phase
        ordered = Counter({kind: by_kind[kind] for kind in KINDS if kind in by_kind})
        return MemoryMoment(event, op, module, phase, self._totals[event + 1], ordered, by_module)

    def by_phase(self) -> dict[str, int]:
        """Return phase → peak memory over its ops; ops without tensors, such as markers for a profiler, are ignored."""
        peaks: dict[str, int] = {}
        for event, total in zip(self.trace.events or (), self._totals[1:], strict=True):
            if event.kind == "op" and (event.reads or event.writes):
                peaks[event.phase] = max(peaks.get(event.phase, 0), total)
        return peaks

    def curve(self, kind: str | None = None) -> tuple[int, ...]:
        """Return the memory allocated at each event, of all kinds or of one; the first value is from before the run."""
        if kind is None:
            return self._totals
        if kind not in KINDS:
            raise ValueError(f"no kind of memory {kind!r}: the kinds are {', '.join(KINDS)}")
        return _sweep([block for block in self.blocks if block.kind == kind], len(self._totals) - 1)


def read_memory(
    trace: Trace,
    *,
    device: str | None = None,
    granularity: int | None = None,
    first_step: bool = False,
    workspaces: bool = True,
    run_end: int | None = None,
) -> MemoryTimeline:
    """Return the memory of a recorded run; a Trace without ordered events raises TraceError.

    The arguments are as for `predict_memory`. `run_end` is the number of events of the run: later ones are frees by the
    recorder. By default these are the frees at the end, except in a backward pass or an optimizer.
    """
    if trace.events is None:
        raise TraceError(
            "this Trace has no ordered events (it was merged, aggregated, or comes from a long recording); memory "
            "prediction needs them: pass the Trace of one step, such as run.steps[0]"
        )
    devices = _list_devices(trace)
    device = next(iter(devices), "cpu") if device is None else device
    if device not in devices and devices:
        raise ValueError(f"this run used no memory on {device!r}: it used {', '.join(devices)}")
    unit = GRANULARITY.get(device.partition(":")[0], 1) if granularity is None else granularity
    require_int("granularity in bytes", unit, least=1)
    blocks = _Lifetimes(trace, device, unit, run_end).blocks(first_step)
    sizes = [workspace_of(signature, device) for signature in trace.signatures]
    if workspaces:
        blocks += _workspaces(trace, [_round_up(size or 0, unit) for size in sizes])
    return MemoryTimeline(device, unit, tuple(blocks), kernels_with_unknown_workspace(trace, sizes), trace)


def _list_devices(trace: Trace) -> list[str]:
    """Return the devices of storages; first the emulated device, or in real execution the one with the most bytes."""
    emulated = _emulated_device(trace)
    devices = Counter({emulated: 0} if emulated else {})
    for storage in trace.storages:
        devices[_device_of(storage, emulated)] += storage.nbytes
    return list(devices) if emulated else [device for device, _ in devices.most_common()]


def _device_of(storage: Storage, emulated: str) -> str:
    """Return a storage's device; in shape execution the emulated one, unless it was offloaded to the host."""
    if not emulated:
        return storage.device
    return "cpu" if storage.device == HOST_DEVICE else emulated


def _emulated_device(trace: Trace) -> str:
    info = trace.info
    return info.device if info.execution == "shapes" else ""


def _workspaces(trace: Trace, sizes: Sequence[int]) -> Iterator[Block]:
    for index, event in enumerate(trace.events or ()):
        if event.kind == "op" and sizes[event.item]:
            owner, op = _owner(trace, event.stack), trace.signatures[event.item].op
            yield Block(None, sizes[event.item], "workspace", owner, op, index, index + 1)


class _Lifetimes:
    def __init__(self, trace: Trace, device: str, unit: int, run_end: int | None) -> None:
        self._trace = trace
        self._unit = unit
        self._storages: Sequence[Storage] = tuple(trace.storages)
        emulated = _emulated_device(trace)
        self._on_device = [_device_of(row, emulated) == device for row in self._storages]
        self._events: Sequence[Event] = tuple(trace.events or ())
        self._run_end = _find_end_of_run(self._events) if run_end is None else run_end
        self._first: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        for index, event in enumerate(self._events):
            if event.kind == "op":
                for storage in (*event.reads, *event.writes):
                    self._first.setdefault(storage, index)
            elif event.kind == "free" and (index < self._run_end or (run_end is None and event.phase != "forward")):
                self._ends[event.item] = index
        self._next_backward = self._next_op(lambda phase: phase == "backward")
        self._after_backward = self._next_op(lambda phase: phase not in _BACKWARD)
        self._after_optimizer = self._next_op(lambda phase: phase != "optimizer")
        self._exits = [index for index, event in enumerate(self._events) if event.kind == "exit" and not event.stack]
        self._end_in_place_operands()
        self._modules: dict[int, str] = {}
        self._buffers = find_buffers(trace)

    def blocks(self, first_step: bool) -> list[Block]:
        """Return the storages as blocks; unless `first_step`, with memory left by the previous step."""
        found = (self._block(index) for index, on_device in enumerate(self._on_device) if on_device)
        blocks = [block for block in found if block is not None]
        trains = any(event.kind == "op" and event.phase != "forward" for event in self._events)
        if first_step or not trains:
            return blocks
        # A step in real execution that creates no optimizer state is not a first step.
        is_first = self._trace.info.execution == "shapes" or any(
            block.kind == "optimizer state" and block.begin != _BEFORE for block in blocks
        )
        return [lifetime for block in blocks for lifetime in self._in_later_step(block)] if is_first else blocks

    def _block(self, index: int) -> Block | None:
        row, first, end = self._storages[index], self._first.get(index), self._ends.get(index)
        if not row.nbytes:
            return None
        nbytes = _round_up(row.nbytes, self._unit)
        if row.origin != "op":
            kind, module = self._kind_of_existing(index), row.name.rpartition(".")[0]
            # A storage of unknown origin that is freed in the run, such as a batch of data, was probably created in it
            # by unrecorded code; so was optimizer state that did not exist before the step, such as its step count.
            created_in_run = row.origin == "outside" and (end is not None or kind == "optimizer state")
            begin = first if created_in_run and first is not None else _BEFORE
            self._modules[index] = module
            return Block(index, nbytes, kind, module, "", begin, end)
        if first is None:
            return None  # created by a call without an event, such as one in a discarded branch
        event = self._events[first]
        kind = self._kind_of_result(first, end)
        if index in self._buffers.gathered or (kind == "temporary" and index in self._buffers.sent):
            kind = "communication"
        module = self._buffers.module_of(index, self._modules, otherwise=_owner(self._trace, event.stack))
        if kind == "optimizer state":  # attribute it to the owner of the parameter that the op read
            module = next((self._modules[read] for read in event.reads if read in self._modules), module)
        is_result = index in event.writes and index not in event.reads  # else `resize_` allocated it
        op = self._trace.signatures[event.item].op if is_result else ""
        # State that was not created in the step was created by the optimizer's constructor, which is not recorded; so
        # were gradients that it accumulates in memory of its own.
        existed = kind == "optimizer state" or (kind == "gradient" and end is None)
        begin = _BEFORE if existed and not is_result else first
        self._modules[index] = module
        return Block(index, nbytes, kind, module, op, begin, end)

    def _kind_of_existing(self, index: int) -> str:
        """Return the kind of a storage that no op of the run created."""
        row = self._storages[index]
        if row.origin != "outside":
            return row.origin
        first = self._first.get(index)
        if first is None:
            return "input"
        event = self._events[first]
        if event.phase == "optimizer":
            return "optimizer state"
        if index in self._buffers.sent:
            return "communication"
        # Autograd accumulates into an existing gradient in place.
        return "gradient" if event.phase == "backward" and index in event.writes else "input"

    def _kind_of_result(self, first: int, end: int | None) -> str:
        """Return the kind of an op's result by the phase in which it is created and whether it outlives that phase."""
        phase = self._events[first].phase
        if phase == "optimizer":
            following, kind = self._after_optimizer[first], "optimizer state"
        elif phase == "backward":
            following, kind = self._after_backward[first], "gradient"
        else:
            following, kind = self._next_backward[first], "activation"
            if following == self._run_end:  # no backward pass follows
                return "temporary"
        return kind if end is None or end > following else "temporary"

    def _next_op(self, matches: Callable[[str], bool]) -> list[int]:
        """Return the next op after each event whose phase matches, or the end of the run."""
        next_ops, following = [self._run_end] * len(self._events), self._run_end
        for index in range(len(self._events) - 1, -1, -1):
            next_ops[index] = following
            if self._events[index].kind == "op" and matches(self._events[index].phase):
                following = index
        return next_ops

    def _end_in_place_operands(self) -> None:
        """End the lifetime of the first operand of an out-of-place add at the add, if torch would add in place.

        Under a dispatch mode autograd does not accumulate gradients in place (accumulate in input_buffer.cpp), even
        without another reference to them, and linear does not add its bias in place (Linear.cpp).
        """
        follows = self._next_op(lambda phase: True)
        for index, event in enumerate(self._events):
            if event.kind != "op" or self._trace.signatures[event.item].op != "aten::add.Tensor" or not event.reads:
                continue
            first, writes = event.reads[0], event.writes
            is_new = len(writes) == 1 and self._first[writes[0]] == index
            if not (is_new and index < self._ends.get(first, 0) <= follows[index]):
                continue
            source, result = self._storages[first], self._storages[writes[0]]
            module = self._trace.modules.by_name.get(_owner(self._trace, event.stack))
            adds_in_place = event.phase == "backward" or (module is not None and _LINEAR in module.classes)
            if source.nbytes == result.nbytes and source.origin == "op" and adds_in_place:
                self._ends[first] = index

    def _in_later_step(self, block: Block) -> list[Block]:
        """Return the lifetimes of a block in a step that is preceded by an identical step."""
        lasts = block.begin != _BEFORE and block.end is None
        if lasts and block.kind == "optimizer state":
            return [block._replace(begin=_BEFORE)]
        if lasts and block.kind in ("activation", "temporary"):
            # The program keeps a reference to the last step's result until the model returns the next.
            return [block, block._replace(begin=_BEFORE, end=self._replaced_at(block.begin))]
        return [block]

    def _replaced_at(self, created: int) -> int:
        """Return the event, in the first microbatch, at which the last step's result of event `created` is replaced."""
        exits = self._exits
        if not exits or created < exits[-1]:
            return exits[0] if exits else created + 1
        return exits[0] + created - exits[-1] + 1


def _find_end_of_run(events: Sequence[Event]) -> int:
    """Return the index where a run ends; later events are frees caused by the recorder dropping its references."""
    run_end = len(events)
    while run_end and events[run_end - 1].kind == "free":
        run_end -= 1
    return run_end


def _sweep(blocks: Sequence[Block], length: int) -> tuple[int, ...]:
    """Return the bytes allocated before the run and at each event (prefix sum over allocations and frees)."""
    changes = [0] * (length + 2)
    for block in blocks:
        changes[block.begin + 1] += block.nbytes
        if block.end is not None:
            changes[block.end + 1] -= block.nbytes
    return tuple(accumulate(changes[:-1]))


def _owner(trace: Trace, stack: int) -> str:
    return innermost(trace.scopes()[stack])


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit
