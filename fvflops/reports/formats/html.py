"""HTML: a page in one file, whose tables can be sorted and searched."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from html import escape

from fvflops.reports.document import Chart, Command, Document, Gantt, Items, Part, Scatter, Table, Value
from fvflops.reports.escaping import printable
from fvflops.reports.html import digest, read_style
from fvflops.reports.html.script import REPORT, join_scripts
from fvflops.reports.pictures.svg_picture import NARROW, svg_chart, svg_gantt, svg_scatter
from fvflops.reports.terminal.op_coverage import TERMS

_STATUSES = ("ignored", "unsupported")
_LINK = f'<p><a href="{TERMS}">What ignored, zero-FLOP and unsupported mean</a></p>'
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{title}</title>
<style>{style}</style>
<header class="top">
<h1>{title}</h1>
<div class="tools">
<label id="search-label" hidden><span class="hidden">Search the rows of tables</span><input id="search" type="search"
 placeholder="Search rows  ( / )" autocomplete="off" spellcheck="false"></label>
<button id="theme" class="button" type="button" hidden>Auto</button>
</div>
</header>
<main>
{body}
</main>
<script>{script}</script>
</html>"""


def write(document: Document, *, width: int | None = None) -> str:
    """Return a document as HTML that loads nothing from the network."""
    body = "\n".join(map(_write_part, document.parts))
    if any(status in body.lower() for status in _STATUSES):
        body += f"\n{_LINK}"
    style, script = read_style("base.css") + read_style("document.css"), join_scripts(REPORT)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src {digest(script)}; base-uri 'none'"
    title = _escape(document.title or document.kind.capitalize())
    return _PAGE.format(title=title, policy=policy, style=style, script=script, body=body)


def _write_part(part: Part) -> str:
    if isinstance(part, (Table, Chart, Gantt, Scatter)):
        title = f"<h2>{_escape(part.title)}</h2>\n" if part.title else ""
        notes = "".join(f"\n<small>{_write_sentence(note)}</small>" for note in part.notes)
        return f"{title}{_draw(part)}{notes}"
    if isinstance(part, Items):
        if not part.heading:
            return "\n".join(f"<p>{_write_sentence(item)}</p>" for item in part.items)
        items = "".join(f"<li>{_write_sentence(item)}</li>" for item in part.items)
        return f"<p>{_escape(part.heading)}</p>\n<ul>{items}</ul>"
    if isinstance(part, Command):
        command = f'<pre class="wide" tabindex="0"><code>{_escape(part.command)}</code></pre>'
        return f"<p>{_escape(part.heading)}</p>\n{command}"
    return "\n".join(f"<p>{_write_sentence(line)}</p>" for line in part.split("\n"))


def _draw(part: Table | Chart | Gantt | Scatter) -> str:
    if isinstance(part, Table):
        return f'<div class="wide" tabindex="0"><table>\n{_write_rows(part)}\n</table></div>'
    if isinstance(part, Gantt):
        return svg_gantt(part)
    draw = partial(svg_chart, part, standalone=False) if isinstance(part, Chart) else partial(svg_scatter, part)
    # One picture for wide pages and one for narrow ones, of which the style shows one.
    return f'<div class="plot"><div class="full">{draw()}</div><div class="narrow">{draw(width=NARROW)}</div></div>'


def _write_sentence(text: str) -> str:
    """Return a sentence in which commands between backticks are code.

    >>> _write_sentence("`fvflops plan` lists <all>.")
    '<code>fvflops plan</code> lists &lt;all&gt;.'
    """
    return re.sub("`([^`]+)`", r"<code>\1</code>", _escape(text))


def _write_rows(table: Table) -> str:
    header = _write_row(table, [column.heading for column in table.columns], "th")
    values = [*table.rows, *([] if table.total is None else [table.total])]
    rows = [_write_row(table, cells, "td", row) for cells, row in zip(table.indented(), values, strict=True)]
    footer = f"\n<tfoot>{rows.pop()}</tfoot>" if table.total is not None else ""
    return f"<thead>{header}</thead>\n<tbody>\n" + "\n".join(rows) + f"\n</tbody>{footer}"


def _write_row(table: Table, cells: Sequence[str], tag: str, values: Sequence[Value] | None = None) -> str:
    """Return a row; numbers have their exact values, and modules their whole names, to sort by."""
    parts = []
    for index, (column, cell) in enumerate(zip(table.columns, cells, strict=True)):
        attributes = ' class="text"' if column.is_text else ""
        value = None if values is None else values[index]
        if column.tree and value is not None:
            attributes += f' data-name="{_escape(str(value) or cell)}"'
        elif isinstance(value, (int, float)) and not column.is_text:
            attributes += f' data-value="{float(value):.17g}"'
        parts.append(f"<{tag}{attributes}>{_escape(cell)}</{tag}>")
    return f"<tr>{''.join(parts)}</tr>"


def _escape(text: str) -> str:
    return escape(printable(text))
