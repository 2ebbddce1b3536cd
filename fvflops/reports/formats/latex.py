"""LaTeX: tables with the booktabs package."""

from __future__ import annotations

from collections.abc import Sequence

from fvflops.reports.document import Chart, Command, Document, Gantt, Items, Part, Scatter, Table
from fvflops.reports.escaping import escape_latex
from fvflops.reports.text_picture import text_picture


def write(document: Document, *, width: int | None = None) -> str:
    r"""Return a document as LaTeX: tables as tabular environments, sentences as paragraphs."""
    blocks = [r"% \usepackage{booktabs}"]
    blocks += [rf"\textbf{{{escape_latex(document.title)}}}"] if document.title else []
    blocks += [_write_part(part) for part in document.parts]
    return "\n\n".join(block for block in blocks if block)


def _write_part(part: Part) -> str:
    if isinstance(part, (Table, Chart, Gantt, Scatter)):
        blocks = [rf"\textit{{{escape_latex(part.title)}}}"] if part.title else []
        drawn = _write_table(part) if isinstance(part, Table) else _write_verbatim(text_picture(part))
        return "\n\n".join([*blocks, drawn, *map(escape_latex, part.notes)])
    if isinstance(part, Items):
        heading = [escape_latex(part.heading)] if part.heading else []
        items = [rf"  \item {escape_latex(item)}" for item in part.items]
        return "\n".join([*heading, r"\begin{itemize}", *items, r"\end{itemize}"])
    if isinstance(part, Command):
        return f"{escape_latex(part.heading)}\n{_write_verbatim(part.command)}"
    return "\n\n".join(map(escape_latex, part.split("\n")))


def _write_verbatim(text: str) -> str:
    return f"\\begin{{verbatim}}\n{text}\n\\end{{verbatim}}"


def _write_table(table: Table) -> str:
    rows = [list(map(escape_latex, row)) for row in table.texts()]
    groups = [rows] if table.total is None else [rows[:-1], rows[-1:]]
    alignment = "".join("l" if column.is_text else "r" for column in table.columns)
    return write_tabular(alignment, [escape_latex(column.heading) for column in table.columns], groups)


def write_tabular(
    alignment: str, headings: Sequence[str], groups: Sequence[Sequence[Sequence[str]]], below: Sequence[str] = ()
) -> str:
    """Return a table of escaped cells, with a line above each group of rows, and lines of LaTeX below the last."""
    lines = [rf"\begin{{tabular}}{{{alignment}}}", r"  \toprule", _write_row(headings)]
    for group in filter(None, groups):
        lines += [r"  \midrule", *map(_write_row, group)]
    return "\n".join([*lines, r"  \bottomrule", *below, r"\end{tabular}"])


def _write_row(cells: Sequence[str]) -> str:
    return rf"  {' & '.join(cells)} \\"
