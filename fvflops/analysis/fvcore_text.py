"""fvcore's text output of an analysis, and the Summary for reports."""

from __future__ import annotations

from torch import nn

from fvflops.analysis.model_analysis import ModelAnalysis, analysed_run, require_analysis
from fvflops.capture.model.model_index import read_modules
from fvflops.reports import fvcore_format
from fvflops.reports.terminal.collapse import collapse as collapse_runs
from fvflops.text import require_int
from fvflops.trace import Summary
from fvflops.views.analysed_run import make_summary


def summarise(flops: ModelAnalysis, activations: ModelAnalysis | None = None) -> Summary:
    """Return the Summary of an analysis for reports, with activations if given.

    If more than a forward pass was recorded, each phase has a column of its FLOPs.

    >>> import torch
    >>> from fvflops import FlopCountAnalysis
    >>> summary = summarise(FlopCountAnalysis(nn.Linear(4, 3), torch.ones(2, 4)))
    >>> summary.columns["flops"][""], summary.ledger["counted"], summary.about["inputs"]
    (24, {'aten::linear': 1}, 'float32[2, 4]')
    """
    runs = {"flops": analysed_run(flops)}
    return make_summary(runs if activations is None else {**runs, "activations": analysed_run(activations)})


def flop_count_table(
    flops: ModelAnalysis,
    max_depth: int = 3,
    activations: ModelAnalysis | None = None,
    show_param_shapes: bool = True,
    *,
    sort: str | None = None,
    top: int | None = None,
    collapse: bool = False,
) -> str:
    """Return a Markdown table of parameters, FLOPs and, if given, activations of each module down to `max_depth`.

    A chain of single children with equal counts is one row; modules without counts are omitted. With `sort`, a column
    such as "flops" or "name", or with `top`, modules down to `max_depth` are in one list, largest first, limited to
    `top` rows. `collapse` merges equal consecutive layers into one row, such as "layers.0–31 × 32".

    >>> import torch
    >>> from fvflops import FlopCountAnalysis
    >>> print(flop_count_table(FlopCountAnalysis(nn.Sequential(nn.Linear(40, 30), nn.ReLU()), torch.ones(2, 40))))
    | module   | #parameters or shape   | #flops   |
    |:---------|:-----------------------|:---------|
    | 0        | 1.23K                  | 2.4K     |
    |  weight  |  (30, 40)              |          |
    |  bias    |  (30,)                 |          |
    """
    summary = _summarise_without_warnings(flops, activations)
    require_int("max_depth", max_depth, least=0)
    summary = collapse_runs(summary) if collapse else summary
    return fvcore_format.write_table(summary, depth=max_depth, show_param_shapes=show_param_shapes, sort=sort, top=top)


def flop_count_str(flops: ModelAnalysis, activations: ModelAnalysis | None = None) -> str:
    """Return the model as `print` shows it, with parameters, FLOPs and, if given, activations at each module.

    >>> import torch
    >>> from fvflops import FlopCountAnalysis
    >>> print(flop_count_str(FlopCountAnalysis(nn.Linear(4, 3), torch.ones(2, 4))))
    Linear(
      in_features=4, out_features=3, bias=True
      #params: 15, #flops: 24
    )
    """
    return fvcore_format.write_tree(_summarise_without_warnings(flops, activations))


def parameter_count_table(model: nn.Module, max_depth: int = 3) -> str:
    """Return a Markdown table of the elements of each module and the shape of each parameter, down to `max_depth`.

    >>> print(parameter_count_table(nn.Linear(4, 3)))
    | name    | #elements or shape   |
    |:--------|:---------------------|
    | model   | 15                   |
    |  weight |  (3, 4)              |
    |  bias   |  (3,)                |
    """
    require_int("max_depth", max_depth, least=0)
    return fvcore_format.write_parameter_table(read_modules(model), depth=max_depth)


def _summarise_without_warnings(flops: ModelAnalysis, activations: ModelAnalysis | None) -> Summary:
    """Return the summary; if the model runs for it, no warnings are shown, as in fvcore's text functions."""
    second = require_analysis(flops) if activations is None else require_analysis(activations)
    with require_analysis(flops)._warnings_disabled(), second._warnings_disabled():
        return summarise(flops, activations)
