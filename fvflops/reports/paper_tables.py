"""Tables of `count` in the units of papers, in Markdown and LaTeX: a model, and optionally its modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fvflops.counting.metrics import METRICS
from fvflops.reports.count_report import exact_table
from fvflops.reports.document import Document, Items, Table, number_column, text_column
from fvflops.reports.escaping import escape_latex, printable
from fvflops.reports.formats import latex, markdown
from fvflops.reports.terminal.op_coverage import op_coverage_notes
from fvflops.trace import Summary
from fvflops.units import format_in
from fvflops.views.ranking import truncation_note
from fvflops.views.summary_rows import check_view, drop_zeros, group_by_name, rank_modules

_UNITS = {6: "M", 9: "G"}
_UNCALLED = "not called"


def write_paper(
    summary: Summary, *, by: str = "module", depth: int | None = None, sort: str | None = None, top: int | None = None
) -> str:
    """Return parameters in 10^6, FLOPs in 10^9 and activations in 10^6, with three significant digits, as Markdown.

    There is one row for the model and, with `depth`, one for each module down to that level below the root. Notes below
    the table name the convention, the inputs, the ops that are not counted and the versions.
    """
    check_view(by, ("module",), "the paper report")
    table = _list_models(summary, depth, sort, top)
    return markdown.write(Document("count", parts=[replace(table, notes=()), Items("", table.notes)]))


def write_latex(
    summary: Summary, *, by: str = "module", depth: int | None = None, sort: str | None = None, top: int | None = None
) -> str:
    r"""Return the rows of `write_paper` as a LaTeX tabular; by "operator" and "both" those of the CSV report.

    Comments above the table, for the caption, have the notes; a line below it names the unsupported ops. The document
    needs the package booktabs, and XeLaTeX or LuaLaTeX for names in other scripts. An unknown `by` raises ValueError.
    """
    check_view(by, report="the LaTeX report")
    if by != "module":
        return _write_operators(summary, by, depth, sort, top)
    table = _list_models(summary, depth, sort, top)
    first, *others = [latex.write_row(map(escape_latex, row)) for row in table.texts()]
    return "\n".join(
        [
            *(f"% {note}" for note in table.notes),
            r"% Needs \usepackage{booktabs}.",
            rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
            r"  \toprule",
            latex.write_row(column.heading for column in table.columns),
            r"  \midrule",
            first,
            *([r"  \midrule", *others] if others else []),
            r"  \bottomrule",
            *_note_unsupported(summary, len(table.columns)),
            r"\end{tabular}",
        ]
    )


def _list_models(summary: Summary, depth: int | None, sort: str | None, top: int | None) -> Table:
    """Return the row of the model and those of its modules; columns that are not metrics are dropped."""
    headings = [heading for heading in summary.columns if heading in METRICS]
    counts = drop_zeros(group_by_name({heading: summary.columns[heading] for heading in headings}), keep_parents=True)
    model = summary.about.get("model") or summary.modules.root.class_name or "model"
    ranked = rank_modules(summary, depth=depth or 0, sort=sort, top=top)
    shown = [module.name for module in ranked if module.name and module.name in counts]
    versions = [f"{name} {summary.about[name]}" for name in ("fvflops", "torch") if name in summary.about]
    footer = [f"Made with {printable(' and '.join(versions))}."] if versions else []
    units = [(METRICS[heading].short, _UNITS[METRICS[heading].paper]) for heading in headings]
    return Table(
        "modules",
        [
            text_column("name", "Module" if depth else "Model"),
            *(number_column(name, f"{name} ({unit})", form=str) for name, unit in units),
        ],
        [
            [summary.label(name) or model, *(_format(summary, heading, name) for heading in headings)]
            for name in ("", *shown[:top])
        ],
        notes=[
            f"Model: {printable(model)}.",
            *map(printable, op_coverage_notes(summary)),
            *footer,
            *truncation_note(shown, top, "module"),
        ],
        strong=(0,) if depth else (),  # as a module may have the name of the model
    )


def _format(summary: Summary, heading: str, module: str) -> str:
    if module in summary.uncalled.get(heading, ()):
        return _UNCALLED
    return format_in(summary.columns[heading].get(module, 0), METRICS[heading].paper)


def _write_operators(summary: Summary, by: str, depth: int | None, sort: str | None, top: int | None) -> str:
    table = exact_table(summary, by=by, depth=depth, sort=sort, top=top)
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
    unsupported: Sequence[str] = [op for op, calls in summary.ledger.get("unsupported", {}).items() if calls]
    if not unsupported:
        return []
    listed = ", ".join(escape_latex(op) for op in sorted(unsupported))
    return [rf"  \multicolumn{{{width}}}{{l}}{{\footnotesize Unsupported, so not counted: {listed}.}} \\"]
