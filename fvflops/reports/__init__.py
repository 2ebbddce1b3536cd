"""Report formats of a count, and export formats of a timeline.

A report format is one module and one entry of REPORTS, which `fvflops count --format NAME`, its help and its argument
checks read.
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
_RANKING = ("sort", "top")


@dataclass(frozen=True, slots=True)
class Report:
    """One format of `fvflops count`: the `function` of `module`, which is imported on the first call.

    `help` describes the format in `--help`. The function's argument is the `source`: a "summary" (`trace.Summary`), a
    "breakdown" (`views.breakdown.Breakdown`), a "graph" (`trace.calls.OpGraph`) or a "trace" (`trace.Trace`). `options`
    are the keyword arguments that it accepts, such as `depth`, the levels below the root that are shown; None is the
    report's default. `views` are the accepted values of `by`. The result is a string, an iterator of strings or, if
    `binary`, bytes.
    """

    module: str
    help: str
    function: str = "render"
    source: str = "summary"
    views: Sequence[str] = _ALL
    options: Sequence[str] = ("by", "depth")
    binary: bool = False

    def __call__(self, data: Any, **options: Any) -> Any:
        return getattr(importlib.import_module(self.module), self.function)(data, **options)


REPORTS: Mapping[str, Report] = {
    "text": Report(
        "fvflops.reports.count_report",
        "for a terminal",
        "write_text",
        options=("by", "depth", *_RANKING, "collapse", "width", "colour", "encoding"),
    ),
    "markdown": Report(
        "fvflops.reports.count_report",
        "GitHub's tables",
        "write_markdown",
        options=("by", "depth", *_RANKING, "collapse"),
    ),
    "csv": Report(
        "fvflops.reports.count_report",
        "exact numbers of each row",
        "write_csv",
        options=("by", "depth", *_RANKING, "collapse"),
    ),
    "json": Report("fvflops.reports.count_json", "all exact numbers, whatever is shown"),
    "html": Report("fvflops.reports.html", "an interactive page that needs no network", source="breakdown", options=()),
    "latex": Report(
        "fvflops.reports.paper_tables",
        "a table of the booktabs package",
        "write_latex",
        options=("by", "depth", *_RANKING),
    ),
    "fvcore": Report(
        "fvflops.reports.fvcore.fvcore_table",
        "fvcore's flop_count_table",
        "render_covered",
        options=("by", "depth", *_RANKING, "collapse"),
    ),
    "tree": Report(
        "fvflops.reports.fvcore.tree", "the text of fvcore's flop_count_str", "render_covered", views=_MODULE
    ),
    "paper": Report(
        "fvflops.reports.paper_tables",
        "a Markdown table with the columns of papers",
        "write_paper",
        views=_MODULE,
        options=("by", "depth", *_RANKING),
    ),
    **{
        kind: Report(
            "fvflops.reports.pictures.icicle",
            "a picture of the module tree",
            f"render_{kind}",
            source="breakdown",
            views=_MODULE,
            options=("depth",),
            binary=True,
        )
        for kind in ("svg", "png")
    },
    "dot": Report(
        "fvflops.reports.files.dot", "a graph for Graphviz", source="graph", views=_MODULE, options=("depth",)
    ),
    "model-explorer": Report(
        "fvflops.reports.files.model_explorer",
        "a graph for Google's Model Explorer",
        source="graph",
        views=_MODULE,
        options=(),
    ),
    "trace": Report(
        "fvflops.trace.codec", "the Trace, which diff reads", "encode", source="trace", views=_MODULE, options=()
    ),
}


class Export(Protocol):
    """A function that yields the parts of an export file: `file.writelines(export(timeline))`.

    Widths are proportional to `weight`, one of `fvflops.trace.timeline.WEIGHTS`; None is time where it was measured,
    else flops. A weight that the timeline lacks raises TraceError, before anything is yielded.
    """

    def __call__(self, timeline: Timeline, *, weight: str | None = None) -> Iterator[str]: ...


def _lazy_render(module: str) -> Any:
    """Return a function that calls the module's `render`, importing the module on the first call."""

    def call(*args: Any, **options: Any) -> Any:
        return importlib.import_module(module).render(*args, **options)

    return call


EXPORTS: Mapping[str, Export] = {
    "chrome-trace": _lazy_render("fvflops.reports.files.chrome_trace"),
    "speedscope": _lazy_render("fvflops.reports.files.speedscope"),
    "flame-graph": _lazy_render("fvflops.reports.files.flame_graph"),
}

__all__ = ["EXPORTS", "REPORTS", "Export", "Report"]
