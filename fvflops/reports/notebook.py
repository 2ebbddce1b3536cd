"""A small HTML table for notebooks: the totals of a breakdown, and its largest modules."""

from __future__ import annotations

from collections import Counter

from fvflops.reports.measure_values import format_value, sum_measures
from fvflops.trace.notebook import write_notebook_table
from fvflops.units import format_percent, format_quantity
from fvflops.views.breakdown import Breakdown
from fvflops.views.summary_rows import depth_of

_DEPTH = 2
_ROWS = 20


def render(breakdown: Breakdown) -> str:
    """Return the modules down to two levels below the root, at most twenty, with every measure; names are text.

    >>> from fvflops.trace import ModuleInfo, ModuleTree
    >>> from fvflops.views.breakdown import Cell, Measure
    >>> net = ModuleTree({"": ModuleInfo("", "", "<Net>")})
    >>> "&lt;Net&gt;" in render(Breakdown(net, {"flops": Measure("FLOPs", {Cell(""): 12})}))
    True
    """
    totals = {key: sum_measures(measure.values) for key, measure in breakdown.measures.items()}
    first = next(iter(totals.values()), Counter())
    modules = [place for place in breakdown.modules.modules() if depth_of(place.name) <= _DEPTH]
    shown = sorted(modules, key=lambda place: -first[place.name])[:_ROWS]
    kept = {place.name for place in shown}
    rows = [
        [
            place.name or "(the whole model)",
            place.class_name,
            format_percent(first[place.name], first[""]),
            *(format_value(measure, totals[key][place.name]) for key, measure in breakdown.measures.items()),
        ]
        for place in modules
        if place.name in kept
    ]
    headings = ["Module", "Class", "Share", *(measure.title for measure in breakdown.measures.values())]
    return write_notebook_table(
        breakdown.modules.root.class_name, headings, rows, note=_write_note(breakdown, len(rows)), names=2
    )


def _write_note(breakdown: Breakdown, rows: int) -> str:
    about = breakdown.about
    parts = [f"convention {about['table']}"] if "table" in about else []
    unknown = breakdown.ledger.get("unknown", {})
    if unknown:
        parts.append(f"{format_quantity(sum(unknown.values()), 'op call')} unsupported, so not counted")
    modules = sum(1 for _ in breakdown.modules.modules())
    if rows < modules:
        parts.append(f"{rows} of {format_quantity(modules, 'module')}")
    return " · ".join([*parts, "to_html(path) writes the whole report"])
