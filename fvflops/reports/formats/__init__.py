"""The formats that every report can be written in."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

from fvflops.reports.document import Document
from fvflops.text import nearest

# Format → what it is for; the module of the same name has `write(document, width=None)`.
FORMATS: Mapping[str, str] = {
    "text": "for a terminal",
    "markdown": "GitHub's tables",
    "csv": "the exact numbers of the main table",
    "json": "all exact numbers",
    "html": "a page that needs no network",
    "latex": "tables of the booktabs package",
}
DATA_FORMATS = ("csv", "json")


def write_document(document: Document, format: str = "text", *, width: int | None = None) -> str:
    """Return a document as text in a format; `width` is the longest line of plain text, None for any.

    A format that does not exist raises ValueError, which names the nearest.

    >>> write_document(Document("plan"), "htlm")
    Traceback (most recent call last):
    ValueError: no format is called 'htlm': take 'html', or another of text, markdown, csv, json, html, latex
    """
    check_format(format)
    backend = importlib.import_module(f"fvflops.reports.formats.{format}")
    readable = document.readable_by("data" if format in DATA_FORMATS else "people")
    return str(backend.write(readable, width=width))


def check_format(name: str, formats: Mapping[str, str] = FORMATS) -> None:
    """Raise ValueError, naming the nearest, where there is no format of that name."""
    if name not in formats:
        near = nearest(name, formats, cutoff=0)
        raise ValueError(f"no format is called {name!r}: take {near!r}, or another of {', '.join(formats)}")
