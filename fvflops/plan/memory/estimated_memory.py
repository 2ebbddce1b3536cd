"""Memory of a rank's step that does not follow from what its passes allocated and freed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from fvflops.plan.memory.storage_lifetimes import MemoryTimeline
from fvflops.plan.rank_step import Action, RankStep


@dataclass(frozen=True, slots=True)
class EstimatedMemory:
    """What a rank holds in a step besides what was recorded.

    `buckets`: DistributedDataParallel's buckets, one copy of all gradients (gradient_as_bucket_view=False, the
    default). `in_flight` is the highest number of microbatches with activations, of which those that were not recorded
    have activations like the recorded one's.
    """

    buckets: bool = False
    in_flight: int = 1
    schedule: str = ""

    def describe(self) -> Iterator[str]:
        """Yield one line for each part that is added."""
        if self.buckets:
            yield "DDP buckets, as large as the gradients"
        if self.in_flight > 1:
            yield f"activations of {self.in_flight} microbatches in flight (schedule {self.schedule})"

    def added_to(self, timeline: MemoryTimeline) -> MemoryTimeline:
        """Return the timeline of a recording with the buckets.

        >>> from fvflops import TrainingStepAnalysis, predict_memory
        >>> import torch
        >>> step = TrainingStepAnalysis(torch.nn.Linear(8, 8), torch.ones(4, 8), loss=torch.sum)
        >>> plain = predict_memory(step)
        >>> EstimatedMemory(buckets=True).added_to(plain).peak - plain.peak
        288
        """
        if not self.buckets:
            return timeline
        # Accumulated gradients are alive at the end; gradient buckets owned by the optimizer exist before the step.
        buckets = [
            block._replace(storage=None, kind="communication", op="", begin=-1)
            for block in timeline.blocks
            if block.kind == "gradient" and block.end is None and block.begin >= 0
        ]
        return replace(timeline, blocks=(*timeline.blocks, *buckets))


def estimate_memory(step: RankStep) -> EstimatedMemory:
    """Return the memory that a step has besides what was recorded of it."""
    buckets = any(action.kind == "allreduce" for action in step.actions)
    return EstimatedMemory(buckets, max(_in_flight(step.actions), default=1), step.schedule)


def _in_flight(actions: Iterable[Action]) -> Iterator[int]:
    """Yield after each action the number of microbatches with activations, summed over the rank's stages."""
    now = 0
    for action in actions:
        now += (action.kind == "forward") - (action.kind in ("backward", "weight_backward"))
        yield now
