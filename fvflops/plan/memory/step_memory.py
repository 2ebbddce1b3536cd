"""Memory of a rank's training step: a walk over its actions, which repeat the allocations and frees of their passes."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

from fvflops.plan.memory.storage_lifetimes import Block, MemoryTimeline
from fvflops.plan.rank_step import Action, RankStep
from fvflops.plan.sharding.replicas import GATHERING, count_padding
from fvflops.text import shown_by_fields
from fvflops.trace import Event

_BEFORE = -1  # event index of blocks that exist before the step


class _Likeness(NamedTuple):
    """Key of interchangeable blocks: any of them may be freed in place of another."""

    kind: str
    module: str
    op: str
    nbytes: int


@shown_by_fields
class ActionMemory(NamedTuple):
    """The bytes that a rank has allocated before an action, at its peak, and after it."""

    action: Action
    before: int
    peak: int
    after: int


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The memory of a rank's step.

    `timeline` has the events of the step's actions in order, once for actions that repeat an earlier one with as much
    memory allocated. `actions` has each action.
    """

    timeline: MemoryTimeline
    actions: tuple[ActionMemory, ...]


class _PassMemory(NamedTuple):
    """Blocks that a pass allocates and frees, keeps, or frees, with numbers of `_Likeness`; events count from 0."""

    events: Sequence[Event]
    within: tuple[Block, ...]
    kept: tuple[tuple[Block, int], ...]
    freed: tuple[tuple[int, Block, int], ...]
    peak: int  # bytes more than before it
    change: int


def walk_step(timeline: MemoryTimeline, step: RankStep) -> StepMemory:
    """Return the memory of a step, by replaying the `timeline` of its recording."""
    alike: dict[_Likeness, int] = {}
    passes = _read_passes(timeline, {(item.begin, item.end) for item in step.passes.values()}, alike)
    before = [block for block in timeline.blocks if block.begin == _BEFORE]
    walk = _Walk([(block, _number(block, alike)) for block in before], alike)
    actions, seen, now = [], set(), timeline.baseline
    for action in step.actions:
        key = step.passes[action].begin, step.passes[action].end
        item, state = passes[key], (walk.state(), key)
        walk.run(item, shown=state not in seen)
        seen.add(state)
        actions.append(ActionMemory(action, now, now + item.peak, now + item.change))
        now += item.change
    trace = replace(timeline.trace, events=walk.events)
    return StepMemory(replace(timeline, blocks=tuple(walk.blocks()), trace=trace), tuple(actions))


class _Walk:
    def __init__(self, before: Iterable[tuple[Block, int]], alike: Sized) -> None:
        self.events: list[Event] = []
        self._ended: list[Block] = []
        self._alive: dict[int, deque[Block]] = {}
        self._changes = [0] * len(alike)  # of the number of live blocks, since the step's begin
        for block, number in before:
            self._alive.setdefault(number, deque()).append(block)

    def state(self) -> tuple[int, ...]:
        """Return the key of the live blocks before an action."""
        return tuple(self._changes)

    def run(self, item: _PassMemory, *, shown: bool) -> None:
        """Repeat a pass; if it is not `shown`, it takes no events."""
        start = len(self.events)
        if shown:
            self.events += item.events
            self._ended += [
                Block(storage, nbytes, kind, module, op, start + begin, start + end)
                for storage, nbytes, kind, module, op, begin, end in item.within
                if end is not None
            ]
        # Before `kept`: a pass frees its own blocks only as `within`.
        freed = [(start + at * shown, self._take(block, number)) for at, block, number in item.freed]
        self._ended += [Block(*block[:-1], at) for at, block in freed if block is not None and block.begin < at]
        for block, number in item.kept:
            begin = start + block.begin * shown
            self._alive.setdefault(number, deque()).append(Block(*block[:-2], begin, None))
            self._changes[number] += 1

    def blocks(self) -> list[Block]:
        return [*self._ended, *(block for alive in self._alive.values() for block in alive)]

    def _take(self, block: Block, number: int) -> Block | None:
        """Remove and return the oldest block that is alive and like one that a pass freed.

        None if there is none: FSDP2 keeps the buffers of a collective until the next one, and in another order of
        actions than the recorded one others come before.
        """
        alive = self._alive.get(number)
        if not alive:
            if block.kind != "communication":
                raise RuntimeError(f"the step frees {block}, but holds nothing like it")
            return None
        self._changes[number] -= 1
        return alive.popleft()


def _number(block: Block, alike: dict[_Likeness, int]) -> int:
    return alike.setdefault(_Likeness(block.kind, block.module, block.op, block.nbytes), len(alike))


