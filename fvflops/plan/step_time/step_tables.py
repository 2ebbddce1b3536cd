"""An estimated step as exact data, and its tables: time of kernels by module, and predicted memory by rank."""

from __future__ import annotations

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
from fvflops.text import record_data
from fvflops.trace import Summary
from fvflops.trace.module_tree import modules_above
from fvflops.trace.run_notes import reads_of
from fvflops.units import format_quantity, format_seconds, format_share
from fvflops.views.summary_rows import depth_of

_DEPTH = 3  # levels below the root that are shown by default
_LEAST = 0.01  # share of the kernels' time
# Figures in JSON.
_OF_STEP = (
    *("device=device.name", "device_memory=device.memory", "efficiency", "network", "seconds", "bound_seconds=bound"),
    *("samples", "tokens", "tokens_per_second", "samples_per_second", "model_flops_per_gpu=model_flops"),
    *("model_flops_per_second_per_gpu=model_flops_per_second", "mfu", "hfu"),
    *("bubble_share", "exposed_share", "host_bound_share"),
)
_OF_SLOWEST = (
    *("kernels", "kernels_by_phase=by_phase", "kernels_by_module=by_module", "exposed", "communication"),
    *("launching", "sending", "bubble", "between"),
)
_OF_TRAINING = (
    *("tokens", "steps", "seconds", "days", "gpu_hours", "price_per_gpu_hour=price", "cost"),
    *("watts_per_gpu=watts", "energy_kwh=energy"),
)
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
    ranks = [
        {
            **record_data(memory.plan, "rank", "coordinates", "stages=step.stages", "parameters"),
            "actions": sum(span.end - span.start for span in spans),
            **record_data(memory, "peak_memory=peak", "reserved_memory=reserved", "memory_by_kind=by_kind"),
        }
        for memory, spans in zip(memories, estimate.simulation.spans, strict=True)
    ]
    return {
        **record_data(first, "mesh", "gpus=world", "inputs=trace.info.inputs", "schedule=step.schedule"),
        **record_data(estimate, *_OF_STEP),
        "model_parameters": first.model_parameters,
        "slowest": estimate.slowest,
        "fullest": fullest,
        "slowest_rank": record_data(estimate, *_OF_SLOWEST),
        "ranks": ranks,
        "training": None if cost is None else record_data(cost, *_OF_TRAINING),
        **record_data(first, "estimated=derived", "left_out"),
        **record_data(estimate, "unknown_time=unknown", "time_of_bytes_only=bytes_only", "assumptions"),
        **reads_of(first.trace.info),
    }
