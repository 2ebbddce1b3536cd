"""HTML: a page in one file, without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fvflops.reports.document import Chart, Document, Items, Part, Table
from fvflops.reports.names import printable
from fvflops.reports.pictures.svg_chart import svg_chart

_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; margin: .5rem 0; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .2rem .7rem; text-align: right; white-space: pre; border-bottom: 1px solid #8884; }}
th {{ border-bottom: 2px solid #8888; }}
.text {{ text-align: left; }}
tfoot td {{ font-weight: 600; }}
small {{ display: block; opacity: .8; }}
</style>
<h1>{title}</h1>
{body}
</html>"""


def write(document: Document, *, width: int | None = None) -> str:
    """Return a document as HTML that loads nothing from the network.

    >>> from fvflops.reports.document import module_column, number_column
    >>> table = Table("modules", (module_column(), number_column("flops", "FLOPs")), [("", 72)])
    >>> "<td>72</td>" in write(Document("plan", "Net", [table]))
    True
    """
    body = "\n".join(map(_write_part, document.parts))
    return _PAGE.format(title=_escape(document.title or document.kind), body=body)


def _write_part(part: Part) -> str:
    if isinstance(part, Table):
        title = f"<h2>{_escape(part.title)}</h2>\n" if part.title else ""
        return f'{title}<div class="wide"><table>\n{_write_rows(part)}\n</table></div>{_write_notes(part.notes)}'
    if isinstance(part, Chart):
        title = f"<h2>{_escape(part.title)}</h2>\n" if part.title else ""
        return f"{title}{svg_chart(part, standalone=False)}{_write_notes(part.notes)}"
    if isinstance(part, Items):
        heading = f"<p>{_escape(part.heading)}</p>\n" if part.heading else ""
        return heading + "<ul>" + "".join(f"<li>{_escape(item)}</li>" for item in part.items) + "</ul>"
    return "\n".join(f"<p>{_escape(line)}</p>" for line in part.split("\n"))


def _write_notes(notes: Sequence[str]) -> str:
    return "".join(f"\n<small>{_escape(note)}</small>" for note in notes)


def _write_rows(table: Table) -> str:
    rows = [_write_row(table, row, "td") for row in table.indented()]
    footer = f"\n<tfoot>{rows.pop()}</tfoot>" if table.total is not None else ""
    header = _write_row(table, [column.heading for column in table.columns], "th")
    return f"<thead>{header}</thead>\n<tbody>\n" + "\n".join(rows) + f"\n</tbody>{footer}"


def _write_row(table: Table, cells: list[str], tag: str) -> str:
    attributes = [' class="text"' if column.is_text else "" for column in table.columns]
    joined = "".join(
        f"<{tag}{attribute}>{_escape(cell)}</{tag}>" for cell, attribute in zip(cells, attributes, strict=True)
    )
    return f"<tr>{joined}</tr>"


def _escape(text: str) -> str:
    return escape(printable(text))