def _read_passes(
    timeline: MemoryTimeline, ranges: Iterable[tuple[int, int]], alike: dict[_Likeness, int]
) -> dict[tuple[int, int], _PassMemory]:
    """Return the memory of each pass; `ranges` are its events, which do not overlap; number blocks in `alike`."""
    events = tuple(timeline.trace.events or ())
    passes = sorted(ranges)
    begins = [begin for begin, _ in passes]
    within: dict[tuple[int, int], list[Block]] = {key: [] for key in passes}
    kept: dict[tuple[int, int], list[tuple[Block, int]]] = {key: [] for key in passes}
    freed: dict[tuple[int, int], list[tuple[int, Block, int]]] = {key: [] for key in passes}

    def find(event: int | None) -> tuple[int, int] | None:
        """Return the pass of an event, None for one of no pass."""
        index = -1 if event is None else bisect_right(begins, event) - 1
        return passes[index] if index >= 0 and event is not None and event < passes[index][1] else None

    for block in timeline.blocks:
        created, ended = find(block.begin), find(block.end)
        if created is not None and block.end is not None and block.end <= created[1]:
            within[created].append(block._replace(begin=block.begin - created[0], end=block.end - created[0]))
            continue
        if block.begin != _BEFORE:
            block = block._replace(kind=_kind_of_kept(block.kind, events[block.begin].phase))
        number = _number(block, alike)
        if created is not None:
            kept[created].append((block._replace(begin=block.begin - created[0], end=None), number))
        if ended is not None and block.end is not None:
            freed[ended].append((block.end - ended[0], block, number))
    found = {}
    for key in passes:
        blocks = tuple(within[key]), tuple(kept[key]), tuple(freed[key])
        found[key] = _PassMemory(events[slice(*key)], *blocks, *_measure(key[1] - key[0], *blocks))
    return found


def _kind_of_kept(kind: str, phase: str) -> str:
    """Return the kind of a block alive after the action that allocates it, whatever was recorded next."""
    kept = {"forward": "activation", "backward": "gradient"}.get(phase, kind)
    return kept if kind in ("temporary", "activation", "input") else kind


def _measure(
    length: int, within: Iterable[Block], kept: Iterable[tuple[Block, int]], freed: Iterable[tuple[int, Block, int]]
) -> tuple[int, int]:
    """Return the highest and the last value of the bytes that a pass has allocated more than there were before it."""
    changes = [0] * (length + 1)
    for block in within:
        changes[block.begin] += block.nbytes
        changes[block.end or 0] -= block.nbytes
    for block, _ in kept:
        changes[block.begin] += block.nbytes
    for at, block, _ in freed:
        changes[at] -= block.nbytes
    level = highest = 0
    for change in changes[:-1]:
        level += change
        highest = max(highest, level)
    return highest, level + changes[-1]


def add_buckets(timeline: MemoryTimeline, step: RankStep) -> MemoryTimeline:
    """Return the timeline of a recording with the buffers in which replicas reduce gradients, if there are any.

    DistributedDataParallel's buckets are a copy of all gradients (gradient_as_bucket_view=False, the default). A
    sharded optimizer pads the buffers of accumulated gradients and of parameters.
    """
    padding = [
        Block(None, nbytes, kind, "", "", _BEFORE, None)
        for action, item in step.passes.items()
        for action_kind, kind in (("reduce_scatter", "gradient"), (GATHERING, "parameter"))
        if action.kind == action_kind and (nbytes := count_padding(item.gradients))
    ]
    if not _averages(step):
        return replace(timeline, blocks=(*timeline.blocks, *padding)) if padding else timeline
    # Accumulated gradients are alive at the end; gradient buckets owned by the optimizer exist before the step.
    buckets = [
        block._replace(storage=None, kind="communication", op="", begin=-1)
        for block in timeline.blocks
        if block.kind == "gradient" and block.end is None and block.begin >= 0
    ]
    return replace(timeline, blocks=(*timeline.blocks, *buckets))


def describe_estimated(step: RankStep, *, has_buffers: bool = False) -> Iterator[str]:
    """Yield one line for each part of a step's memory that was not recorded; `has_buffers`: of gradients.

    Microbatches in flight that were not recorded have activations like the recorded one's.
    """
    if _averages(step) and not has_buffers:
        yield "DDP buckets, as large as the gradients"
    changes = ((item.kind == "forward") - (item.kind in ("backward", "weight_backward")) for item in step.actions)
    in_flight = max(accumulate(changes), default=1)
    if in_flight > 1:
        yield f"activations of {in_flight} microbatches in flight (schedule {step.schedule})"


def _averages(step: RankStep) -> bool:
    return any(action.kind == "allreduce" for action in step.actions)
