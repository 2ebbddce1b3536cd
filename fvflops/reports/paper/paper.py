"""A table in GitHub's Markdown, in the units of papers."""

from __future__ import annotations

from fvflops.reports.count_markdown import write_table
from fvflops.reports.escaping import escape_markdown
from fvflops.reports.paper.paper_rows import list_paper_rows
from fvflops.trace import Summary


def render(
    summary: Summary, *, by: str = "module", depth: int | None = None, sort: str | None = None, top: int | None = None
) -> str:
    """Return parameters in 10^6, FLOPs in 10^9 and activations in 10^6, with three significant digits.

    There is one row for the model and, with `depth`, one for each module down to that level below the root, sorted (by
    a metric in descending order) if `sort` or `top` is given. Notes below the table name the convention, the inputs,
    the ops that are not counted and the versions. A `by` other than "module" raises ValueError.
    """
    headings, rows, notes = list_paper_rows(summary, by=by, depth=depth, report="the paper report", sort=sort, top=top)
    names = [escape_markdown(name) for name, _ in rows]
    if depth:  # bold, as a module may have the name of the model
        names[:1] = [f"**{name}**" for name in names[:1]]
    lines = [[name, *cells] for name, (_, cells) in zip(names, rows, strict=True)]
    table = write_table(["Module" if depth else "Model"], headings, lines)
    return "\n".join([*table, "", *(f"- {escape_markdown(note)}" for note in notes)])
