"""A recorded pass as a program for the simulation: runs of kernels, collectives, and waits for them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fvflops.plan.communication import CollectiveCall, collective_of
from fvflops.plan.rank_step import Call
from fvflops.plan.step_time.kernel_times import UNKNOWN, Kernel, kernel_of, list_fused
from fvflops.trace import Event, Trace, TraceError
from fvflops.trace.module_tree import innermost
from fvflops.trace.process_group import ProcessGroupSpec

# Ops that allocate optimizer state, in the first step only, and ops that fill copies of parameters.
_FIRST_STEP = frozenset({"aten::zeros_like", "aten::zeros"})
_FIRST_COPIES = frozenset({"aten::_foreach_copy_", "aten::copy_"})
# FSDP2 runs the ops after it, up to the optimizer's step, on the same stream.
_REDUCTION = "c10d::_reduce_scatter_base_"
# They fill the buffer of an all-gather, on the stream on which it runs.
_ON_STREAM_OF_GATHER = frozenset({"fsdp::all_gather_copy_in"})
# The simulation of the schedule sends.
_POINT_TO_POINT = ("send", "receive")


class Launch(NamedTuple):
    """A kernel, with the phase, the module and the op that launch it; `op` is "fused" for the ops of a fused module."""

    kernel: Kernel
    phase: str
    module: str
    op: str


class Run(NamedTuple):
    """Kernels that run one after the other on the compute stream; `items` are indexes of the program's launches."""

    items: tuple[int, ...]


class Collective(NamedTuple):
    """A collective; `number` identifies it in the program, `gate` is the collective whose Wait it follows.

    Collectives of one group run one after the other. With `after` it starts when that collective has ended, since it
    sends its result. Without a gate it starts when all kernels launched before it, which write its input, have ended.
    """

    number: int
    call: CollectiveCall
    phase: str
    module: str
    gate: int | None
    after: int | None = None


class StreamRun(NamedTuple):
    """A kernel on the stream of a collective, after it, such as one that adds gradients which FSDP2 has reduced."""

    number: int
    item: int


class Wait(NamedTuple):
    """The next kernel reads a collective's result; with a `group` it is one of the stage's gathering action."""

    number: int
    group: ProcessGroupSpec | None = None


Item = Run | Collective | StreamRun | Wait


@dataclass(frozen=True, slots=True)
class Program:
    """Items of a pass on the host's queue, in order; `launches` are its distinct kernels.

    `unknown` is op → calls for ops that take no time here, because neither their bytes nor their multiply-adds are
    known, or because they communicate and have no rule. `bytes_only` is op → calls for ops without a formula, which
    take the time of their bytes.
    """

    items: tuple[Item, ...]
    launches: tuple[Launch, ...]
    unknown: Mapping[str, int] = field(default_factory=dict)
    bytes_only: Mapping[str, int] = field(default_factory=dict)


def read_program(
    trace: Trace,
    begin: int = 0,
    end: int | None = None,
    *,
    fused: Collection[str] = (),
    added: Sequence[Call] = (),
    overlapped: Mapping[int, Sequence[Call]] | None = None,
    awaited: Mapping[int, Sequence[Wait]] | None = None,
    waits: bool = True,
) -> Program:
    """Return the program of the events `begin` to `end` of a Trace.

    `fused` are qualified names of module classes, such as "torch.nn.LayerNorm": the ops in one call of such a module,
    other than products and collectives, are one kernel, which reads the call's inputs from outside and writes the
    results that later ops read.

    Two kinds of calls were not run: `added` follow the events, and items after one of their collectives wait for it;
    `overlapped` is number of events → calls after these, whose collectives the end of the pass waits for if `waits`,
    else the optimizer's step. `awaited` is position of an event → gathers of an earlier action that it waits for. Calls
    among the ops of a fused module follow its kernel.

    A Trace without ordered events raises TraceError.
    """
    if trace.events is None:
        raise TraceError("this Trace has no ordered events, which the simulation of a step needs")
    compiler = _Compiler(trace, fused)
    return compiler.compile(trace.events[begin:end], added, overlapped or {}, awaited or {}, waits=waits)


