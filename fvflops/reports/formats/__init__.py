"""Formats in which every report can be written: the module of that name has `write(document, width=None)`."""

from __future__ import annotations

import importlib

from fvflops.reports import FORMATS as FORMATS
from fvflops.reports.document import Document
from fvflops.text import suggest

DATA_FORMATS = ("csv", "json")


def write_document(document: Document, format: str = "text", *, width: int | None = None) -> str:
    """Return a document as text in a format; `width` limits the lines of plain text, None for no limit.

    An unknown format raises ValueError with the closest match.

    >>> write_document(Document("plan"), "htlm")
    Traceback (most recent call last):
    ValueError: format must be one of text, markdown, csv, json, html, latex; got 'htlm': did you mean 'html'?
    """
    check_format(format)
    backend = importlib.import_module(f"fvflops.reports.formats.{format}")
    readable = document.readable_by("data" if format in DATA_FORMATS else "people")
    return str(backend.write(readable, width=width))


def check_format(name: str) -> None:
    """Raise ValueError for an unknown format, with a close match if there is one."""
    if name not in FORMATS:
        hint = suggest(name, FORMATS)
        raise ValueError(f"format must be one of {', '.join(FORMATS)}; got {name!r}{hint}")
