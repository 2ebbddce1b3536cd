"""Whether a planned step fits a device: the predicted memory of each rank of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fvflops.features.memory.compute import MemoryTimeline
from fvflops.features.memory.fit import MemoryFit
from fvflops.features.memory.report import MemoryPrediction
from fvflops.features.planning.plan import RankPlan
from fvflops.features.utilisation.devices import Device
from fvflops.units import format_bytes


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The predicted memory of a rank: bytes at the peak, by kind, and over its recorded passes."""

    plan: RankPlan
    peak: int
    by_kind: dict[str, int]
    timeline: MemoryPrediction


def read_memories(plans: Sequence[RankPlan]) -> list[RankMemory]:
    """Return the memory of each rank, one prediction for ranks that hold the same."""
    memories: list[RankMemory] = []
    known: dict[tuple[int, object], MemoryPrediction] = {}
    recordings: dict[tuple[int, int], MemoryTimeline] = {}
    for plan in plans:
        recorded = id(plan.recorded.events)
        key = recorded, tuple(plan.step.passes[action].begin for action in plan.step.actions)
        timeline = known.get(key)
        if timeline is None:
            part = recorded, plan.step.recorded_events
            if part not in recordings:
                recordings[part] = plan.recorded_memory()
            timeline = known[key] = plan.memory_of_step(recordings[part])
        memories.append(RankMemory(plan, timeline.peak, dict(timeline.at_peak().by_kind.most_common()), timeline))
    return memories


def describe_fit(nbytes: int, device: Device, *, advice: str = "") -> str:
    """Return whether a peak of `nbytes` fits a device, and by how much it does or not; then follows the advice.

    >>> from fvflops import find_device
    >>> describe_fit(92_300_000_000, find_device("H100"))
    'Does not fit: 92.3 GB is 12.3 GB more than the 80 GB of H100 SXM.'
    """
    peak = format_bytes(nbytes)
    if device.memory is None:
        return f"Predicted peak: {peak}. The memory of {device.name} is not known: give it in a file of devices."
    fit = MemoryFit(device.name, int(device.memory), nbytes)
    return " ".join(filter(None, [*fit.describe(), "" if fit else advice]))
