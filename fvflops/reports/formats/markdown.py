"""Markdown: GitHub's dialect."""

from __future__ import annotations

from fvflops.reports.document import Chart, Command, Document, Gantt, Items, Part, Scatter, Table
from fvflops.reports.escaping import escape_markdown
from fvflops.reports.text_picture import text_picture


def write(document: Document, *, width: int | None = None) -> str:
    """Return a document in GitHub's Markdown; `width` is ignored.

    >>> from fvflops.reports.document import module_column, number_column
    >>> table = Table("modules", (module_column(), number_column("flops", "FLOPs")), [("", 72)])
    >>> print(write(Document("plan", "Net", [table])))
    ### Net
    <BLANKLINE>
    | module | FLOPs |
    | :--- | ---: |
    | model | 72 |
    """
    blocks = [f"### {escape_markdown(document.title)}"] if document.title else []
    blocks += [_write_part(part) for part in document.parts]
    return "\n\n".join(block for block in blocks if block)


def _write_part(part: Part) -> str:
    if isinstance(part, (Table, Chart, Gantt, Scatter)):
        blocks = [f"**{escape_markdown(part.title)}**"] if part.title else []
        drawn = "\n".join(_write_table(part)) if isinstance(part, Table) else f"```\n{text_picture(part)}\n```"
        return "\n\n".join([*blocks, drawn, *map(escape_markdown, part.notes)])
    if isinstance(part, Items):
        heading = f"{escape_markdown(part.heading)}\n\n" if part.heading else ""
        return heading + "\n".join(f"- {escape_markdown(item)}" for item in part.items)
    if isinstance(part, Command):
        return f"{escape_markdown(part.heading)}\n\n```sh\n{part.command}\n```"
    return "\n\n".join(map(escape_markdown, part.split("\n")))


def _write_table(table: Table) -> list[str]:
    headings = [escape_markdown(column.heading) for column in table.columns]
    rules = [":---" if column.is_text else "---:" for column in table.columns]
    rows = [list(map(escape_markdown, row)) for row in table.texts()]
    for row in [rows[index] for index in table.strong] + rows[-1:] * (table.total is not None):
        first = next((index for index, cell in enumerate(row) if cell), None)
        if first is not None:
            row[first] = f"**{row[first]}**"
    return [f"| {' | '.join(cells)} |" for cells in (headings, rules, *rows)]
