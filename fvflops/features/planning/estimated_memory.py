"""Memory of a rank that is estimated, not recorded, and added to a timeline."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from fvflops.features.memory.compute import Block, MemoryTimeline
from fvflops.features.planning.rank_step import Action, RankStep


class Held(NamedTuple):
    """Activations of microbatches that were not run, during the events from `since` up to `until`.

    Each of the `copies` holds what the forward pass from `begin` up to `end` leaves alive.
    """

    begin: int
    end: int
    copies: int
    since: int
    until: int


@dataclass(frozen=True, slots=True)
class EstimatedMemory:
    """What a rank holds in a step besides what was recorded.

    `buckets`: DistributedDataParallel's buckets, one copy of all gradients (gradient_as_bucket_view=False, the
    default). `held`: activations of more microbatches than were recorded at once, of which the schedule has at most
    `in_flight`. `backward` are the slices of backward passes: what one leaves for later, such as unsharded gradients
    that FSDP2 accumulates, are gradients.
    """

    buckets: bool = False
    in_flight: int = 1
    held: tuple[Held, ...] = ()
    schedule: str = ""
    backward: tuple[tuple[int, int], ...] = ()

    def describe(self) -> Iterator[str]:
        """Yield one line for each part that is added."""
        if self.buckets:
            yield "DDP buckets, as large as the gradients"
        if self.held:
            yield f"activations of {self.in_flight} microbatches in flight (schedule {self.schedule})"

    def added_to(self, timeline: MemoryTimeline) -> MemoryTimeline:
        """Return a timeline with these parts.

        >>> from fvflops import TrainingStepAnalysis, predict_memory
        >>> import torch
        >>> step = TrainingStepAnalysis(torch.nn.Linear(8, 8), torch.ones(4, 8), loss=torch.sum)
        >>> plain = predict_memory(step)
        >>> EstimatedMemory(buckets=True).added_to(plain).peak - plain.peak
        288
        """
        estimated: list[Block] = []
        for block in timeline.blocks:
            if block.kind == "gradient" and self.buckets:
                estimated.append(block._replace(storage=None, kind="communication", op="", begin=-1, end=None))
            for held in self.held if block.kind == "activation" else ():
                if held.begin <= block.begin < held.end and (block.end is None or held.end < block.end):
                    estimated.append(
                        block._replace(
                            storage=None, nbytes=held.copies * block.nbytes, begin=held.since, end=held.until
                        )
                    )
        return replace(timeline, blocks=(*map(self._name_gradient, timeline.blocks), *estimated))

    def _name_gradient(self, block: Block) -> Block:
        if block.kind != "temporary" or block.end is None:
            return block
        leaves = any(begin <= block.begin < end < block.end for begin, end in self.backward)
        return block._replace(kind="gradient") if leaves else block


def estimate_memory(step: RankStep, run: Sequence[tuple[int, Action]], *, buckets: bool) -> EstimatedMemory:
    """Return the memory that a step has besides what was recorded of it; `run` is all that was run, as in Recording."""
    begins = [begin for begin, _ in run]
    run_in_flight = _in_flight([action for _, action in run])
    in_flight = _in_flight(step.actions)
    most: dict[tuple[int, int], Counter[int]] = {}
    for action, counts in zip(step.actions, in_flight, strict=False):
        item = step.passes[action]
        at = item.begin, item.end
        missing = counts - run_in_flight[bisect_left(begins, item.begin)]  # only positive ones
        if missing.total() > most.get(at, Counter()).total():
            most[at] = missing
    forward = {action.stage: step.passes[action] for action in step.actions if action.kind == "forward"}
    held = [
        Held(forward[stage].begin, forward[stage].end, copies, *at)
        for at, missing in most.items()
        for stage, copies in missing.items()
    ]
    slices = {
        (item.begin, item.end) for action, item in step.passes.items() if action.kind in ("backward", "weight_backward")
    }
    most_in_flight = max(counts.total() for counts in in_flight)
    return EstimatedMemory(buckets, most_in_flight, tuple(held), step.schedule, tuple(sorted(slices)))


def _in_flight(actions: Iterable[Action]) -> list[Counter[int]]:
    """Return before each action, and after the last, the number of microbatches with activations by stage."""
    now: Counter[int] = Counter()
    counts = [Counter(now)]
    for action in actions:
        if action.kind == "forward":
            now[action.stage] += 1
        elif action.kind in ("backward", "weight_backward"):
            now[action.stage] -= 1
        counts.append(Counter(now))
    return counts
