"""Memory of a rank that is estimated, not recorded, and added to a timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from fvflops.features.memory.compute import Block, MemoryTimeline
from fvflops.features.planning.rank_step import Action, Pass, RankStep


class Held(NamedTuple):
    """A recorded forward pass, the events from `begin` up to `end`, and how many more activations as its are alive."""

    begin: int
    end: int
    copies: int


@dataclass(frozen=True, slots=True)
class EstimatedMemory:
    """What a rank holds in a step besides what was recorded.

    `buckets`: DistributedDataParallel's buckets, one copy of all gradients (gradient_as_bucket_view=False, the
    default). `held` are the activations of microbatches that were not run, at the moment of the schedule when most
    are in flight, and `in_flight` is that number.
    """

    buckets: bool = False
    in_flight: int = 1
    held: tuple[Held, ...] = ()
    schedule: str = ""

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
            everywhere = block._replace(storage=None, begin=-1, end=None)
            if block.kind == "gradient" and self.buckets:
                estimated.append(everywhere._replace(kind="communication", op=""))
            for held in self.held:
                outlives = held.begin <= block.begin < held.end and (block.end is None or held.end < block.end)
                if block.kind == "activation" and outlives:
                    estimated.append(everywhere._replace(nbytes=held.copies * block.nbytes))
        return replace(timeline, blocks=(*timeline.blocks, *estimated))


def estimate_memory(step: RankStep, *, buckets: bool) -> EstimatedMemory:
    """Return the memory that a step has besides what was recorded of it."""
    in_flight = _most_in_flight(step.actions)
    recorded = _recorded_actions(step.passes)
    run = _most_in_flight(recorded)
    first = {action.stage: step.passes[action] for action in reversed(recorded) if action.kind == "forward"}
    held = tuple(
        Held(first[stage].begin, first[stage].end, count - run[stage])
        for stage, count in in_flight.items()
        if count > run[stage]
    )
    return EstimatedMemory(buckets, in_flight.total(), held, step.schedule)


def _most_in_flight(actions: Iterable[Action]) -> Counter[int]:
    """Return stage → number of its microbatches that have activations, at the moment when they are most."""
    now: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for action in actions:
        if action.kind == "forward":
            now[action.stage] += 1
            if now.total() > most.total():
                most = now.copy()
        elif action.kind in ("backward", "weight_backward"):
            now[action.stage] -= 1
    return most


def _recorded_actions(passes: Mapping[Action, Pass]) -> list[Action]:
    """Return one action of each pass, in the order in which they were recorded."""
    actions = {(item.begin, item.end): action for action, item in reversed(list(passes.items()))}
    return [actions[key] for key in sorted(actions)]
