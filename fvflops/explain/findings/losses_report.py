"""Parts of a report: findings, the largest loss first, and the measured step beside the planned one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fvflops.explain.findings.compared_modules import ComparedModules
from fvflops.explain.findings.finding import Finding
from fvflops.explain.findings.planned_step import ComparedRow
from fvflops.reports.document import Gantt, Items, Part, Slice, Table, Value, number_column, text_column
from fvflops.text import record_data
from fvflops.units import format_seconds, format_share

_ROWS = 20  # of modules
_NONE = "none over 2 % of the step"


def losses_parts(
    found: Sequence[Finding], compared: Sequence[ComparedRow], modules: ComparedModules | None, step: float
) -> list[Part]:
    """Return the findings of a step of so many seconds, and with a plan the comparisons and their picture."""
    lines = [
        f"{format_seconds(row.seconds)}: {row.text}. To do: {row.advice}. Seen in {'; '.join(row.evidence[:2])}."
        for row in found
    ]
    parts: list[Part] = [Items("What the step loses, the largest first", lines or [_NONE])]
    if found:
        parts.append(_tabulate(found, step))
    if compared:
        parts += [_tabulate_compared("compared", "what", compared, "Expected by the plan, and measured")]
    if modules is not None and modules.matched:
        title = (
            f"Modules: {modules.matched:,} of {modules.traced:,} matched with the plan's by the order of their calls"
        )
        parts.append(_tabulate_compared("modules", "module", modules.rows, title).ranked(top=_ROWS))
    if compared:
        parts.append(_draw(compared))
    return parts


def encode_losses(
    found: Sequence[Finding], compared: Sequence[ComparedRow], modules: ComparedModules | None
) -> Mapping[str, Any]:
    """Return findings and the comparisons for JSON, in seconds."""
    names = ("code", "text", "seconds", "evidence", "advice", "certainty")
    rows, of_modules = (
        [record_data(row, "what", "phase", "expected", "measured", "lost") for row in part]
        for part in (compared, () if modules is None else modules.rows)
    )
    found_data = [record_data(finding, *names) for finding in found]
    return {"findings": found_data, "compared": rows, "compared_modules": of_modules}


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


def _tabulate_compared(name: str, what: str, compared: Sequence[ComparedRow], title: str) -> Table:
    columns = (
        text_column("what", what, shorten_last=True),
        text_column("phase"),
        *(number_column(key, form=format_seconds) for key in ("expected", "measured", "lost")),
    )
    rows: list[list[Value]] = [[row.what, row.phase, row.expected, row.measured, row.lost] for row in compared]
    sums = [sum(getattr(row, key) for row in compared) for key in ("expected", "measured", "lost")]
    total: list[Value] = ["step" if what == "what" else "kernels", "", *sums]
    return Table(name, columns, rows, title, total=total, noun="row")


def _draw(compared: Sequence[ComparedRow]) -> Gantt:
    """Return the expected step above the measured one, by class of work, phases in their order."""
    order = {"forward": 0, "recompute": 1, "backward": 2, "optimizer": 3}
    rows = sorted(compared, key=lambda row: (order.get(row.phase, 4), row.what))
    lanes: dict[str, list[Slice]] = {}
    for lane in ("expected", "measured"):
        end, slices = 0.0, []
        for row in rows:
            seconds = getattr(row, lane)
            note = f"{row.what} {row.phase}: {format_seconds(seconds)}"
            slices += [Slice(row.what, end, end + seconds, row.phase, note)] if seconds else []
            end += seconds
        lanes[lane] = slices
    kinds = {row.what: row.what for row in rows}
    return Gantt("steps_beside", lanes, kinds, "The expected step and the measured one, by phase", "shorter")
