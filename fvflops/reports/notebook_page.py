"""HTML for notebooks: a page in a frame of its own, and a table for viewers that show no frames or run no scripts."""

from __future__ import annotations

from collections import Counter
from html import escape

from fvflops.reports import html
from fvflops.reports.document import Document, Table
from fvflops.reports.formats import write_document
from fvflops.trace.notebook_table import write_notebook_table
from fvflops.units import format_percent, format_quantity
from fvflops.views.breakdown import Breakdown, format_value, sum_measures
from fvflops.views.summary_rows import depth_of

_MAX_ROWS = 20
# Characters of a page, at most: a notebook keeps every output, and GitHub shows no notebook above a few megabytes.
MAX_PAGE = 1_500_000
_TALL, _SHORT, _ROW = 620, 160, 29  # pixels of a frame, and of a row of a table

# The frame keeps styles and scripts of the page and of the notebook apart. The table is shown where the frame or this
# style is removed, as by GitHub and in untrusted notebooks, and where scripts are off.
_FRAME = """<div class="fvflops">\
<style>.fvflops>iframe+div{{display:none}}</style>\
<noscript><style>.fvflops>iframe{{display:none!important}}.fvflops>iframe+div{{display:block}}</style></noscript>\
<iframe sandbox="allow-scripts allow-downloads" title="{title}" loading="lazy" srcdoc="{page}" \
style="display:block;width:100%;height:{height}px;border:0;resize:vertical"></iframe>\
<div>{table}</div></div>"""


def render(breakdown: Breakdown) -> str:
    """Return the interactive page of a model in a frame, with a table of its largest modules as a fallback."""
    return put_in_frame("".join(html.render(breakdown)), render_table(breakdown), title="fvflops report")


def render_document(document: Document) -> str:
    """Return the page of a report in a frame of matching height, with its tables as a fallback."""
    tables = [table for table in document.readable_by("people").tables() if table.rows]
    charts = len(document.parts) - len(document.tables())
    height = min(_SHORT + _ROW * (sum(len(table.rows) + 2 for table in tables) + charts), _TALL)
    page = write_document(document, "html")
    return put_in_frame(page, write_tables(document), title=document.title or document.kind, height=height)


def write_tables(document: Document) -> str:
    """Return the first three tables of a report as HTML without styles."""
    tables = [table for table in document.readable_by("people").tables() if table.rows]
    return "".join(_write_table(table, document.title) for table in tables[:3])


def put_in_frame(page: str, table: str, *, title: str, height: int = _TALL) -> str:
    """Return a page in a frame, with a table where frames are not shown; only the table if the page is too large."""
    if len(page) > MAX_PAGE:
        return table
    # Escape only the characters that end an attribute or begin an entity.
    quoted = page.replace("&", "&amp;").replace('"', "&quot;")
    return _FRAME.format(title=escape(title), page=quoted, height=height, table=table)


def _write_table(table: Table, title: str) -> str:
    rows = table.indented()
    shown = rows if len(rows) <= _MAX_ROWS else [*rows[: _MAX_ROWS - 1], rows[-1]]
    left = sum(column.is_text for column in table.columns)
    order = sorted(range(len(table.columns)), key=lambda index: not table.columns[index].is_text)
    return write_notebook_table(
        table.title or title,
        [table.columns[index].heading for index in order],
        [[row[index] for index in order] for row in shown],
        note=f"{len(shown)} of {format_quantity(len(rows), 'row')}" if len(shown) < len(rows) else "",
        text_columns=left,
    )


def render_table(breakdown: Breakdown) -> str:
    """Return a table of at most twenty modules, down to two levels below the root, with every measure."""
    totals = {key: sum_measures(measure.values) for key, measure in breakdown.measures.items()}
    first = next(iter(totals.values()), Counter())
    modules = [module for module in breakdown.modules.modules() if depth_of(module.name) <= 2]
    largest = {module.name for module in sorted(modules, key=lambda module: -first[module.name])[:_MAX_ROWS]}
    rows = [
        [
            module.name or "(the whole model)",
            module.class_name,
            format_percent(first[module.name], first[""]),
            *(format_value(measure, totals[key][module.name]) for key, measure in breakdown.measures.items()),
        ]
        for module in modules
        if module.name in largest
    ]
    headings = ["Module", "Class", "Share", *(measure.title for measure in breakdown.measures.values())]
    return write_notebook_table(
        breakdown.modules.root.class_name, headings, rows, note=_write_note(breakdown, len(rows)), text_columns=2
    )


def _write_note(breakdown: Breakdown, rows: int) -> str:
    about = breakdown.about
    parts = [f"convention {about['table']}"] if "table" in about else []
    if unsupported := breakdown.ledger.get("unsupported", {}):
        parts.append(f"{format_quantity(sum(unsupported.values()), 'op call')} unsupported, so not counted")
    modules = sum(1 for _ in breakdown.modules.modules())
    if rows < modules:
        parts.append(f"{rows} of {format_quantity(modules, 'module')}")
    return " · ".join([*parts, "to_html(path) writes the full report"])
