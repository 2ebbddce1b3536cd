"""Compare the costs of two models, Traces or files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import nn

from fvflops import paths
from fvflops.analysis.files.file_kinds import recognise
from fvflops.analysis.files.run_exported import is_program, load_program
from fvflops.analysis.model_analysis import ModelAnalysis, analysed_run
from fvflops.analysis.model_counts import ActivationCountAnalysis, FlopCountAnalysis
from fvflops.analysis.trace_file import load_trace
from fvflops.comparison import diff_report
from fvflops.comparison.differences import CountedRun, ModelDifference, diff_counts
from fvflops.formulas import FormulaTable, resolve_table
from fvflops.reports import html, notebook_page
from fvflops.reports.display import Displayed
from fvflops.reports.document import Document
from fvflops.trace import Trace
from fvflops.views.analysed_run import AnalysedRun
from fvflops.views.breakdown import Breakdown, read_breakdown

# Key of Trace.about → the note for the report.
_NOTES = {
    "given": "given for data-dependent ops: {}",
    "supposed": "ASSUMED (data-dependent): {}",
    "bounds": "an upper bound, since the output of {} is assumed to have its maximum size",
    "random": "random draws are read in {}",
    "data_dependent": "values of the data are read in {}",
}


@dataclass(frozen=True, slots=True, repr=False)
class PrintedDifference(ModelDifference, Displayed):
    """A ModelDifference that `print` shows as its report, and a notebook as an interactive page of both models.

    `runs` are the two runs, with the names of the report.
    """

    runs: tuple[AnalysedRun, AnalysedRun] | None = field(default=None, compare=False)

    def _document(self) -> Document:
        return diff_report.difference_report(self).ranked(top=diff_report.TOP)

    def to_markdown(self) -> str:
        """Return the report in GitHub's Markdown."""
        return diff_report.render(self, format="markdown")

    def to_json(self) -> str:
        """Return all differences as JSON text, with exact numbers."""
        return diff_report.render(self, format="json")

    def to_html(self, path: str | os.PathLike[str] | None = None, *, measure: str = "flops") -> str:
        """Return an interactive page that compares both models, opened on a measure; write it to `path` if given.

        Modules are matched by name there.

        >>> import torch
        >>> page = diff(nn.Linear(4, 8), nn.Linear(4, 16), torch.ones(3, 4)).to_html()
        >>> "<title>before → after · fvflops</title>" in page
        True
        """
        if path is not None:
            paths.check_writable(os.fspath(path))
        if self.runs is None:
            raise ValueError("this difference has no runs to show as a page: make it by fvflops.diff")
        names = (self.before.name, self.after.name)
        pages = [_open_on(measure, read_breakdown(run), name) for run, name in zip(self.runs, names, strict=True)]
        page = "".join(html.render_comparison(*pages))
        if path is not None:
            paths.write_text(os.fspath(path), page)
        return page

    def _repr_html_(self) -> str:
        document = self._document()
        if self.runs is None:
            return notebook_page.render_document(document)
        return notebook_page.put_in_frame(self.to_html(), notebook_page.write_tables(document), title=document.title)

    def _repr_markdown_(self) -> str:
        return self.to_markdown()


def diff(
    a: Any,
    b: Any,
    inputs: Any = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    table: str | FormulaTable = "default",
    names: tuple[str, str] | None = None,
    trust: bool = False,
    **options: Any,
) -> PrintedDifference:
    """Return the differences of `b` from `a` in FLOPs, MACs, activations and parameters, by module and operator.

    Each of `a` and `b` is a Trace, an analysis (whose Trace is used), a module or GraphModule that runs on
    `inputs` and `kwargs`, a pair (module, inputs), a `torch.export` program, or the path of a saved Trace or a .pt2
    file. `names` are their names in the report. `options` are those of FlopCountAnalysis. Renamed modules are matched
    by the rules of `module_matching`. A program can run code when it is loaded: `trust` says that
    the files are trusted. A file that cannot be read raises TraceError or ValueError.

    >>> import torch
    >>> def net(width):
    ...     return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))
    >>> difference = diff(net(8), net(16), torch.ones(3, 4))
    >>> difference.total()
    Change(before=144, after=288)
    >>> [(module.name, module.change("flops").difference) for module in difference.by_module()]
    [('0', 96), ('2', 48)]
    >>> bool(diff(net(8), net(8), torch.ones(3, 4)))
    False
    """
    formulas = resolve_table(table)
    settings = {"inputs": inputs, "kwargs": kwargs, "table": formulas, "trust": trust, **options}
    traces = [_read_trace(source, **settings) for source in (a, b)]
    return diff_traces(traces[0], traces[1], table=formulas, names=names or (_name(a, "before"), _name(b, "after")))


def diff_traces(
    first: Trace, second: Trace, *, table: FormulaTable, names: tuple[str, str] = ("before", "after")
) -> PrintedDifference:
    """Return the differences of the second of two Traces, counted by a table."""
    analyses = [FlopCountAnalysis.from_trace(trace, table=table, warn=False) for trace in (first, second)]
    runs = [_count(analysis, table, name) for analysis, name in zip(analyses, names, strict=True)]
    difference = diff_counts(runs[0], runs[1], table=table.name, multiply_add=table.multiply_add)
    values = {item.name: getattr(difference, item.name) for item in fields(difference) if item.init}
    return PrintedDifference(**values, runs=(analysed_run(analyses[0]), analysed_run(analyses[1])))


def _open_on(measure: str, breakdown: Breakdown, name: str) -> Breakdown:
    """Return a breakdown for a page, which opens on the first measure."""
    first = {key: value for key, value in breakdown.measures.items() if key == measure}
    return replace(breakdown, name=name, measures=first | dict(breakdown.measures))


def _read_trace(
    source: Any, *, inputs: Any, kwargs: Mapping[str, Any] | None, table: FormulaTable, trust: bool, **options: Any
) -> Trace:
    if isinstance(source, Trace):
        return source
    if isinstance(source, ModelAnalysis):
        return source.trace()
    if isinstance(source, (str, os.PathLike)):
        name = os.fspath(source)
        if name.endswith(".pt2") or (os.path.isfile(name) and recognise(name) == "program"):
            source = load_program(source, trust=trust)
        else:
            return load_trace(source)
    if isinstance(source, tuple) and len(source) == 2 and isinstance(source[0], nn.Module):
        source, inputs = source
        kwargs = None
    if not callable(source) and not is_program(source):
        raise TypeError(
            "diff compares two of: Trace, analysis, model, (model, inputs), exported program, path; "
            f"got {type(source).__name__}"
        )
    return FlopCountAnalysis(source, inputs, kwargs=kwargs, table=table, **options).trace()


def _name(source: Any, default: str) -> str:
    return os.fspath(source) if isinstance(source, (str, os.PathLike)) else default


def _count(flops: FlopCountAnalysis, table: FormulaTable, name: str) -> CountedRun:
    trace = flops.trace()
    activations = ActivationCountAnalysis.from_trace(trace, table=table, warn=False)
    notes = tuple(text.format(trace.about[key]) for key, text in _NOTES.items() if key in trace.about)
    if not trace.complete:
        notes += ("the run raised an error, and is counted up to it",)
    return CountedRun(name, trace.info.inputs, flops.counts(), activations.counts(), notes)
