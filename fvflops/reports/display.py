"""How results are shown: `print` writes a table, a notebook shows a page, and `repr` is one short line."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

from fvflops.reports.document import Document
from fvflops.reports.formats import write_document

WIDTH = 80  # columns of text by `print`


class Displayed:
    """A result that is shown by its report; a class has its own `__repr__`, which is short and computes nothing.

    `_report` names the function of the result that returns its report, as "module:function": a report imports the
    class of its result, which therefore cannot import the report. `_page` does so for a notebook's page.
    """

    __slots__ = ()
    _report: ClassVar[str] = ""
    _page: ClassVar[str] = ""

    def _document(self, report: str = "") -> Document:
        module, _, function = (report or self._report).partition(":")
        document: Document = getattr(importlib.import_module(module), function)(self)
        return document

    def __str__(self) -> str:
        return write_document(self._document(), width=WIDTH)

    def _repr_html_(self) -> str:
        from fvflops.reports import notebook_page

        return notebook_page.render_document(self._document(self._page))

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Return the text that IPython shows for a result; notebooks show `_repr_html_`."""
        return {"text/plain": str(self)}
