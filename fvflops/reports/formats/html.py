"""HTML: a page in one file, without scripts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fvflops.reports.document import Chart, Command, Document, Gantt, Items, Part, Scatter, Table
from fvflops.reports.names import printable
from fvflops.reports.pictures.svg_chart import svg_chart
from fvflops.reports.pictures.svg_gantt import svg_gantt
from fvflops.reports.pictures.svg_scatter import svg_scatter
from fvflops.reports.terminal.op_coverage import TERMS

_STATUSES = ("ignored", "unsupported")
_LINK = f'<p><a href="{TERMS}">What ignored, zero-FLOP and unsupported mean</a></p>'
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{title}</title>
<style>
:root {{
  color-scheme: light dark; --page: light-dark(#f4f6fa, #0d1117); --card: light-dark(#ffffff, #161b24);
  --ink: light-dark(#18202c, #e8edf5); --quiet: light-dark(#5a6678, #98a4b6); --line: light-dark(#dfe4ec, #2a3240);
  --hover: light-dark(#e6effd, #1a2a47);
}}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 1320px; padding: 22px 24px 32px; background: var(--page); color: var(--ink); }}
body {{ font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "DejaVu Sans", sans-serif; }}
h1 {{ font-size: 24px; line-height: 1.2; letter-spacing: -0.02em; margin: 0 0 14px; overflow-wrap: anywhere; }}
h2 {{ font-size: 16px; letter-spacing: -0.01em; margin: 22px 0 8px; }}
p, ul {{ max-width: 110ch; overflow-wrap: anywhere; }}
.wide {{ overflow-x: auto; background: var(--card); border: 1px solid var(--line); border-radius: 14px;
  padding: 6px 8px; width: fit-content; max-width: 100%; margin: 10px 0; }}
.wide:focus-visible {{ outline: 2px solid var(--quiet); }}
table {{ border-collapse: separate; border-spacing: 0; font-size: 13px; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 4px 12px; text-align: right; white-space: pre; border-bottom: 1px solid var(--line); }}
th {{ font-size: 12px; color: var(--quiet); vertical-align: bottom; }}
tbody tr:last-child td {{ border-bottom: 0; }}
tbody tr:hover {{ background: var(--hover); }}
.text {{ text-align: left; }}
td.text:first-child {{ font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; }}
tfoot td {{ font-weight: 600; border-top: 1px solid var(--line); border-bottom: 0; }}
small {{ display: block; color: var(--quiet); font-size: 12.5px; max-width: 110ch; }}
.plot {{ overflow-x: auto; }}
.plot svg {{ width: 100%; min-width: 620px; height: auto; }}
@media (max-width: 760px) {{
  body {{ padding: 14px 12px 24px; }}
  th, td {{ padding: 3px 7px; }}
  td.text:first-child {{ position: sticky; left: 0; background: var(--card); max-width: 46vw; overflow: hidden;
    text-overflow: ellipsis; }}
}}
@media print {{ body {{ max-width: none; padding: 0; }} .wide {{ border: 0; }} }}
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
    body = "\n".join(map(_write_part, document.parts)).replace(f"<li>Terms: {_escape(TERMS)}</li>", "")
    if any(status in body.lower() for status in _STATUSES):
        body += f"\n{_LINK}"
    return _PAGE.format(title=_escape(document.title or document.kind), body=body)


def _write_part(part: Part) -> str:
    if isinstance(part, Table):
        title = f"<h2>{_escape(part.title)}</h2>\n" if part.title else ""
        table = f"<table>\n{_write_rows(part)}\n</table>"
        return f'{title}<div class="wide" tabindex="0">{table}</div>{_write_notes(part.notes)}'
    if isinstance(part, Chart):
        title = f"<h2>{_escape(part.title)}</h2>\n" if part.title else ""
        picture = f'<div class="plot" tabindex="0">{svg_chart(part, standalone=False)}</div>'
        return f"{title}{picture}{_write_notes(part.notes)}"
    if isinstance(part, Gantt):
        title = f"<h2>{_escape(part.title)}</h2>\n" if part.title else ""
        return f"{title}{svg_gantt(part)}{_write_notes(part.notes)}"
    if isinstance(part, Scatter):
        title = f"<h2>{_escape(part.title)}</h2>\n" if part.title else ""
        return f'{title}<div class="plot" tabindex="0">{svg_scatter(part)}</div>{_write_notes(part.notes)}'
    if isinstance(part, Items):
        heading = f"<p>{_escape(part.heading)}</p>\n" if part.heading else ""
        return heading + "<ul>" + "".join(f"<li>{_escape(item)}</li>" for item in part.items) + "</ul>"
    if isinstance(part, Command):
        command = f'<pre class="wide" tabindex="0"><code>{_escape(part.command)}</code></pre>'
        return f"<p>{_escape(part.heading)}</p>\n{command}"
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
