"""A table in GitHub's Markdown, with the coverage of the count below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fvflops.reports.escaping import escape_markdown
from fvflops.reports.terminal import op_coverage
from fvflops.reports.terminal.collapse import collapse_note
from fvflops.trace import ModuleInfo, Summary
from fvflops.units import format_parameters, format_percent, format_short
from fvflops.views.made_summary import name_heading
from fvflops.views.ranking import choose_measure, truncation_note
from fvflops.views.summary_rows import (
    ITSELF,
    OperatorRow,
    check_view,
    count_itself,
    drop_zeros,
    group_by_name,
    list_operator_headings,
    mark_uncalled,
    rank_modules,
    rank_operators,
    rank_operators_by_module,
)

_ROOT = "**model**"  # bold, as a module may be named model


def render(
    summary: Summary, *, by: str = "module", depth: int | None = None, sort: str | None = None, top: int | None = None
) -> str:
    """Return the summary as Markdown, by module, by operator or by="both", ending with the coverage.

    Modules without any count are dropped. `depth` is the number of levels shown below the root, None for all; by
    operator it is ignored. With `sort` or `top` the rows are sorted, by a metric in descending order or by "name" in
    natural order, the first `top` are shown, and a note has the number of the others. An unknown `by` or `sort` raises
    ValueError.
    """
    check_view(by, report="the Markdown report")
    if by == "module":
        cells = _prepare(summary)
        ranked_modules = rank_modules(summary, depth=depth, sort=sort, top=top)
        modules = [module for module in ranked_modules if module.name in cells]
        table, notes = (
            _write_modules(summary, modules[:top], cells, in_tree=sort is top is None),
            truncation_note(modules, top, "module"),
        )
        notes += collapse_note(summary, (module.name for module in modules[:top]))
    elif by == "operator":
        ranked = rank_operators(summary, sort=sort, top=top)
        table, notes = _write_operators(summary, ranked[:top], False), truncation_note(ranked, top, "operator")
    else:
        ranked = rank_operators_by_module(summary, depth=depth, sort=sort, top=top)
        table, notes = _write_operators(summary, ranked[:top], True), truncation_note(ranked, top, "row")
        notes += collapse_note(summary, (row.module for row in ranked[:top]))
    notes += op_coverage.op_coverage_notes(summary, escape=escape_markdown)
    items = [f"- {note}" for note in notes]
    return "\n".join([*table, "", *items] if items else table)


def _prepare(summary: Summary) -> dict[str, dict[str, str]]:
    counts = drop_zeros(group_by_name(summary.columns), keep_parents=True)
    cells = {name: {heading: _format(count, heading) for heading, count in row.items()} for name, row in counts.items()}
    for heading in summary.columns:
        cells = mark_uncalled(cells, heading, summary.uncalled.get(heading, frozenset()) & cells.keys(), "not called")
    return cells


def _format(count: int, heading: str) -> str:
    return format_parameters(count) if heading == "parameters" else format_short(count)


def _write_modules(
    summary: Summary, modules: Sequence[ModuleInfo], cells: Mapping[str, Mapping[str, str]], *, in_tree: bool
) -> list[str]:
    headings = list(summary.columns)
    above = {module.name.rpartition(".")[0] for module in modules if module.name} if in_tree else ()
    itself = count_itself(summary, above, choose_measure(headings, None))
    rows = []
    for module in modules:
        numbers = [cells[module.name].get(heading, "") for heading in headings]
        label = summary.label(module.name)
        rows.append([_name(label), escape_markdown(module.class_name), *numbers])
        if module.name in itself:
            numbers = [_format(count, heading) for heading, count in itself[module.name].items()]
            rows.append([escape_markdown(f"{label} {ITSELF}".strip()), "", *numbers])
    return write_table(["module", "class"], headings, rows)


def _write_operators(summary: Summary, ranked: Sequence[OperatorRow], both: bool) -> list[str]:
    headings = list_operator_headings(summary)
    totals = [sum(summary.operators[heading].values()) for heading in headings]
    rows = []
    for row in ranked:
        module = [_name(summary.label(row.module))] if both else []
        rows.append([*module, escape_markdown(row.operator), *_format_with_share(row.counts, totals)])
    if not both:
        rows.append(["**total**", *_format_with_share(totals, totals)])
    return write_table(["module", "operator"] if both else ["operator"], [headings[0], "share", *headings[1:]], rows)


def _format_with_share(counts: Sequence[int], totals: Sequence[int]) -> list[str]:
    first, *others = (format_short(count) for count in counts)
    return [first, escape_markdown(format_percent(counts[0], totals[0])), *others]


def _name(module: str) -> str:
    return escape_markdown(module) or _ROOT


def write_table(text_keys: Sequence[str], number_keys: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with text columns and number columns; cells of rows are already escaped."""
    headings = [escape_markdown(heading) for heading in (*text_keys, *map(name_heading, number_keys))]
    rules = [":---"] * len(text_keys) + ["---:"] * len(number_keys)
    return [f"| {' | '.join(cells)} |" for cells in (headings, rules, *rows)]
