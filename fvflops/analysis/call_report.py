"""A document of op calls, module calls or source lines of an analysis."""

from __future__ import annotations

from fvflops import __version__
from fvflops.analysis.model_analysis import analysed_run
from fvflops.analysis.model_counts import FlopCountAnalysis, list_call_rows
from fvflops.reports.calls.module_calls import module_call_table
from fvflops.reports.calls.op_call_table import op_call_table
from fvflops.reports.calls.source_line_table import line_table
from fvflops.reports.document import Document, Items, Table
from fvflops.reports.terminal.op_coverage import op_coverage_notes
from fvflops.views.analysed_run import describe_run
from fvflops.views.made_summary import make_summary

_TITLES = {"op": "op calls", "call": "module calls", "line": "lines of source"}


def call_report(analysis: FlopCountAnalysis, by: str, *, depth: int | None = None) -> Document:
    """Return the calls of ops ("op") or modules ("call"), or their sums by line of source ("line"), and the coverage.

    `depth` is how many calls around a module's are listed at most, any number if None; by op and line it is ignored.
    Its data are `about`, as in the JSON summary, and `rows`: `pandas.DataFrame(record["rows"])` is the frame.
    """
    run = analysed_run(analysis)
    about = {"fvflops": __version__, **describe_run(run)}
    rows = list_call_rows(analysis, by, depth)
    summary = make_summary({run.counts.metric: run})
    return Document(
        "calls",
        f"{about['model']}: {_TITLES[by]}",
        [_make_table(analysis, by, depth), Items("", op_coverage_notes(summary, escape=str))],
        data={"about": about, "rows": [dict(zip(rows.headings, row, strict=True)) for row in rows.rows]},
    )


def _make_table(analysis: FlopCountAnalysis, by: str, depth: int | None) -> Table:
    if by == "op":
        return op_call_table(analysis.op_calls())
    if by == "line":
        return line_table(analysis.line_counts())
    return module_call_table(analysis.module_calls(), depth=depth)
