"""Memory of a rank that is estimated, not recorded, and added to a timeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fvflops.features.memory.compute import Block, MemoryTimeline


@dataclass(frozen=True, slots=True)
class EstimatedMemory:
    """What a rank holds in a step besides what one recorded microbatch does.

    `buckets`: DistributedDataParallel's buckets, one copy of all gradients (gradient_as_bucket_view=False, the
    default). `in_flight` is the number of microbatches whose activations are alive at once: in the schedule 1F1B, at
    most one for this and each later stage. `accumulates`: the gradients of earlier microbatches exist from the start.
    """

    buckets: bool = False
    in_flight: int = 1
    accumulates: bool = False

    def describe(self) -> Iterator[str]:
        """Yield one line for each part that is added."""
        if self.buckets:
            yield "DDP buckets, as large as the gradients"
        if self.in_flight > 1:
            yield f"activations of {self.in_flight} microbatches in flight (schedule 1F1B)"
        if self.accumulates:
            yield "gradients of earlier microbatches, to which those of one parameter at a time are added"

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
        recorded: list[Block] = []
        gradients = [block for block in timeline.blocks if block.kind == "gradient"]
        first = _first_backward(timeline)
        for block in timeline.blocks:
            held = block._replace(storage=None, begin=-1, end=None)
            if block.kind == "activation" and block.begin < first and (block.end is None or first < block.end):
                estimated.append(held._replace(nbytes=(self.in_flight - 1) * block.nbytes))
            if block.kind == "gradient" and self.accumulates:
                estimated.append(held)
                block = block._replace(kind="temporary", end=block.begin + 1)
            recorded.append(block)
        if self.buckets:
            estimated += [
                block._replace(storage=None, kind="communication", op="", begin=-1, end=None) for block in gradients
            ]
        return replace(timeline, blocks=(*recorded, *(block for block in estimated if block.nbytes)))


def _first_backward(timeline: MemoryTimeline) -> int:
    events = timeline.trace.events or ()
    phases = (index for index, event in enumerate(events) if event.kind == "op" and event.phase == "backward")
    return next(phases, len(events))
