"""The tables of `count`: modules, operators, the operators of each module, and tables for papers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fvflops.counting.metrics import METRICS
from fvflops.reports.document import Column, Document, Items, Table, Value, number_column, text_column
from fvflops.reports.escaping import escape_latex, printable
from fvflops.reports.formats import latex, markdown, text, write_document
from fvflops.reports.terminal.collapse import collapse, collapse_note
from fvflops.reports.terminal.op_coverage import list_notes, op_coverage_notes
from fvflops.trace import Summary
from fvflops.units import format_in, format_parameters, format_percent, format_short
from fvflops.views.analysed_run import name_heading
from fvflops.views.ranking import choose_measure, truncation_note
from fvflops.views.summary_rows import (
    ITSELF,
    Line,
    View,
    check_view,
    count_itself,
    count_line,
    depth_of,
    drop_zeros,
    group_by_name,
    list_lines,
    list_operator_headings,
    rank_modules,
    rank_operators,
    read_view,
)

_LONG = 40  # rows of a table from which on equal layers are better collapsed
_NAMED = 3  # modules that a sentence on blank cells names
_UNCALLED = "not called"
_INDENT = "  "


def write_text(
    summary: Summary, *, width: int | None = None, colour: bool = False, encoding: str = "utf-8", **options: Any
) -> str:
    """Return the summary as a table of at most `width` cells (4 or more; None: no limit), with the coverage below.

    The other `options` are fields of a View. The rows are as in fvcore's table, without parameter shapes; names are
    relative to the parent row. Shares and bars show the FLOPs, or the column of `sort`.
    """
    view = read_view(options, "the table")
    list_rows = _list_modules if view.by == "module" else list_operators
    coverage = list_notes(summary)
    below = Items("", [note.text for note in coverage], [note.tone for note in coverage])
    document = Document("count", parts=[list_rows(summary, view), below])
    return text.write(document, width=width, colour=colour, encoding=encoding)


def write_markdown(summary: Summary, **options: Any) -> str:
    """Return a View of the summary as Markdown, ending with the coverage; modules without any count are dropped."""
    view = read_view(options, "the Markdown report")
    by_module = view.by == "module"
    table = (
        _list_whole_names(summary, view) if by_module else list_operators(summary, view, indent=None, share_second=True)
    )
    notes = [*table.notes, *op_coverage_notes(summary)]
    return markdown.write(Document("count", parts=[replace(table, notes=()), Items("", notes)]))


def write_exact(summary: Summary, *, format: str = "csv", **options: Any) -> str:
    """Return the rows of `exact_table` for a View in a format of documents; the root is ""."""
    table = exact_table(summary, read_view(options, f"the {format.upper()} report"))
    return write_document(Document("count", parts=[table]), format)


def exact_table(summary: Summary, view: View) -> Table:
    """Return the exact numbers of a summary, 0 where a column lacks a row; by operator `depth` is ignored."""
    if view.by == "module":
        uncalled = frozenset().union(*summary.uncalled.values())
        columns = [*map(text_column, ("module", "class")), *map(number_column, summary.columns), text_column("called")]
        listed: list[list[Value]] = [
            [
                summary.label(module.name),
                module.class_name,
                *(column.get(module.name, 0) for column in summary.columns.values()),
                module.name not in uncalled,
            ]
            for module in rank_modules(summary, view)[: view.top]
        ]
        return Table("modules", columns, listed)
    both = view.by == "both"
    ranked = rank_operators(summary, view)[: view.top]
    rows: list[list[Value]] = [[*([summary.label(row.module)] * both), row.operator, *row.counts] for row in ranked]
    return Table("operators", [*_name_columns(both), *map(number_column, list_operator_headings(summary))], rows)


def _name_columns(both: bool) -> list[Column]:
    return [text_column("module"), text_column("operator")] if both else [text_column("operator")]


# ---- modules


def _count_column(heading: str, *, hide_order: int = 0) -> Column:
    """Return the column of a metric, or of a phase; a cell may be a text in place of a number."""
    form = format_parameters if heading == "parameters" else format_short
    column = number_column(
        heading, name_heading(heading), form=lambda value: value if isinstance(value, str) else form(value)
    )
    return replace(column, hide_order=hide_order)


def _list_share_columns(headings: Sequence[str], measure: str, total: float) -> list[Column]:
    """Return columns of numbers, then the share of one in its total and a bar; the others are hidden first."""
    share = number_column("share", f"% {name_heading(measure)}", form=lambda value: format_percent(value, total))
    return [
        *(_count_column(heading, hide_order=2 * (heading != measure)) for heading in headings),
        replace(share, hide_order=1),
        Column("bar", "bars", bar_total=total),
    ]


def _list_modules(summary: Summary, view: View) -> Table:
    headings = list(summary.columns)
    measure = choose_measure(headings, view.sort)
    lines = list_lines(summary, view, show_param_shapes=False)
    itself = count_itself(summary, dict.fromkeys(line.above for line in lines if line.level), measure)
    rows: list[list[Value]] = []
    strong = []
    for line in lines[: view.top]:
        counts = [count_line(summary, line, heading) if line.cells.get(heading) else None for heading in headings]
        value = count_line(summary, line, measure)
        strong += [len(rows)] * (line.chain[0] == "")
        rows.append([_INDENT * line.level + (_name(summary, line) or "model"), *counts, value, value])
        if counted := itself.get(line.name):
            value = counted[measure]
            rows.append([_INDENT * (line.level + 1) + ITSELF, *map(counted.__getitem__, headings), value, value])
    shown = [line.name for line in lines[: view.top]]
    notes = [*truncation_note(lines, view.top, "module"), *collapse_note(summary, shown)]
    notes += _explain_blanks(summary, shown)
    if len(rows) > _LONG and not summary.labels and collapse(summary).labels:
        notes.append("--collapse shows consecutive equal layers as one row.")
    columns = _list_share_columns(headings, measure, summary.columns[measure].get("", 0))
    return Table("modules", [text_column("module"), *columns], rows, notes=notes, strong=strong)


def _explain_blanks(summary: Summary, shown: Sequence[str]) -> list[str]:
    """Return sentences on blank cells: of modules whose parameters are another's, and of modules that never ran."""
    owners = {parameter.identity: parameter.name.rpartition(".")[0] for parameter in summary.modules.parameters()}
    notes = []
    modules = [name for name in shown if name in summary.modules.by_name and "parameters" in summary.columns]
    for name in modules:
        shared = {owners[parameter.identity] for parameter in summary.modules.by_name[name].parameters} - {name}
        if shared and not summary.columns["parameters"].get(name):
            notes.append(f"{name} has the parameters of {', '.join(sorted(shared))}, counted there.")
    uncalled = frozenset().union(*summary.uncalled.values())
    never = [name or "model" for name in modules if name in uncalled and summary.columns["parameters"].get(name)]
    more = f", and {len(never) - _NAMED} more" if len(never) > _NAMED else ""
    return [*notes[:_NAMED], *([f"Not called: {', '.join(never[:_NAMED])}{more}."] if never else [])]


