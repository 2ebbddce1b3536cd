"""The reports of a count, and the files that timelines are exported to; they see neither a model nor a tensor.

A report is one file and one entry of REPORTS: `fvflops count --format NAME`, its help and its checks read it there.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from fvflops.trace.timeline import Timeline

_ALL = ("module", "operator", "both")
_MODULE = ("module",)
_ORDER = ("sort", "top")


@dataclass(frozen=True, slots=True)
class Report:
    """One format of `fvflops count`: a function of a module, which is imported when the report is first made.

    It is called with what the report is made `of`: a "summary" (`trace.Summary`), a "breakdown"
    (`views.breakdown.Breakdown`) or a "graph" (`trace.calls.OpGraph`); and with those of the options that it `takes`,
    by keyword, such as `depth`, the levels below the root that are shown (None is the report's own choice). `views` are
    the values of `by` that it has. It returns text, in pieces or whole, or bytes, which need a file (`binary`).
    """

    module: str
    note: str
    function: str = "render"
    of: str = "summary"
    views: Sequence[str] = _ALL
    takes: Sequence[str] = ("by", "depth")
    binary: bool = False

    def __call__(self, source: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(self.module), self.function)(source, **options)


REPORTS: Mapping[str, Report] = {
    "text": Report(
        "fvflops.reports.terminal.terminal",
        "for a terminal",
        takes=("by", "depth", *_ORDER, "collapse", "width", "colour", "encoding"),
    ),
    "markdown": Report("fvflops.reports.markdown", "GitHub's tables", takes=("by", "depth", *_ORDER, "collapse")),
    "csv": Report("fvflops.reports.csv", "exact numbers of each row", takes=("by", "depth", *_ORDER, "collapse")),
    "json": Report("fvflops.reports.json", "all exact numbers, whatever is shown"),
    "html": Report("fvflops.reports.html", "an interactive page that needs no network", of="breakdown", takes=()),
    "latex": Report("fvflops.reports.paper.latex", "a table of the booktabs package", takes=("by", "depth", *_ORDER)),
    "fvcore": Report(
        "fvflops.reports.fvcore.table",
        "fvcore's flop_count_table",
        "render_covered",
        takes=("by", "depth", *_ORDER, "collapse"),
    ),
    "tree": Report(
        "fvflops.reports.fvcore.tree", "the text of fvcore's flop_count_str", "render_covered", views=_MODULE
    ),
    "paper": Report(
        "fvflops.reports.paper.paper",
        "a Markdown table with the columns of papers",
        views=_MODULE,
        takes=("by", "depth", *_ORDER),
    ),
    **{
        kind: Report(
            "fvflops.reports.pictures.icicle",
            "a picture of the module tree",
            f"render_{kind}",
            of="breakdown",
            views=_MODULE,
            takes=("depth",),
            binary=True,
        )
        for kind in ("svg", "png")
    },
    "dot": Report("fvflops.reports.files.dot", "a graph for Graphviz", of="graph", views=_MODULE, takes=("depth",)),
    "model-explorer": Report(
        "fvflops.reports.files.model_explorer",
        "a graph for Google's Model Explorer",
        of="graph",
        views=_MODULE,
        takes=("depth",),
    ),
}


class Export(Protocol):
    """What turns a timeline into the pieces of a file that other programs read: `file.writelines(export(timeline))`.

    `weight` is what widths are in proportion to, one of `fvflops.trace.timeline.WEIGHTS`; None is time where it was
    measured, else flops. One that is not known raises TraceError, before any piece is made.
    """

    def __call__(self, timeline: Timeline, *, weight: str | None = None) -> Iterator[str]: ...


def _later(module: str) -> Any:
    """Return a module's `render`; the module is imported when that is first called, for a count needs none."""

    def call(*args: Any, **options: Any) -> Any:
        return importlib.import_module(module).render(*args, **options)

    return call


EXPORTS: Mapping[str, Export] = {
    "chrome-trace": _later("fvflops.reports.files.chrome_trace"),
    "speedscope": _later("fvflops.reports.files.speedscope"),
    "flame-graph": _later("fvflops.reports.files.flame_graph"),
}

__all__ = ["EXPORTS", "REPORTS", "Export", "Report"]
