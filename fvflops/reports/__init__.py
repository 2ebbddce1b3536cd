"""The reports: each turns a summary into text, and sees neither a model nor a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from fvflops.reports import csv, json, markdown, table, tree
from fvflops.trace import Summary


class Report(Protocol):
    """What turns a summary into text.

    `by` is "module", "operator" or "both"; a view that a report does not offer raises ValueError. `depth` is how many
    levels below the root are shown; None is the report's own choice, 3 for the table and all for the others.
    """

    def __call__(self, summary: Summary, *, by: str = "module", depth: int | None = None) -> str: ...


REPORTS: Mapping[str, Report] = {
    "table": table.render,
    "tree": tree.render,
    "json": json.render,
    "csv": csv.render,
    "markdown": markdown.render,
}

__all__ = ["REPORTS", "Report"]
