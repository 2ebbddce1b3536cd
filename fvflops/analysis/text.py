"""The text of an analysis, as fvcore prints it, and the summary that every report is made from."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fvflops import __version__
from fvflops.analysis.model_analysis import ModelAnalysis
from fvflops.capture.model.model_index import read_modules
from fvflops.counting.unsupported_places import find_unsupported_places
from fvflops.formulas import FormulaTable
from fvflops.formulas.torch_registry import is_halved
from fvflops.reports.fvcore import parameter_table as parameters
from fvflops.reports.fvcore import table, tree
from fvflops.reports.terminal.collapse import collapse as collapse_runs
from fvflops.trace import PHASES, Summary


def summarise(flops: ModelAnalysis, activations: ModelAnalysis | None = None) -> Summary:
    """Return what reports show of an analysis, with the activations beside the flops where they are given.

    Where more than a forward pass was recorded, each phase has a column of its flops.

    >>> import torch
    >>> from fvflops import FlopCountAnalysis
    >>> summary = summarise(FlopCountAnalysis(nn.Linear(4, 3), torch.ones(2, 4)))
    >>> summary.columns["flops"][""], summary.ledger["counted"], summary.about["inputs"]
    (24, {'aten::linear': 1}, 'float32[2, 4]')
    """
    return summarise_all({"flops": flops} | ({"activations": activations} if activations is not None else {}))


def summarise_all(analyses: Mapping[str, ModelAnalysis]) -> Summary:
    """Return the summary of analyses of one Trace, heading → analysis; all that is no count is told of the first."""
    first = next(iter(analyses.values()))
    columns = {"parameters": dict(first.module_tree().count_parameters())}
    columns |= {heading: dict(analysis.by_module()) for heading, analysis in analyses.items()}
    counts = first.counts()
    columns |= _by_phase(first)
    return Summary(
        modules=first.trace().modules,
        columns=columns,
        operators={heading: dict(analysis.by_operator()) for heading, analysis in analyses.items()},
        by_both={
            heading: {name: dict(labels) for name, labels in analysis.by_module_and_operator().items()}
            for heading, analysis in analyses.items()
        },
        uncalled={heading: frozenset(analysis.uncalled_modules()) for heading, analysis in analyses.items()},
        ledger={status.value: dict(calls) for status, calls in counts.ledger().items()},
        unknown_elements=dict(counts.unknown_elements()),
        unknown_places=find_unsupported_places(first.trace(), counts),
        about={"fvflops": __version__, **describe_run(first)},
    )


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
    """Return a Markdown table of parameters, flops and, where given, activations of each module down to `max_depth`.

    A chain of single children with equal counts is one row; modules that count nothing are left out. With `sort`, a
    column such as "flops" or "name", or `top` modules stand in one list, down to `max_depth`, those with most first,
    and `top` of them are shown. `collapse` makes equal layers one after the other one row, such as "layers.0–31 × 32".

    >>> import torch
    >>> from fvflops import FlopCountAnalysis
    >>> print(flop_count_table(FlopCountAnalysis(nn.Sequential(nn.Linear(40, 30), nn.ReLU()), torch.ones(2, 40))))
    | module   | #parameters or shape   | #flops   |
    |:---------|:-----------------------|:---------|
    | 0        | 1.23K                  | 2.4K     |
    |  weight  |  (30, 40)              |          |
    |  bias    |  (30,)                 |          |
    """
    summary = _quiet_summary(flops, activations)
    summary = collapse_runs(summary) if collapse else summary
    return table.render(summary, depth=max_depth, show_param_shapes=show_param_shapes, sort=sort, top=top)


def flop_count_str(flops: ModelAnalysis, activations: ModelAnalysis | None = None) -> str:
    """Return the model as `print` shows it, with parameters, flops and, where given, activations at each module.

    >>> import torch
    >>> from fvflops import FlopCountAnalysis
    >>> print(flop_count_str(FlopCountAnalysis(nn.Linear(4, 3), torch.ones(2, 4))))
    Linear(
      in_features=4, out_features=3, bias=True
      #params: 15, #flops: 24
    )
    """
    return tree.render(_quiet_summary(flops, activations))


def parameter_count_table(model: nn.Module, max_depth: int = 3) -> str:
    """Return a Markdown table of the elements of each module and the shape of each parameter, down to `max_depth`.

    >>> print(parameter_count_table(nn.Linear(4, 3)))
    | name    | #elements or shape   |
    |:--------|:---------------------|
    | model   | 15                   |
    |  weight |  (3, 4)              |
    |  bias   |  (3,)                |
    """
    return parameters.render(read_modules(model), depth=max_depth)


def _quiet_summary(flops: ModelAnalysis, activations: ModelAnalysis | None) -> Summary:
    """Return the summary; as fvcore's text functions do, warnings of these analyses are off from here on."""
    for analysis in (flops, activations):
        if analysis is not None:
            analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False).tracer_warnings("none")
    return summarise(flops, activations)


def _by_phase(analysis: ModelAnalysis) -> dict[str, dict[str, int]]:
    phases = {phase for *_, phase in analysis.trace().calls}
    if phases <= {"forward"}:
        return {}
    by_module = analysis.by_module_and_phase()
    present = [phase for phase in PHASES if phase in phases]
    return {phase: {name: values[phase] for name, values in by_module.items()} for phase in present}


def describe_run(analysis: ModelAnalysis) -> dict[str, str]:
    """Return what a report says of an analysis: what its Trace tells, the model's class, and the table."""
    table_used = analysis._table
    about = dict(analysis.trace().about)
    about["model"] = analysis.module_tree().root.class_name
    if table_used is not None:
        about |= {"table": table_used.name, "multiply_add": str(table_used.multiply_add)}
        about["description"] = table_used.description
        about |= _describe_registered(analysis, table_used)
    return about


def _describe_registered(analysis: ModelAnalysis, table: FormulaTable) -> dict[str, str]:
    """Return by which ops a program's own formulas count, read as multiply-adds ("halved") or as flops."""
    told: dict[str, dict[str, None]] = {}
    for signature in analysis.trace().signatures if table.registered_formulas else ():
        if table.row(signature.op) is None and not {signature.op, signature.packet} & analysis._handles.keys():
            halved = is_halved(signature)
            if halved is not None:
                told.setdefault("registered_halved" if halved else "registered", {})[signature.packet] = None
    return {key: ", ".join(ops) for key, ops in told.items()}
