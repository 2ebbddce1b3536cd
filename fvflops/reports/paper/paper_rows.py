"""Rows of a summary in the units of papers: a model, and optionally its modules."""

from __future__ import annotations

from typing import NamedTuple

from fvflops.counting.metrics import METRICS
from fvflops.reports.escaping import printable
from fvflops.reports.terminal import op_coverage
from fvflops.trace import Summary
from fvflops.units import format_in
from fvflops.views.ranking import truncation_note
from fvflops.views.summary_rows import check_view, drop_zeros, group_by_name, rank_modules

_UNITS = {6: "M", 9: "G"}
_UNCALLED = "not called"


class PaperRows(NamedTuple):
    """The headings of the number columns, and rows of a name and its cells; the first row is the model.

    `notes` are sentences: the convention, the inputs, the ops that are not counted, the versions. Names in `rows` are
    not escaped; those in `notes` are printable.
    """

    headings: list[str]
    rows: list[tuple[str, list[str]]]
    notes: list[str]


def list_paper_rows(
    summary: Summary,
    *,
    by: str,
    depth: int | None,
    report: str,
    sort: str | None = None,
    top: int | None = None,
) -> PaperRows:
    """Return a row for the model and, with `depth`, one for each module down to that level below the root.

    Modules without any count, and columns that are not metrics, are dropped. With `sort` or `top` the modules are
    sorted, by a metric in descending order or by "name" in natural order, and the first `top` follow the model. A `by`
    other than "module" raises ValueError with `report` as the subject of the message.

    >>> from fvflops.trace import ModuleInfo, ModuleTree
    >>> columns = {"parameters": {"": 25_557_032}, "flops": {"": 4_089_184_256}}
    >>> net = Summary(ModuleTree({"": ModuleInfo("", "", "Net")}), columns)
    >>> list_paper_rows(net, by="module", depth=None, report="a table")[:2]
    (['Params (M)', 'FLOPs (G)'], [('Net', ['25.6', '4.09'])])
    """
    check_view(by, ("module",), report)
    headings = [heading for heading in summary.columns if heading in METRICS]
    counts = drop_zeros(group_by_name({heading: summary.columns[heading] for heading in headings}), keep_parents=True)
    model = summary.about.get("model") or summary.modules.root.class_name or "model"
    ranked = rank_modules(summary, depth=depth or 0, sort=sort, top=top)
    shown = [module.name for module in ranked if module.name and module.name in counts]
    rows = [
        (summary.label(name) or model, [_format(summary, heading, name) for heading in headings])
        for name in ("", *shown[:top])
    ]
    notes = [*_write_notes(summary, model), *truncation_note(shown, top, "module")]
    return PaperRows(list(map(_format_heading, headings)), rows, notes)


def _format_heading(heading: str) -> str:
    metric = METRICS[heading]
    return f"{metric.short} ({_UNITS[metric.paper]})"


def _format(summary: Summary, heading: str, module: str) -> str:
    if module in summary.uncalled.get(heading, ()):
        return _UNCALLED
    return format_in(summary.columns[heading].get(module, 0), METRICS[heading].paper)


def _write_notes(summary: Summary, model: str) -> list[str]:
    versions = [f"{name} {summary.about[name]}" for name in ("fvflops", "torch") if name in summary.about]
    footer = [f"Made with {printable(' and '.join(versions))}."] if versions else []
    return [f"Model: {printable(model)}.", *op_coverage.op_coverage_notes(summary), *footer]