def _name(summary: Summary, line: Line) -> str:
    """Return a row's name relative to its parent row; below repeated layers, relative to the parent of the layers."""
    parent = line.above.rpartition(".")[0] if line.above in summary.labels else line.above
    return summary.label(line.name).removeprefix(f"{parent}." if parent else "")


def _list_whole_names(summary: Summary, view: View) -> Table:
    headings = list(summary.columns)
    counts = _count_by_name(summary.columns)
    ranked = [module for module in rank_modules(summary, view) if module.name in counts]
    modules = ranked[: view.top]
    above = () if view.is_ranked else {module.name.rpartition(".")[0] for module in modules if module.name}
    itself = count_itself(summary, above, choose_measure(headings))
    rows: list[list[Value]] = []
    strong = []
    for module in modules:
        label = summary.label(module.name)
        cells: list[Value] = [
            _UNCALLED if module.name in summary.uncalled.get(heading, ()) else counts[module.name].get(heading)
            for heading in headings
        ]
        strong += [len(rows)] * (not label)
        rows.append([label or "model", module.class_name, *cells])
        if module.name in itself:
            rows.append([f"{label} {ITSELF}".strip(), "", *itself[module.name].values()])
    notes = [*truncation_note(ranked, view.top, "module"), *collapse_note(summary, (item.name for item in modules))]
    columns = [*map(text_column, ("module", "class")), *map(_count_column, headings)]
    return Table("modules", columns, rows, notes=notes, strong=strong)


