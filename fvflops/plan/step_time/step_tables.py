"""An estimated step as exact data, and its tables: time of kernels by module, and predicted memory by rank."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fvflops.plan.memory.cuda_allocator import reserved_memory
from fvflops.plan.memory.memory_report import MemoryPrediction
from fvflops.plan.memory.storage_lifetimes import MemoryTimeline
from fvflops.plan.rank_plan import RankPlan
from fvflops.plan.step_time.pipeline_picture import name_of
from fvflops.plan.step_time.step_estimate import StepEstimate, TrainingCost
from fvflops.reports.document import Table, module_column, number_column
from fvflops.reports.terminal.collapse import collapse, collapse_note
from fvflops.trace import Summary
from fvflops.trace.module_tree import modules_above
from fvflops.trace.run_notes import reads_of
from fvflops.units import format_quantity, format_seconds, format_share
from fvflops.views.summary_rows import depth_of

_DEPTH = 3  # levels below the root that are shown by default
_LEAST = 0.01  # share of the kernels' time
_SCALE = 10**12  # counts of a Summary are integers: picoseconds


def module_table(
    estimate: StepEstimate, *, depth: int | None = None, sort: str | None = None, top: int | None = None
) -> Table:
    """Return the time of the slowest rank's kernels by module, its submodules included.

    By default modules with at least 1 % of it are shown, down to a depth of 3 below a stage.
    """
    plan = estimate.plans[estimate.slowest]
    summary = collapse(_summarise(estimate))
    picoseconds = summary.columns["time"]
    total = picoseconds.get("", 0) or 1
    limit = (_DEPTH + (len(plan.step.stages) > 1)) if depth is None else depth
    names = [module.name for module in summary.modules.modules() if picoseconds.get(module.name)]
    least = 0 if depth is not None or sort is not None or top is not None else _LEAST
    shown = [name for name in names if depth_of(name) <= limit and picoseconds[name] >= least * total]
    rows = [(summary.labels.get(name, name), picoseconds[name] / _SCALE, picoseconds[name] / total) for name in shown]
    columns = (
        module_column(),
        number_column("seconds", "kernels", form=format_seconds),
        number_column("share", "of kernels", form=format_share),
    )
    notes = collapse_note(summary, shown)
    if len(plan.mesh) > 1 and plan.mesh.get("pp", 1) > 1:
        notes.append("Layers are numbered within a stage.")
    if len(shown) < len(names):
        notes.append(f"{format_quantity(len(names) - len(shown), 'smaller or deeper module')} not shown.")
    title = f"Kernels of the slowest rank, {name_of(plan)}, by module"
    return Table("modules", columns, rows, title=title, notes=notes, noun="module", summed="").ranked(
        sort=sort, top=top
    )


def _summarise(estimate: StepEstimate) -> Summary:
    """Return the picoseconds of kernels by module, with its submodules."""
    tree = estimate.plans[estimate.slowest].recorded.modules
    picoseconds = Counter[str]()
    for module, seconds in estimate.by_module.items():
        # The root comes last of the modules above.
        picoseconds.update(dict.fromkeys({"", *modules_above(module), module}, round(seconds * _SCALE)))
    unknown = [name for name in estimate.by_module if name not in tree.by_name]
    return Summary(tree.with_pseudo_modules(unknown), {"time": picoseconds})


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


def encode(estimate: StepEstimate, memories: Sequence[RankMemory], cost: TrainingCost | None) -> dict[str, Any]:
    """Return all figures of an estimated step, times in seconds."""
    first = estimate.plans[0]
    fullest = max(range(len(memories)), key=lambda index: memories[index].reserved)
    network = estimate.network
    return {
        "mesh": dict(first.mesh),
        "gpus": estimate.gpus,
        "inputs": first.trace.info.inputs,
        "schedule": first.step.schedule,
        "device": estimate.device.name,
        "device_memory": estimate.device.memory,
        "efficiency": dataclasses.asdict(estimate.efficiency),
        "network": None if network is None else dataclasses.asdict(network),
        "seconds": estimate.seconds,
        "bound_seconds": estimate.bound,
        "samples": estimate.samples,
        "tokens": estimate.tokens,
        "tokens_per_second": estimate.tokens_per_second,
        "samples_per_second": estimate.samples_per_second,
        "model_flops_per_gpu": estimate.model_flops,
        "model_flops_per_second_per_gpu": estimate.model_flops_per_second,
        "mfu": estimate.mfu,
        "hfu": estimate.hfu,
        "bubble_share": estimate.bubble_share,
        "exposed_share": estimate.exposed_share,
        "host_bound_share": estimate.host_bound_share,
        "model_parameters": first.model_parameters,
        "slowest": estimate.slowest,
        "fullest": fullest,
        "slowest_rank": {
            "kernels": estimate.kernels,
            "kernels_by_phase": dict(estimate.by_phase),
            "kernels_by_module": dict(estimate.by_module),
            "exposed": dict(estimate.exposed),
            "communication": dict(estimate.communication),
            "launching": estimate.launching,
            "sending": estimate.sending,
            "bubble": estimate.bubble,
            "between": estimate.between,
        },
        "ranks": [
            {
                "rank": memory.plan.rank,
                "coordinates": dict(memory.plan.coordinates),
                "stages": list(memory.plan.step.stages),
                "parameters": memory.plan.parameters,
                "actions": sum(span.end - span.start for span in spans),
                "peak_memory": memory.peak,
                "reserved_memory": memory.reserved,
                "memory_by_kind": memory.by_kind,
            }
            for memory, spans in zip(memories, estimate.simulation.spans, strict=True)
        ],
        "training": None if cost is None else _encode_cost(cost),
        "estimated": list(first.derived),
        "left_out": list(first.left_out),
        "unknown_time": dict(estimate.unknown),
        "time_of_bytes_only": dict(estimate.bytes_only),
        "assumptions": list(estimate.assumptions),
        **reads_of(first.trace.info),
    }


def _encode_cost(cost: TrainingCost) -> dict[str, Any]:
    return {
        "tokens": cost.tokens,
        "steps": cost.steps,
        "seconds": cost.seconds,
        "days": cost.days,
        "gpu_hours": cost.gpu_hours,
        "price_per_gpu_hour": cost.price,
        "cost": cost.cost,
        "watts_per_gpu": cost.watts,
        "energy_kwh": cost.energy,
    }