class _Compiler:
    def __init__(self, trace: Trace, fused: Collection[str]) -> None:
        self._trace = trace
        self._fused = list_fused(trace, fused)
        self._owners = [innermost(scope) for scope in trace.scopes()]
        self._launches: dict[Launch, int] = {}
        self._unknown: Counter[str] = Counter()
        self._bytes_only: Counter[str] = Counter()
        self._items: list[Item] = []
        self._run: list[int] = []
        self._writers: dict[int, int] = {}  # storage → outstanding collective
        self._reductions: set[int] = set()  # of FSDP2, and collectives that send their results
        self._last_reduction: int | None = None
        self._collectives = 0
        self._delayed: list[Call] = []  # until the kernel of a fused module
        self._overlapped: list[int] = []  # collectives that the end of the pass waits for
        self._last_gather: dict[str, int] = {}
        self._group: _Group | None = None
        self._created: set[int] = set()  # storages of the optimizer's state
        self._position = 0  # of the event in the pass
        self._last_read: dict[int, int] = {}

    def compile(
        self,
        events: Sequence[Event],
        added: Sequence[Call],
        overlapped: Mapping[int, Sequence[Call]],
        awaited: Mapping[int, Sequence[Wait]],
        *,
        waits: bool,
    ) -> Program:
        for position, event in enumerate(events):
            if event.kind == "op":
                self._last_read.update(dict.fromkeys(event.reads, position))
        self._delayed += overlapped.get(0, ())
        for self._position, event in enumerate(events):
            for wait in awaited.get(self._position, ()):
                self._add_item(wait)
            if event.kind == "op":
                self._add_op(event)
            self._delayed += overlapped.get(self._position + 1, ())
            if self._delayed and self._group is None:
                self._add_delayed()
        self._end_group()
        self._add_delayed()
        self._end_run()
        if waits:
            self._items += map(Wait, self._overlapped)
        self._add_calls(added)
        return Program(tuple(self._items), tuple(self._launches), dict(self._unknown), dict(self._bytes_only))

    def _add_op(self, event: Event) -> None:
        signature = self._trace.signatures[event.item]
        call = collective_of(signature)
        if call is not None:
            self._end_group()
            self._add_collective(event, call)
            return
        moved = any(storage not in event.reads for storage in event.writes) if event.writes else None
        kernel = kernel_of(signature, moved)
        if kernel is None or signature.packet in _ON_STREAM_OF_GATHER:
            return
        if event.phase == "optimizer" and self._is_of_first_step(event, signature.packet):
            return
        launch = Launch(kernel, event.phase, self._owners[event.stack], signature.packet)
        self._count_unknown(launch)
        reduction = self._reduction_of(event)
        if reduction is not None:
            self._writers.update(dict.fromkeys(event.writes, reduction))
            if kernel != UNKNOWN:
                self._end_group()
                self._end_run()
                self._items.append(StreamRun(reduction, self._launches.setdefault(launch, len(self._launches))))
            return
        self._wait_for(event)
        if kernel == UNKNOWN:
            return
        module = self._fused[event.stack] if kernel.kind == "memory" else None
        if self._group is not None and (module != self._group.module or event.phase != self._group.phase):
            self._end_group()
        if module is None:
            self._launch(launch)
            return
        if self._group is None:
            self._group = _Group(module, event.phase, kernel.dtype, self._trace)
        self._group.add(event, self._position)

    def _is_of_first_step(self, event: Event, packet: str) -> bool:
        """Return whether an op of an optimizer allocates its state, or fills it right after."""
        if packet in _FIRST_STEP:
            self._created.update(event.writes)
            return True
        # The destination comes first.
        fills = packet in _FIRST_COPIES and not self._created.isdisjoint(event.reads[:1])
        if fills:
            self._created.difference_update(event.reads)
        return fills

    def _count_unknown(self, launch: Launch) -> None:
        if launch.kernel == UNKNOWN:
            self._unknown[launch.op] += 1
        elif launch.kernel.bytes_only:
            self._bytes_only[launch.op] += 1

    def _launch(self, launch: Launch) -> None:
        self._run.append(self._launches.setdefault(launch, len(self._launches)))

    def _reduction_of(self, event: Event) -> int | None:
        """Return the reduction of FSDP2 whose result an op of a backward pass reads, None if it reads none."""
        if event.phase == "optimizer" or not self._reductions:
            return None
        return max(self._reductions.intersection(map(self._writers.get, event.reads)), default=None)

    def _end_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            kernel = Kernel("memory", 0, group.nbytes(self._last_read), group.dtype)
            self._launch(Launch(kernel, group.phase, group.module, "fused"))
            self._add_delayed()

    def _add_item(self, item: Item) -> None:
        self._end_group()
        self._end_run()
        self._items.append(item)

    def _end_run(self) -> None:
        if self._run:
            self._items.append(Run(tuple(self._run)))
            self._run = []

    def _wait_for(self, event: Event) -> None:
        if not self._writers:
            return
        for storage in (*event.reads, *event.writes):
            number = self._writers.get(storage)
            if number is not None:
                self._add_item(Wait(number))
                self._writers = {key: value for key, value in self._writers.items() if value != number}

    def _add_delayed(self) -> None:
        delayed, self._delayed, first = self._delayed, [], self._collectives
        self._add_calls(delayed, waits=False)
        self._overlapped += range(first, self._collectives)

    def _add_calls(self, calls: Sequence[Call], *, waits: bool = True) -> None:
        """Add calls that were not run; with `waits` later items wait for each collective."""
        for signature, phase, times in calls:
            call = collective_of(signature)
            kernel = kernel_of(signature) if call is None else None
            for _ in range(times):
                if kernel is not None:
                    launch = Launch(kernel, phase, "", signature.packet)
                    self._count_unknown(launch)
                    if kernel != UNKNOWN:
                        self._launch(launch)
                elif call is not None and call.collective not in _POINT_TO_POINT:
                    self._end_run()
                    number = self._next_collective()
                    self._items.append(Collective(number, call, phase, "", None))
                    self._items += [Wait(number)] if waits else []
        if waits:
            self._end_run()

    def _next_collective(self) -> int:
        self._collectives += 1
        return self._collectives - 1

    def _add_collective(self, event: Event, call: CollectiveCall) -> None:
        after = self._reduction_of(event)
        if after is None:
            self._wait_for(event)
        self._end_run()
        number, packet = self._next_collective(), self._trace.signatures[event.item].packet
        is_reduction = packet == _REDUCTION
        if is_reduction:
            # FSDP2 keeps the input of one reduction at a time.
            self._items += [] if self._last_reduction is None else [Wait(self._last_reduction)]
            self._last_reduction = number
        if is_reduction or after is not None:
            self._reductions.add(number)
        gate = None
        # FSDP2 gathers with the op whose buffer it fills itself; other gathers send results of kernels.
        if packet == "c10d::_allgather_base_":
            gate = self._last_gather.get(str(call.group), -1)
            self._last_gather[str(call.group)] = number
        self._items.append(Collective(number, call, event.phase, self._owners[event.stack], gate, after))
        for storage in event.writes or event.reads:
            self._writers[storage] = number


class _Group:
    """Ops of one call of a fused module."""

    def __init__(self, module: str, phase: str, dtype: str, trace: Trace) -> None:
        self.module, self.phase, self.dtype = module, phase, dtype
        self._storages = trace.storages
        self._read: dict[int, None] = {}
        self._written: dict[int, None] = {}
        self._end = 0

    def add(self, event: Event, position: int) -> None:
        """Add an op, at its position among the events of the pass."""
        self._read.update((storage, None) for storage in event.reads if storage not in self._written)
        self._written.update(dict.fromkeys(event.writes))
        self._end = position

    def nbytes(self, last_read: Mapping[int, int]) -> int:
        """Return the bytes that one kernel reads, and writes for ops after it."""
        written = [storage for storage in self._written if last_read.get(storage, -1) > self._end]
        return sum(self._storages[storage].nbytes for storage in (*self._read, *written))