def _count_by_name(columns: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    return drop_zeros(group_by_name(columns), keep_parents=True)


# ---- operators


def list_operators(summary: Summary, view: View, *, indent: str | None = _INDENT, share_second: bool = False) -> Table:
    """Return the operators with a share and a bar; `share_second`: with the first column's share behind it, no bar.

    Module names are indented by their level, and shown once, unless `indent` is None or the rows are ranked.
    """
    headings = list_operator_headings(summary)
    index = 0 if share_second else headings.index(choose_measure(headings, view.sort))
    totals = [sum(summary.operators[heading].values()) for heading in headings]
    both, flat = view.by == "both", indent is None or view.is_ranked
    ranked = rank_operators(summary, view if flat else view._replace(depth=view.limit_depth()))
    shown = ranked[: view.top]
    rows: list[list[Value]] = []
    previous: str | None = None
    for row in shown:
        module = summary.label(row.module) or "model"
        if not flat:
            module = "" if row.module == previous else (indent or "") * depth_of(row.module) + module
        previous = row.module
        rows.append([*([module] * both), row.operator, *_add_share(row.counts, index, share_second)])
    columns = _list_share_columns(headings, headings[index], totals[index])
    if share_second:
        columns = [columns[0], replace(columns[-2], heading="share"), *columns[1:-2]]
    notes = truncation_note(ranked, view.top, "row" if both else "operator")
    return Table(
        "operators",
        [*_name_columns(both), *columns],
        rows,
        total=None if both else ["total", *_add_share(totals, index, share_second)],
        notes=[*notes, *(collapse_note(summary, (row.module for row in shown)) if both else ())],
        strong=[number for number, row in enumerate(shown) if indent is None and both and not row.module],
    )


def _add_share(counts: Sequence[int], index: int, is_second: bool) -> list[Value]:
    """Return the counts with the values of a share and a bar; a share that is second has no bar."""
    return [counts[0], *counts] if is_second else [*counts, counts[index], counts[index]]


# ---- papers

_UNITS = {6: "M", 9: "G"}


def write_paper(summary: Summary, **options: Any) -> str:
    """Return parameters in 10^6, FLOPs in 10^9 and activations in 10^6, with three significant digits, as Markdown.

    There is one row for the model and, with `depth`, one for each module down to that level below the root. Notes below
    the table name the convention, the inputs, the ops that are not counted and the versions.
    """
    view = View(**options)
    check_view(view.by, ("module",), "the paper report")
    table = _list_models(summary, view)
    return markdown.write(Document("count", parts=[replace(table, notes=()), Items("", table.notes)]))


def write_latex(summary: Summary, **options: Any) -> str:
    r"""Return the rows of `write_paper` as a LaTeX tabular; by "operator" and "both" the rows of the CSV report.

    Comments above the table, for the caption, have the notes; a line below it names the unsupported ops. The document
    needs the package booktabs, and XeLaTeX or LuaLaTeX for names in other scripts. An unknown `by` raises ValueError.
    """
    view = read_view(options, "the LaTeX report")
    if view.by != "module":
        return _write_latex_operators(summary, view)
    table = _list_models(summary, view)
    first, *others = [list(map(escape_latex, row)) for row in table.texts()]
    headings = [column.heading for column in table.columns]
    below = _note_unsupported(summary, len(headings))
    tabular = latex.write_tabular("l" + "r" * (len(headings) - 1), headings, [[first], others], below)
    return "\n".join([*(f"% {note}" for note in table.notes), r"% Needs \usepackage{booktabs}.", tabular])


def _list_models(summary: Summary, view: View) -> Table:
    """Return the rows of the model and its modules; columns that are not metrics are dropped."""
    headings = [heading for heading in summary.columns if heading in METRICS]
    counts = _count_by_name({heading: summary.columns[heading] for heading in headings})
    model = summary.about.get("model") or summary.modules.root.class_name or "model"
    ranked = rank_modules(summary, view._replace(depth=view.depth or 0))
    shown = [module.name for module in ranked if module.name and module.name in counts]
    versions = [f"{name} {summary.about[name]}" for name in ("fvflops", "torch") if name in summary.about]
    made = [f"Made with {printable(' and '.join(versions))}."] if versions else []
    notes = [f"Model: {printable(model)}.", *map(printable, op_coverage_notes(summary)), *made]
    units = [(METRICS[heading].short, _UNITS[METRICS[heading].paper]) for heading in headings]
    return Table(
        "modules",
        [
            text_column("name", "Module" if view.depth else "Model"),
            *(number_column(name, f"{name} ({unit})", form=str) for name, unit in units),
        ],
        [
            [summary.label(name) or model, *(_format_in_unit(summary, heading, name) for heading in headings)]
            for name in ("", *shown[: view.top])
        ],
        notes=[*notes, *truncation_note(shown, view.top, "module")],
        strong=(0,) if view.depth else (),  # as a module may have the name of the model
    )


def _format_in_unit(summary: Summary, heading: str, module: str) -> str:
    if module in summary.uncalled.get(heading, ()):
        return _UNCALLED
    return format_in(summary.columns[heading].get(module, 0), METRICS[heading].paper)


def _write_latex_operators(summary: Summary, view: View) -> str:
    table = exact_table(summary, view)
    columns = [
        replace(column, form=lambda name: name or "model")
        if column.is_text
        else replace(column, heading=METRICS[column.key].short if column.key in METRICS else column.key)
        for column in table.columns
    ]
    notes = op_coverage_notes(summary)
    document = Document("count", parts=[replace(table, columns=columns), Items("", notes)])
    return latex.write(document.readable_by("people"))


def _note_unsupported(summary: Summary, width: int) -> list[str]:
    unsupported = sorted(op for op, calls in summary.ledger.get("unsupported", {}).items() if calls)
    listed = ", ".join(map(escape_latex, unsupported))
    note = rf"  \multicolumn{{{width}}}{{l}}{{\footnotesize Unsupported, so not counted: {listed}.}} \\"
    return [note] if unsupported else []
