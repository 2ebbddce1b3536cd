"""Report of one rank's training step: its compute, parameters and communication."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.formulas import FormulaTable, resolve_table
from fvflops.plan.communication import communication_parts
from fvflops.plan.memory.step_settings import Verdict, introduction
from fvflops.plan.rank_plan import RankPlan, StepPlan
from fvflops.reports.document import Document, Items, Part, Table, number_column, text_column
from fvflops.reports.escaping import list_ops, plain_name
from fvflops.text import record_data
from fvflops.trace import Status
from fvflops.trace.records import list_run_notes, reads_of
from fvflops.units import format_thousands


def plan_report(plan: RankPlan, table: FormulaTable | None = None, *, name: str = "", command: str = "") -> Document:
    """Return memory, FLOPs by a convention, parameters and communication of a rank; `name` is the model's."""
    table = resolve_table(plan.table) if table is None else table
    flops = plan.flops(table)
    mesh = ", ".join(f"{axis}={size}" for axis, size in plan.mesh.items())
    coordinates = ", ".join(f"{axis} {index}" for axis, index in plan.coordinates.items())
    rank = f"rank {format_thousands(plan.rank)} of {format_thousands(plan.world)} ({coordinates})"
    notes = list(list_run_notes(plan.trace.about, plain_name))
    notes += [f"Estimated: {rule}." for rule in plan.derived]
    notes += [f"Not included: {part}." for part in plan.left_out]
    notes += [f"{text}." for text in plan.describe_offload()]
    unsupported = dict(flops.counts().ledger()[Status.UNSUPPORTED].most_common())
    texts, about = introduction(_need(plan.memory().peak, plan.settings), plan.settings, command)
    parts: list[Part] = [
        *texts,
        f"Inputs of this rank: {plan.trace.about['inputs']}.",
        _list_costs(plan, flops, table.name),
        *([f"Unsupported, so not in the FLOPs: {list_ops(unsupported)}."] if unsupported else []),
        *communication_parts(plan.communication()),
        Items("", notes),
    ]
    title = f"{plain_name(name or plan.trace.modules.root.class_name)} on {mesh}: {rank}"
    return Document("plan", title, parts, main="communication", data=_encode(plan, flops, table.name), about=about)


def step_report(plan: StepPlan) -> Document:
    """Return a report of the costs of each rank of a pipeline, with FLOPs by the plan's convention."""
    first = plan.ranks[0]
    table = resolve_table(first.table)
    mesh = ", ".join(f"{axis}={size}" for axis, size in first.mesh.items())
    exact = {"parameters": "", "macs": "MACs", "payload": "payload (B)", "memory": "peak memory (B)"}
    figures = (number_column(key, heading, form=format_thousands) for key, heading in exact.items())
    columns = (number_column("rank"), text_column("stages"), *figures)
    rows = []
    for item in plan.ranks:
        macs, payload = item.flops(table).macs(), item.communication().total().payload
        stages = ", ".join(map(str, item.step.stages))
        rows.append((item.rank, stages, item.parameters, macs, payload, item.memory().peak))
    notes = [note for item in plan.ranks for note in list_run_notes(item.trace.about, plain_name)]
    notes += [f"Estimated: {rule}." for item in plan.ranks for rule in item.derived]
    notes = [*dict.fromkeys(notes), *(f"Not included: {part}." for part in first.left_out)]
    schedule = f", schedule {first.step.schedule}" if first.step.schedule else ""
    title = f"{plain_name(first.trace.modules.root.class_name)} on {mesh}{schedule}"
    texts, about = introduction(_need(max(row[-1] for row in rows), first.settings), first.settings)
    parts: list[Part] = [*texts, Table("ranks", columns, rows, noun="rank"), Items("", notes)]
    return Document("plan", title, parts, main="ranks", about=about)


def _list_costs(plan: RankPlan, flops: FlopCountAnalysis, convention: str) -> Table:
    rows = [
        ("Parameters of the model", plan.model_parameters),
        ("Parameters of this rank", plan.parameters),
        ("Parameter bytes of this rank", plan.parameter_bytes),
        ("MACs", flops.macs()),
        (f"FLOPs, convention {plain_name(convention)}", flops.total()),
        *((f"FLOPs, {phase}", sum(labels.values())) for phase, labels in flops.by_phase().items()),
    ]
    return Table("costs", (text_column("metric"), number_column("value", form=format_thousands)), rows, noun="metric")


def _encode(plan: RankPlan, flops: FlopCountAnalysis, table: str) -> dict[str, Any]:
    communication = plan.communication()
    return {
        **record_data(plan, "mesh", "world", "rank", "coordinates", "inputs=trace.info.inputs"),
        **record_data(plan, "parameters", "parameter_bytes", "model_parameters"),
        "table": table,
        "macs": flops.macs(),
        "flops": flops.total(),
        "flops_by_phase": {phase: sum(labels.values()) for phase, labels in flops.by_phase().items()},
        "unsupported_ops": dict(flops.counts().ledger()[Status.UNSUPPORTED]),
        "communication": [
            {**key._asdict(), **volume._asdict()} for key, volume in communication.by_collective_and_group().items()
        ],
        "communication_by_phase": {phase: volume._asdict() for phase, volume in communication.by_phase().items()},
        "unsupported_communication": dict(communication.unsupported),
        **reads_of(plan.trace.info),
        **record_data(plan, "derived", "left_out"),
    }


def _need(nbytes: int, settings: Mapping[str, Any]) -> Verdict:
    return Verdict(nbytes, advice="No optimizer is included." if settings.get("optimizer", "none") == "none" else "")
