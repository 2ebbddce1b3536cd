"""The simulated ranks of a pipeline as a picture: a lane for each, with its actions over time."""

from __future__ import annotations

from collections.abc import Sequence

from fvflops.plan.rank_plan import RankPlan
from fvflops.plan.step_time.schedule_simulation import Span
from fvflops.plan.step_time.step_estimate import StepEstimate
from fvflops.reports.document import Gantt, Slice
from fvflops.units import format_seconds

# Kind of action → its name in the legend.
KINDS = {
    "forward": "forward",
    "backward": "backward",
    "input_backward": "backward of inputs",
    "weight_backward": "backward of weights",
    "optimizer": "optimizer",
    "unshard": "gather parameters",
    "reshard": "free parameters",
    "reduce": "reduce gradients",
    "allreduce": "all-reduce gradients",
    "tied_allreduce": "all-reduce tied gradients",
}


def pipeline_picture(estimate: StepEstimate) -> Gantt:
    """Return the chart of the actions of each pipeline rank; the labels are numbers of microbatches."""
    lanes = {
        name_of(plan): [_make_slice(span, plan.step.stages) for span in spans]
        for plan, spans in zip(estimate.plans, estimate.simulation.spans, strict=True)
    }
    stages = max(len(plan.step.stages) for plan in estimate.plans)
    notes = ["Later stages of a rank are paler, in text in lower case."] if stages > 1 else []
    notes += [f"Not drawn: {format_seconds(estimate.between)} between steps."] if estimate.between else []
    waiting = "waiting for other stages, or sending" if len(lanes) > 1 else "waiting"
    title, length = "Ranks of the pipeline over a step", estimate.simulation.seconds
    return Gantt("pipeline", lanes, KINDS, title, waiting, notes=notes, length=length)


def name_of(plan: RankPlan) -> str:
    """Return the name of a rank: its index along the pipeline, or its number without one."""
    return f"pp {plan.coordinates['pp']}" if "pp" in plan.coordinates else f"rank {plan.rank}"


def describe_span(span: Span) -> str:
    """Return what a span is.

    >>> describe_span(Span("forward", 3, 0, 0.0, 1.0)), describe_span(Span("optimizer", -1, -1, 0.0, 1.0))
    ('forward, stage 3, microbatch 0', 'optimizer')
    """
    parts = [KINDS.get(span.kind, span.kind)]
    parts += [f"stage {span.stage}"] if span.stage >= 0 else []
    parts += [f"microbatch {span.microbatch}"] if span.microbatch >= 0 else []
    return ", ".join(parts)


def _make_slice(span: Span, stages: Sequence[int]) -> Slice:
    label = str(span.microbatch) if span.microbatch >= 0 else ""
    shade = stages.index(span.stage) if span.stage in stages else 0
    return Slice(span.kind, span.start, span.end, label, describe_span(span), shade)
