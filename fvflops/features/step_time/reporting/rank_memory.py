"""The predicted memory of each rank of a pipeline, and what torch's allocator reserves for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fvflops.features.memory.allocator import reserved_memory
from fvflops.features.memory.compute import MemoryTimeline
from fvflops.features.memory.report import MemoryPrediction
from fvflops.features.planning.plan import RankPlan


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The predicted memory of a rank: bytes of tensors at the peak, by kind, and over its recorded passes.

    `reserved` is what torch's allocator reserves for them with expandable segments.
    """

    plan: RankPlan
    peak: int
    reserved: int
    by_kind: dict[str, int]
    timeline: MemoryPrediction


def read_memories(plans: Sequence[RankPlan]) -> list[RankMemory]:
    """Return the memory of each rank, one prediction for ranks that hold the same."""
    memories: list[RankMemory] = []
    known: dict[tuple[int, object], tuple[MemoryPrediction, int]] = {}
    recordings: dict[tuple[int, int], MemoryTimeline] = {}
    for plan in plans:
        recorded = id(plan.recorded.events)
        key = recorded, tuple(plan.step.passes[action].begin for action in plan.step.actions)
        if key not in known:
            part = recorded, plan.step.recorded_events
            if part not in recordings:
                recordings[part] = plan.recorded_memory()
            timeline = plan.memory_of_step(recordings[part])
            known[key] = timeline, reserved_memory(timeline, expandable_segments=True).peak
        timeline, reserved = known[key]
        by_kind = dict(timeline.at_peak().by_kind.most_common())
        memories.append(RankMemory(plan, timeline.peak, reserved, by_kind, timeline))
    return memories
