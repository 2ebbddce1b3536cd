"""Everything that can be written: documents, reports of a count, and files for other programs.

A format is one entry of DOCUMENTS, REPORTS or EXPORTS and one function, which is imported on the first call.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ALL = ("module", "operator", "both")
_MODULE = ("module",)
_RANKED = ("by", "depth", "sort", "top")
_COLLAPSED = (*_RANKED, "collapse")


@dataclass(frozen=True, slots=True)
class Report:
    """One format: its text in `--help`, and the function that writes it, as "module:function".

    The function's argument is the `source`: a "summary" (`trace.Summary`), a "breakdown" (`views.breakdown.Breakdown`),
    a "graph" (`trace.calls.OpGraph`), a "trace" (`trace.Trace`) or a "timeline" (`trace.timeline.Timeline`). `options`
    are the keyword arguments that it accepts, such as `depth`, the levels below the root that are shown; None is the
    report's default. `views` are the accepted values of `by`. The result is a string, an iterator of strings or, if
    `binary`, bytes.

    A function of a timeline yields the parts of a file: `file.writelines(report(timeline))`. Widths are proportional to
    `weight`, one of `fvflops.trace.timeline.WEIGHTS`; None is time where it was measured, else flops. A weight that the
    timeline lacks raises TraceError, before anything is yielded.
    """

    help: str
    function: str
    source: str = "summary"
    views: Sequence[str] = _ALL
    options: Sequence[str] = ("by", "depth")
    binary: bool = False

    def __call__(self, data: Any, **options: Any) -> Any:
        module, _, function = self.function.partition(":")
        return getattr(importlib.import_module(module), function)(data, **options)


_COUNT, _FVCORE, _ICICLE, _GRAPH, _TIMELINE = (
    f"fvflops.reports.{name}"
    for name in ("count_report", "fvcore_format", "pictures.icicle", "files.model_graph", "files.timeline_files")
)
_PICTURE = "a picture of the module tree"
# Formats of all commands, whose documents `fvflops.reports.formats` writes; the functions here write a count.
DOCUMENTS: Mapping[str, Report] = {
    "text": Report("for a terminal", f"{_COUNT}:write_text", options=(*_COLLAPSED, "width", "colour", "encoding")),
    "markdown": Report("GitHub's tables", f"{_COUNT}:write_markdown", options=_COLLAPSED),
    "csv": Report("the exact numbers of the main table", f"{_COUNT}:write_exact", options=(*_COLLAPSED, "format")),
    "json": Report("all exact numbers", "fvflops.reports.count_json:render"),
    "html": Report("a page that needs no network", "fvflops.reports.html:render", "breakdown", options=()),
    "latex": Report("tables of the booktabs package", f"{_COUNT}:write_latex", options=_RANKED),
}
FORMATS: Mapping[str, str] = {name: report.help for name, report in DOCUMENTS.items()}
REPORTS: Mapping[str, Report] = {
    **DOCUMENTS,
    "fvcore": Report("fvcore's flop_count_table", f"{_FVCORE}:write_covered_table", options=_COLLAPSED),
    "tree": Report("the text of fvcore's flop_count_str", f"{_FVCORE}:write_covered_tree", views=_MODULE),
    "paper": Report(
        "a Markdown table with the columns of papers", f"{_COUNT}:write_paper", "summary", _MODULE, _RANKED
    ),
    "svg": Report(_PICTURE, f"{_ICICLE}:render_svg", "breakdown", _MODULE, ("depth",), binary=True),
    "png": Report(_PICTURE, f"{_ICICLE}:render_png", "breakdown", _MODULE, ("depth",), binary=True),
    "dot": Report("a graph for Graphviz", f"{_GRAPH}:write_dot", "graph", _MODULE, ("depth",)),
    "model-explorer": Report(
        "a graph for Google's Model Explorer", f"{_GRAPH}:write_model_explorer", "graph", _MODULE, ()
    ),
    "trace": Report("the Trace, which diff reads", "fvflops.trace.codec:encode", "trace", _MODULE, ()),
}
EXPORTS: Mapping[str, Report] = {
    "chrome-trace": Report("a timeline for Perfetto and chrome://tracing", f"{_TIMELINE}:write_events", "timeline"),
    "speedscope": Report("a timeline for speedscope", f"{_TIMELINE}:write_speedscope", "timeline"),
    "flame-graph": Report("collapsed stacks", f"{_TIMELINE}:write_stacks", "timeline"),
}
