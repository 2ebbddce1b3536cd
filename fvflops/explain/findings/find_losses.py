"""Find why steps are slow, from their rows of work and idle time, and report it; the largest loss first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from fvflops.explain.explained_trace import ExplainedTrace
from fvflops.explain.findings.communication_findings import find_communication
from fvflops.explain.findings.finding import Finding, gather_evidence
from fvflops.explain.findings.idle_and_memory_findings import find_idle, find_memory
from fvflops.explain.findings.planned_step import (
    EXPOSED,
    ComparedModules,
    ComparedRow,
    PlannedStep,
    find_unexplained,
    find_unplanned,
)
from fvflops.explain.findings.product_findings import find_products
from fvflops.reports.document import Gantt, Items, Part, Slice, Table, Value, number_column, text_column
from fvflops.text import explaining_arguments, record_data
from fvflops.units import format_seconds, format_share

LEAST = 0.02  # share of a step: clean steps lose up to this much in many small ways
_LEAST_OF_REST = 0.1  # share of kernels that the plan misses anyway: the error of the kernel models
_FINDERS = (find_idle, find_communication, find_products, find_memory)


@explaining_arguments
def find_losses(trace: ExplainedTrace, planned: PlannedStep | None = None) -> list[Finding]:
    """Return the losses of a step, the largest first, without losses under 2 % of it.

    With a plan, of `expect_step`, expected time is not a loss, and unplanned work is one.

    >>> import os, tempfile, torch
    >>> from fvflops import explain_trace
    >>> model, x = torch.nn.Linear(8, 8), torch.ones(2, 8)
    >>> with torch.profiler.profile(record_shapes=True, with_stack=True) as profile:
    ...     for _ in range(500):
    ...         x = x + model(x).sum().item()
    >>> path = os.path.join(tempfile.mkdtemp(), "trace.json")
    >>> profile.export_chrome_trace(path)
    >>> [finding.seconds > 0 and finding.advice != "" for finding in find_losses(explain_trace(path))][:1]
    [True]
    """
    evidence = gather_evidence(trace, is_planned=planned is not None)
    found = [finding for find in _FINDERS for finding in find(evidence)]
    if planned is not None:
        found = [*_over(found, planned), *find_unplanned(evidence, planned)]
    total = evidence.seconds(evidence.total_ns)
    found = [finding for finding in found if finding.seconds >= LEAST * total]
    if planned is not None:
        rest = find_unexplained(evidence, planned, found)
        found += [finding for finding in rest if finding.seconds >= _LEAST_OF_REST * total]
    return sorted(found, key=lambda finding: -finding.seconds)


def _over(found: list[Finding], planned: PlannedStep) -> list[Finding]:
    """Return findings without the seconds that the plan has for them; exposed collectives share theirs by size."""
    exposed = sum(finding.seconds for finding in found if finding.code.startswith(EXPOSED))
    result = []
    for finding in found:
        share = finding.seconds / exposed if finding.code.startswith(EXPOSED) and exposed else 1.0
        used = min(planned.allowance(finding.code) * share, finding.seconds)
        text = f"{finding.text}, {format_seconds(used)} of it planned" if used else finding.text
        result.append(replace(finding, seconds=finding.seconds - used, text=text))
    return result


_ROWS = 20  # of modules
_NONE = "none over 2 % of the step"


def report_parts(
    found: Sequence[Finding], compared: Sequence[ComparedRow], modules: ComparedModules | None, step: float
) -> list[Part]:
    """Return the findings of a step that took `step` seconds, and with a plan the comparisons and their picture."""
    lines = [
        f"{format_seconds(row.seconds)}: {row.text}. To do: {row.advice}. Seen in {'; '.join(row.evidence[:2])}."
        for row in found
    ]
    parts: list[Part] = [Items("What the step loses, the largest first", lines or [_NONE])]
    if found:
        parts.append(_tabulate(found, step))
    if compared:
        parts += [_tabulate_compared("compared", "part", compared, "Expected by the plan, and measured")]
    if modules is not None and modules.matched:
        matched = f"{modules.matched:,} of {modules.traced:,} matched"
        title = f"Modules: {matched} with the plan's by the order of their calls"
        parts.append(_tabulate_compared("modules", "module", modules.rows, title).ranked(top=_ROWS))
    if compared:
        parts.append(_draw(compared))
    return parts


def encode_losses(
    found: Sequence[Finding], compared: Sequence[ComparedRow], modules: ComparedModules | None
) -> Mapping[str, Any]:
    """Return findings and the comparisons for JSON, in seconds."""
    rows, of_modules = (
        [record_data(row, "part", "phase", "expected", "measured", "lost") for row in compared_rows]
        for compared_rows in (compared, () if modules is None else modules.rows)
    )
    return {"findings": [asdict(row) for row in found], "compared": rows, "compared_modules": of_modules}


def _tabulate(found: Sequence[Finding], step: float) -> Table:
    columns = (
        text_column("code"),
        number_column("seconds", "saves", form=format_seconds),
        number_column("share", form=format_share),
        text_column("certainty", shorten_last=True),
    )
    rows: list[list[Value]] = [
        [row.code, row.seconds, row.seconds / step if step else None, row.certainty] for row in found
    ]
    return Table("losses", columns, rows, "Findings", noun="finding")


def _tabulate_compared(name: str, heading: str, compared: Sequence[ComparedRow], title: str) -> Table:
    columns = (
        text_column("part", heading, shorten_last=True),
        text_column("phase"),
        *(number_column(key, form=format_seconds) for key in ("expected", "measured", "lost")),
    )
    rows: list[list[Value]] = [[row.part, row.phase, row.expected, row.measured, row.lost] for row in compared]
    sums = [sum(getattr(row, key) for row in compared) for key in ("expected", "measured", "lost")]
    total: list[Value] = ["step" if heading == "part" else "kernels", "", *sums]
    return Table(name, columns, rows, title, total=total, noun="row")


def _draw(compared: Sequence[ComparedRow]) -> Gantt:
    """Return the expected step above the measured one, by class of work, phases in their order."""
    order = {"forward": 0, "recompute": 1, "backward": 2, "optimizer": 3}
    rows = sorted(compared, key=lambda row: (order.get(row.phase, 4), row.part))
    lanes: dict[str, list[Slice]] = {}
    for lane in ("expected", "measured"):
        end, lanes[lane] = 0.0, []
        for row in (row for row in rows if getattr(row, lane)):
            start, end = end, end + getattr(row, lane)
            note = f"{row.part} {row.phase}: {format_seconds(getattr(row, lane))}"
            lanes[lane].append(Slice(row.part, start, end, row.phase, note))
    kinds = {row.part: row.part for row in rows}
    return Gantt("steps_beside", lanes, kinds, "The expected step and the measured one, by phase", "shorter")
