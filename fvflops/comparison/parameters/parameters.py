"""Parameter counts of a model: trainable and frozen, and with a run the active ones."""

from __future__ import annotations

from torch import nn

from fvflops.capture.errors.model_check import Recorded, trace_of
from fvflops.capture.model.model_index import read_modules
from fvflops.comparison.parameters import parameter_report
from fvflops.comparison.parameters.parameter_records import ParameterSummary
from fvflops.comparison.parameters.parameter_sums import count_parameters
from fvflops.text import explaining_arguments, require_int
from fvflops.trace import Trace


@explaining_arguments
def parameter_summary(of: nn.Module | Trace | Recorded) -> ParameterSummary:
    """Return module or parameter name → its ParameterCount, "" being the model.

    A model has `total`, `trainable`, `frozen` and `buffers`. A Trace or an analysis, which records if it has not yet,
    has `active`, `looked_up` and `unused` too: an expert is active in proportion to the tokens routed to it.
    A tied parameter and a shared module count once, under their first names. An aggregated Trace raises TraceError.

    >>> import torch
    >>> from fvflops import FlopCountAnalysis
    >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3).requires_grad_(False))
    >>> parameter_summary(model)[""].trainable, parameter_summary(model)["1"].frozen
    (40, 15)
    >>> root = parameter_summary(FlopCountAnalysis(model, torch.tensor([1])))[""]
    >>> root.active, root.looked_up, root.unused
    (55, 40, 0)
    """
    if isinstance(of, nn.Module):
        return count_parameters(read_modules(of))
    trace = trace_of(of)
    return count_parameters(trace.modules, trace)


def parameter_summary_table(of: nn.Module | Trace | Recorded, max_depth: int = 3) -> str:
    """Return a Markdown table of `parameter_summary`, down to `max_depth` levels of names; 0 is the model alone.

    >>> print(parameter_summary_table(nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30)), max_depth=1))
    | name   | total   | trainable   |   frozen |   buffers |
    |:-------|:--------|:------------|---------:|----------:|
    | model  | 1.29K   | 1.29K       |        0 |        61 |
    |  0     | 1.23K   | 1.23K       |        0 |         0 |
    |  1     | 60      | 60          |        0 |        61 |
    """
    require_int("max_depth", max_depth, least=0)
    return parameter_report.render(parameter_summary(of), depth=max_depth)
