"""The frame: an analysis as columns of exact numbers, for programs and for pandas."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fvflops import __version__
from fvflops.analysis.calls import VIEWS, list_call_rows
from fvflops.analysis.model_analysis import ModelAnalysis
from fvflops.analysis.model_counts import ActivationCountAnalysis
from fvflops.analysis.text import describe_run, summarise_all
from fvflops.trace import Summary
from fvflops.views.frame_rows import Cell, Table, list_rows

if TYPE_CHECKING:
    import pandas


def make_columns(analysis: ModelAnalysis, *, by: str = "module", depth: int | None = None) -> dict[str, list[Cell]]:
    """Return heading → the cells of its column, the rows those of the CSV report.

    >>> import torch
    >>> from fvflops import FlopCountAnalysis
    >>> make_columns(FlopCountAnalysis(torch.nn.Linear(4, 3), torch.ones(2, 4)), by="operator")
    {'operator': ['linear'], 'flops': [24], 'activations': [6]}
    """
    return _turn(_list(analysis, by, depth, "to_dict()")[0])


def make_frame(analysis: ModelAnalysis, *, by: str = "module", depth: int | None = None) -> pandas.DataFrame:
    """Return the columns as a data frame, whose `attrs` tell the model, the inputs, the convention and the versions.

    Where pandas is not installed it raises ImportError, before the model is run.
    """
    pandas = _import_pandas()
    rows, about = _list(analysis, by, depth, "to_pandas()")
    # pandas would make floats of a column in which a number is not known.
    columns = {heading: pandas.Series(cells, dtype=_choose_dtype(cells)) for heading, cells in _turn(rows).items()}
    frame: Any = pandas.DataFrame(columns)
    frame.attrs.update(about)
    return frame


def _choose_dtype(cells: list[Cell]) -> str | None:
    return "object" if None in cells else None


def _list(analysis: ModelAnalysis, by: str, depth: int | None, report: str) -> tuple[Table, Mapping[str, str]]:
    if by in VIEWS:
        rows = list_call_rows(analysis, by, depth)
        return rows, {"fvflops": __version__, **describe_run(analysis)}
    summary = _summarise(analysis)
    return list_rows(summary, by=by, depth=depth, report=report), summary.about


def _turn(listed: Table) -> dict[str, list[Cell]]:
    return {heading: [row[place] for row in listed.rows] for place, heading in enumerate(listed.headings)}


def _summarise(analysis: ModelAnalysis) -> Summary:
    analyses = {analysis.counts().metric: analysis}
    table = analysis._table
    if "flops" in analyses and table is not None:
        activations = ActivationCountAnalysis.from_trace(analysis.trace(), table=table)
        # What is to be warned of, the analysis itself has told.
        activations.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
        analyses["activations"] = activations.ancestor_mode(analysis._ancestors)
    return summarise_all(analyses)


def _import_pandas() -> ModuleType:
    try:
        return importlib.import_module("pandas")
    except ModuleNotFoundError as error:
        if error.name != "pandas":
            raise  # it is there, and lacks something of its own
        raise ImportError(
            "pandas is not installed: pip install pandas (the extra `pandas`), or take to_dict(), which needs none"
        ) from None
