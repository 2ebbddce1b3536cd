"""A table in GitHub's Markdown, and the coverage of the count below it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fvflops.reports.names import escape_markdown
from fvflops.reports.terminal import op_coverage
from fvflops.reports.terminal.collapse import collapse_note
from fvflops.trace import ModuleInfo, Summary
from fvflops.units import format_parameters, format_percent, format_short
from fvflops.views.ranking import truncation_note
from fvflops.views.summary import name_heading
from fvflops.views.summary_rows import (
    OperatorRow,
    check_view,
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
    """Return the summary as Markdown, by module, by operator or by both, ending with the coverage.

    Modules without any count are left out, as in the table. `depth` is how many modules below the root are shown, all
    if None; by operator it is ignored. With `sort`, a heading or "name", or `top` those with most are first, `top` of
    them are shown, and a note says how many more there are. An unknown view or order raises ValueError.
    """
    check_view(by, report="the Markdown report")
    if by == "module":
        cells = _prepare(summary)
        modules = [place for place in rank_modules(summary, depth=depth, sort=sort, top=top) if place.name in cells]
        table, more = _write_modules(summary, modules[:top], cells), truncation_note(modules, top, "module")
        more += collapse_note(summary, (place.name for place in modules[:top]))
    elif by == "operator":
        ranked = rank_operators(summary, sort=sort, top=top)
        table, more = _write_operators(summary, ranked[:top], False), truncation_note(ranked, top, "operator")
    else:
        ranked = rank_operators_by_module(summary, depth=depth, sort=sort, top=top)
        table, more = _write_operators(summary, ranked[:top], True), truncation_note(ranked, top, "row")
        more += collapse_note(summary, (row.module for row in ranked[:top]))
    sentences = op_coverage.op_coverage_notes(summary, escape=escape_markdown)
    notes = [f"- {sentence}" for sentence in [*more, *sentences]]
    return "\n".join([*table, "", *notes] if notes else table)


def _prepare(summary: Summary) -> dict[str, dict[str, str]]:
    counts = drop_zeros(group_by_name(summary.columns), keep_parents=True)
    cells = {
        name: {
            heading: (format_parameters if heading == "parameters" else format_short)(count)
            for heading, count in row.items()
        }
        for name, row in counts.items()
    }
    for heading in summary.columns:
        cells = mark_uncalled(cells, heading, summary.uncalled.get(heading, frozenset()) & cells.keys(), "not called")
    return cells


def _write_modules(
    summary: Summary, modules: Sequence[ModuleInfo], cells: Mapping[str, Mapping[str, str]]
) -> list[str]:
    headings = list(summary.columns)
    rows = []
    for place in modules:
        numbers = [cells[place.name].get(heading, "") for heading in headings]
        rows.append([_name(summary.label(place.name)), escape_markdown(place.class_name), *numbers])
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


def write_table(words: Sequence[str], numbers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; heads are escaped here, and the cells of the rows are written as they are."""
    heads = [escape_markdown(head) for head in (*words, *map(name_heading, numbers))]
    rules = [":---"] * len(words) + ["---:"] * len(numbers)
    return [f"| {' | '.join(cells)} |" for cells in (heads, rules, *rows)]
