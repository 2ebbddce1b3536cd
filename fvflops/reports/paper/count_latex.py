"""A LaTeX table, with the booktabs package, in the units of papers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fvflops.counting.metrics import METRICS
from fvflops.reports.document import Document, Items, Table, number_column, text_column
from fvflops.reports.escaping import escape_latex
from fvflops.reports.formats import write_document
from fvflops.reports.paper.paper_rows import list_paper_rows
from fvflops.reports.terminal.op_coverage import op_coverage_notes
from fvflops.trace import Summary
from fvflops.views.frame import list_rows
from fvflops.views.summary_rows import check_view


def render(
    summary: Summary, *, by: str = "module", depth: int | None = None, sort: str | None = None, top: int | None = None
) -> str:
    r"""Return a tabular of parameters in 10^6, FLOPs in 10^9 and activations in 10^6.

    There is one row for the model and, with `depth`, one for each module down to that level below the root, sorted (by
    a metric in descending order) if `sort` or `top` is given; numbers have three significant digits. Comments above the
    table, for the caption, name the convention, the inputs, the ops that are not counted and the versions; a line below
    the table names the unsupported ops. By "operator" and "both" the rows are those of the CSV report. The document
    needs the package booktabs, and XeLaTeX or LuaLaTeX for names in other scripts. An unknown `by` raises ValueError.

    >>> from fvflops.trace import ModuleInfo, ModuleTree
    >>> columns = {"parameters": {"": 25_557_032}, "flops": {"": 4_089_184_256}}
    >>> print(render(Summary(ModuleTree({"": ModuleInfo("", "", "Res_Net")}), columns)))
    % Model: Res_Net.
    % Needs \usepackage{booktabs}.
    \begin{tabular}{lrr}
      \toprule
      Model & Params (M) & FLOPs (G) \\
      \midrule
      Res\_Net & 25.6 & 4.09 \\
      \bottomrule
    \end{tabular}
    """
    check_view(by, report="the LaTeX report")
    if by != "module":
        return _write_operators(summary, by, depth, sort, top)
    headings, rows, notes = list_paper_rows(summary, by=by, depth=depth, report="the LaTeX report", sort=sort, top=top)
    first, *others = [_write_row([escape_latex(name), *cells]) for name, cells in rows]
    return "\n".join(
        [
            *(f"% {note}" for note in notes),
            r"% Needs \usepackage{booktabs}.",
            rf"\begin{{tabular}}{{l{'r' * len(headings)}}}",
            r"  \toprule",
            _write_row(["Module" if depth else "Model", *headings]),
            r"  \midrule",
            first,
            *([r"  \midrule", *others] if others else []),
            r"  \bottomrule",
            *_note_unsupported(summary, 1 + len(headings)),
            r"\end{tabular}",
        ]
    )


def _write_operators(summary: Summary, by: str, depth: int | None, sort: str | None, top: int | None) -> str:
    headings, rows = list_rows(summary, by=by, depth=depth, sort=sort, top=top)
    name_columns = 1 if by == "operator" else 2
    columns = [
        *(replace(text_column(heading), form=lambda name: name or "model") for heading in headings[:name_columns]),
        *(
            number_column(heading, METRICS[heading].short if heading in METRICS else heading)
            for heading in headings[name_columns:]
        ),
    ]
    notes = op_coverage_notes(summary, escape=str)
    document = Document("summary", parts=[Table("operators", columns, rows, noun="row"), Items("", notes)])
    return write_document(document, "latex")


def _note_unsupported(summary: Summary, width: int) -> list[str]:
    unsupported = [op for op, calls in summary.ledger.get("unsupported", {}).items() if calls]
    if not unsupported:
        return []
    listed = ", ".join(escape_latex(op) for op in sorted(unsupported))
    return [rf"  \multicolumn{{{width}}}{{l}}{{\footnotesize Unsupported, so not counted: {listed}.}} \\"]


def _write_row(cells: Sequence[str]) -> str:
    return rf"  {' & '.join(cells)} \\"
