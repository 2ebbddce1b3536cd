"""The frame: an analysis as columns of exact numbers, for programs and for pandas."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fvflops.analysis.model_analysis import ModelAnalysis
from fvflops.analysis.model_counts import ActivationCountAnalysis
from fvflops.analysis.text import summarise_all
from fvflops.reports.rows import Cell, Rows, list_rows
from fvflops.trace import Summary

if TYPE_CHECKING:
    import pandas


def make_columns(analysis: ModelAnalysis, *, by: str = "module", depth: int | None = None) -> dict[str, list[Cell]]:
    """Return heading → the cells of its column, the rows those of the CSV report.

    >>> import torch
    >>> from fvflops import FlopCountAnalysis
    >>> make_columns(FlopCountAnalysis(torch.nn.Linear(4, 3), torch.ones(2, 4)), by="operator")
    {'operator': ['linear'], 'flops': [24], 'activations': [6]}
    """
    return _turn(list_rows(_summarise(analysis), by=by, depth=depth, report="to_dict()"))


def make_frame(analysis: ModelAnalysis, *, by: str = "module", depth: int | None = None) -> pandas.DataFrame:
    """Return the columns as a data frame, whose `attrs` tell the model, the inputs, the convention and the versions.

    Where pandas is not installed it raises ImportError, before the model is run.
    """
    pandas = _import_pandas()
    summary = _summarise(analysis)
    frame: Any = pandas.DataFrame(_turn(list_rows(summary, by=by, depth=depth, report="to_pandas()")))
    frame.attrs.update(summary.about)
    return frame


def _turn(listed: Rows) -> dict[str, list[Cell]]:
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
