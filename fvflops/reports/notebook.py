"""HTML table of the largest modules of a breakdown, for notebooks."""

from __future__ import annotations

from collections import Counter

from fvflops.reports.measure_values import format_value, sum_measures
from fvflops.trace.notebook import write_notebook_table
from fvflops.units import format_percent, format_quantity
from fvflops.views.breakdown import Breakdown
from fvflops.views.summary_rows import depth_of

_DEPTH = 2  # levels below the root
_MAX_ROWS = 20


def render(breakdown: Breakdown) -> str:
    """Return a table of at most twenty modules, down to two levels below the root, with every measure.

    >>> from fvflops.trace import ModuleInfo, ModuleTree
    >>> from fvflops.views.breakdown import Cell, Measure
    >>> net = ModuleTree({"": ModuleInfo("", "", "<Net>")})
    >>> "&lt;Net&gt;" in render(Breakdown(net, {"flops": Measure("FLOPs", {Cell(""): 12})}))
    True
    """
    totals = {key: sum_measures(measure.values) for key, measure in breakdown.measures.items()}
    first = next(iter(totals.values()), Counter())
    modules = [module for module in breakdown.modules.modules() if depth_of(module.name) <= _DEPTH]
    largest = {module.name for module in sorted(modules, key=lambda module: -first[module.name])[:_MAX_ROWS]}
    rows = [
        [
            module.name or "(the whole model)",
            module.class_name,
            format_percent(first[module.name], first[""]),
            *(format_value(measure, totals[key][module.name]) for key, measure in breakdown.measures.items()),
        ]
        for module in modules
        if module.name in largest
    ]
    headings = ["Module", "Class", "Share", *(measure.title for measure in breakdown.measures.values())]
    return write_notebook_table(
        breakdown.modules.root.class_name, headings, rows, note=_write_note(breakdown, len(rows)), text_columns=2
    )


def _write_note(breakdown: Breakdown, rows: int) -> str:
    about = breakdown.about
    parts = [f"convention {about['table']}"] if "table" in about else []
    unsupported = breakdown.ledger.get("unknown", {})
    if unsupported:
        parts.append(f"{format_quantity(sum(unsupported.values()), 'op call')} unsupported, so not counted")
    modules = sum(1 for _ in breakdown.modules.modules())
    if rows < modules:
        parts.append(f"{rows} of {format_quantity(modules, 'module')}")
    return " · ".join([*parts, "to_html(path) writes the full report"])
