"""The paper report: a table in GitHub's Markdown with the columns that papers have."""

from __future__ import annotations

from fvflops.reports.markdown import write_table
from fvflops.reports.names import escape_markdown
from fvflops.reports.paper.paper_rows import list_paper_rows
from fvflops.trace import Summary


def render(
    summary: Summary, *, by: str = "module", depth: int | None = None, sort: str | None = None, top: int | None = None
) -> str:
    """Return parameters in 10^6, FLOPs in 10^9 and activations in 10^6, to three figures.

    There is one row for the model, and with `depth` one for each module down to so many levels below the root, those
    with most first where `sort` or `top` is given. Notes below the table name the convention, the inputs, what is not
    counted and the versions. Another view than "module" raises ValueError.
    """
    heads, rows, notes = list_paper_rows(summary, by=by, depth=depth, report="the paper report", sort=sort, top=top)
    names = [escape_markdown(name) for name, _ in rows]
    if depth:  # a module may be named as the model is
        names[:1] = [f"**{name}**" for name in names[:1]]
    lines = [[name, *cells] for name, (_, cells) in zip(names, rows, strict=True)]
    table = write_table(["Module" if depth else "Model"], heads, lines)
    return "\n".join([*table, "", *(f"- {escape_markdown(note)}" for note in notes)])
