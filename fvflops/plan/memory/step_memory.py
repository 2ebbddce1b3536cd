"""Memory of a rank's training step: a walk over its actions, which repeat the allocations and frees of their passes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from fvflops.plan.memory.storage_lifetimes import Block, MemoryTimeline
from fvflops.plan.rank_step import Action, RankStep
from fvflops.plan.sharding.replicas import GATHERING, count_padding
from fvflops.text import shown_by_fields
from fvflops.trace import Event

_BEFORE = -1  # event index of blocks that exist before the step


# Kind, module, op and bytes of interchangeable blocks: any of them may be freed in place of another.
_Likeness = tuple[str, str, str, int]


@shown_by_fields
class ActionMemory(NamedTuple):
    """The bytes that a rank has allocated before an action, at its peak, and after it."""

    action: Action
    before: int
    peak: int
    after: int


@dataclass(slots=True)
class _PassMemory:
    """Blocks of a pass: `temporary`, `kept` after it, `freed` by it, with numbers of `_Likeness`; events from 0."""

    events: Sequence[Event]
    temporary: list[Block] = field(default_factory=list)
    kept: list[tuple[Block, int]] = field(default_factory=list)
    freed: list[tuple[int, Block, int]] = field(default_factory=list)

    def measure(self) -> tuple[int, int]:
        """Return the peak and the final change of the allocated bytes during a pass."""
        changes = [0] * (len(self.events) + 1)
        for block in self.temporary:
            changes[block.begin] += block.nbytes
            changes[block.end or 0] -= block.nbytes
        for block, _ in self.kept:
            changes[block.begin] += block.nbytes
        for at, block, _ in self.freed:
            changes[at] -= block.nbytes
        levels = list(accumulate(changes))
        return max([0, *levels[:-1]]), levels[-1]


def walk_step(timeline: MemoryTimeline, step: RankStep) -> tuple[MemoryTimeline, tuple[ActionMemory, ...]]:
    """Return the memory of a step, by replaying the `timeline` of its recording, and of each of its actions.

    The step's timeline has the events of the actions in order, once for actions that repeat an earlier one with as much
    memory allocated.
    """
    alike: dict[_Likeness, int] = {}
    passes = _read_passes(timeline, {(item.begin, item.end) for item in step.passes.values()}, alike)
    measured = {key: item.measure() for key, item in passes.items()}
    before = [block for block in timeline.blocks if block.begin == _BEFORE]
    walk = _Walk([(block, _number(block, alike)) for block in before], alike)
    actions, seen, now = [], set(), timeline.baseline
    for action in step.actions:
        key = step.passes[action].begin, step.passes[action].end
        state, (peak, change) = (walk.state(), key), measured[key]
        walk.run(passes[key], shown=state not in seen)
        seen.add(state)
        actions.append(ActionMemory(action, now, now + peak, now + change))
        now += change
    trace = replace(timeline.trace, events=walk.events)
    return replace(timeline, blocks=tuple(walk.blocks()), trace=trace), tuple(actions)


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
                for storage, nbytes, kind, module, op, begin, end in item.temporary
                if end is not None
            ]
        # Before `kept`: a pass frees its own blocks only as `temporary`.
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
    return alike.setdefault((block.kind, block.module, block.op, block.nbytes), len(alike))


def _read_passes(
    timeline: MemoryTimeline, ranges: Iterable[tuple[int, int]], alike: dict[_Likeness, int]
) -> dict[tuple[int, int], _PassMemory]:
    """Return the memory of each pass; `ranges` are its events, which do not overlap; number blocks in `alike`."""
    events, ordered = tuple(timeline.trace.events or ()), sorted(ranges)
    passes = {key: _PassMemory(events[slice(*key)]) for key in ordered}

    def find(event: int | None) -> tuple[int, _PassMemory] | None:
        """Return the first event of the pass of an event, and the pass, None for an event of no pass."""
        index = -1 if event is None else bisect_right(ordered, (event, math.inf)) - 1
        if index < 0 or event is None or event >= ordered[index][1]:
            return None
        return ordered[index][0], passes[ordered[index]]

    for block in timeline.blocks:
        created, ended = find(block.begin), find(block.end)
        if created is not None and block.end is not None and block.end <= created[0] + len(created[1].events):
            begin, item = created
            item.temporary.append(block._replace(begin=block.begin - begin, end=block.end - begin))
            continue
        if block.begin != _BEFORE:
            block = block._replace(kind=_kind_of_kept(block.kind, events[block.begin].phase))
        number = _number(block, alike)
        if created is not None:
            begin, item = created
            item.kept.append((block._replace(begin=block.begin - begin, end=None), number))
        if ended is not None and block.end is not None:
            begin, item = ended
            item.freed.append((block.end - begin, block, number))
    return passes


def _kind_of_kept(kind: str, phase: str) -> str:
    """Return the kind of a block alive after the action that allocates it, whatever was recorded next."""
    kept = {"forward": "activation", "backward": "gradient"}.get(phase, kind)
    return kept if kind in ("temporary", "activation", "input") else kind


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
