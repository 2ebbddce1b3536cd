"""Everything that can be written: documents, reports of a count, and files for other programs.

A format is one entry of WRITERS and one function, which is imported on the first call. FORMATS, REPORTS and EXPORTS
select from it for the command line, its help and its argument checks.
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
    `binary`, bytes. All commands write `documents` in this format, by `fvflops.reports.formats`.

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
    documents: bool = False

    def __call__(self, data: Any, **options: Any) -> Any:
        module, _, function = self.function.partition(":")
        return getattr(importlib.import_module(module), function)(data, **options)


WRITERS: Mapping[str, Report] = {
    "text": Report(
        "for a terminal",
        "fvflops.reports.count_report:write_text",
        options=(*_COLLAPSED, "width", "colour", "encoding"),
        documents=True,
    ),
    "markdown": Report(
        "GitHub's tables", "fvflops.reports.count_report:write_markdown", options=_COLLAPSED, documents=True
    ),
    "csv": Report(
        "the exact numbers of the main table",
        "fvflops.reports.count_report:write_exact",
        options=(*_COLLAPSED, "format"),
        documents=True,
    ),
    "json": Report("all exact numbers", "fvflops.reports.count_json:render", documents=True),
    "html": Report(
        "a page that needs no network", "fvflops.reports.html:render", "breakdown", options=(), documents=True
    ),
    "latex": Report(
        "tables of the booktabs package", "fvflops.reports.count_report:write_latex", options=_RANKED, documents=True
    ),
    "fvcore": Report(
        "fvcore's flop_count_table", "fvflops.reports.fvcore_format:write_covered_table", options=_COLLAPSED
    ),
    "tree": Report(
        "the text of fvcore's flop_count_str", "fvflops.reports.fvcore_format:write_covered_tree", views=_MODULE
    ),
    "paper": Report(
        "a Markdown table with the columns of papers",
        "fvflops.reports.count_report:write_paper",
        views=_MODULE,
        options=_RANKED,
    ),
    **{
        kind: Report(
            "a picture of the module tree",
            f"fvflops.reports.pictures.icicle:render_{kind}",
            "breakdown",
            _MODULE,
            ("depth",),
            binary=True,
        )
        for kind in ("svg", "png")
    },
    "dot": Report("a graph for Graphviz", "fvflops.reports.files.model_graph:write_dot", "graph", _MODULE, ("depth",)),
    "model-explorer": Report(
        "a graph for Google's Model Explorer",
        "fvflops.reports.files.model_graph:write_model_explorer",
        "graph",
        _MODULE,
        (),
    ),
    "trace": Report("the Trace, which diff reads", "fvflops.trace.codec:encode", "trace", _MODULE, ()),
    "chrome-trace": Report(
        "a timeline for Perfetto and chrome://tracing",
        "fvflops.reports.files.timeline_files:write_events",
        "timeline",
        _MODULE,
        (),
    ),
    "speedscope": Report(
        "a timeline for speedscope", "fvflops.reports.files.timeline_files:write_speedscope", "timeline", _MODULE, ()
    ),
    "flame-graph": Report(
        "collapsed stacks", "fvflops.reports.files.timeline_files:write_stacks", "timeline", _MODULE, ()
    ),
}
# Format of documents → its help text.
FORMATS: Mapping[str, str] = {name: report.help for name, report in WRITERS.items() if report.documents}
REPORTS: Mapping[str, Report] = {name: report for name, report in WRITERS.items() if report.source != "timeline"}
EXPORTS: Mapping[str, Report] = {name: report for name, report in WRITERS.items() if report.source == "timeline"}

__all__ = ["EXPORTS", "FORMATS", "REPORTS", "WRITERS", "Report"]
