"""Compare the costs of two models, Traces or files."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

from fvflops.analysis.files.archive_checks import recognise
from fvflops.analysis.files.program_archive import is_program, load_program
from fvflops.analysis.model_analysis import ModelAnalysis, analysed_run
from fvflops.analysis.model_counts import ActivationCountAnalysis, FlopCountAnalysis
from fvflops.analysis.trace_file import load_trace
from fvflops.comparison.differences import Costs, ModelDifference, ModuleChange, OperatorChange, Side, sum_costs
from fvflops.comparison.module_matching import match_modules
from fvflops.formulas import FormulaTable, resolve_table
from fvflops.text import explaining_arguments
from fvflops.trace import Entry, ModuleTree, Status, Trace
from fvflops.trace.module_tree import innermost

# Key of Trace.about → the note for the report.
_NOTES = {
    "given": "given for data-dependent ops: {}",
    "supposed": "ASSUMED (data-dependent): {}",
    "bounds": "an upper bound, since the output of {} is assumed to have its maximum size",
    "random": "random draws are read in {}",
    "data_dependent": "values of the data are read in {}",
}

_ZERO = Costs()
_Labels = Mapping[str, Costs]
_Names = tuple[str | None, str | None]  # of a module before and after; None where it was added or removed
# From the most to the least certain.
_STATUSES = tuple(status.value for status in (Status.COUNTED, Status.ZERO_FLOP, Status.IGNORED, Status.UNSUPPORTED))


@explaining_arguments
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
) -> ModelDifference:
    """Return the differences of `b` from `a` in FLOPs, MACs, activations and parameters, by module and operator.

    Each of `a` and `b` is a Trace, an analysis (whose Trace is used), a module or GraphModule that runs on
    `inputs` and `kwargs`, a pair (module, inputs), a `torch.export` program, or the path of a saved Trace or a .pt2
    file. `names` are their names in the report. `options` are as in FlopCountAnalysis. Renamed modules are matched
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
) -> ModelDifference:
    """Return the differences of the second of two Traces, counted by a table.

    Each op belongs to the innermost module in which it ran. Modules are matched by the rules of
    `fvflops.comparison.module_matching`.
    """
    analyses = [FlopCountAnalysis.from_trace(trace, table=table, warn=False) for trace in (first, second)]
    before, after = (_costs_by_module(analysis, table) for analysis in analyses)
    pairs = match_modules(
        before.tree,
        after.tree,
        *({name: frozenset(labels.items()) for name, labels in run.labels.items()} for run in (before, after)),
    )
    statuses = _least_certain_statuses(analyses)
    before_names = {after_name: before_name for before_name, after_name in pairs.items()}
    matched: list[_Names] = [(before_names.get(module.name), module.name) for module in after.tree.modules()]
    matched += [(module.name, None) for module in before.tree.modules() if module.name not in pairs]
    return ModelDifference(
        _describe_run(analyses[0], names[0]),
        _describe_run(analyses[1], names[1]),
        table.name,
        table.multiply_add,
        tuple(_module_change(before, after, pair, statuses, before_names) for pair in matched),
        _operator_changes(_sum_labels(before.labels.values()), _sum_labels(after.labels.values()), statuses),
        (analysed_run(analyses[0]), analysed_run(analyses[1])),
    )


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
        known = "Trace, analysis, model, (model, inputs), exported program, path"
        raise TypeError(f"diff compares two of: {known}; got {type(source).__name__}")
    return FlopCountAnalysis(source, inputs, kwargs=kwargs, table=table, **options).trace()


def _name(source: Any, default: str) -> str:
    return os.fspath(source) if isinstance(source, (str, os.PathLike)) else default


def _describe_run(flops: FlopCountAnalysis, name: str) -> Side:
    trace = flops.trace()
    notes = tuple(text.format(trace.about[key]) for key, text in _NOTES.items() if key in trace.about)
    if not trace.complete:
        notes += ("the run raised an error, and is counted up to it",)
    return Side(name, trace.info.inputs, dict(flops.counts().ledger()[Status.UNSUPPORTED]), notes)


class _RunCosts(NamedTuple):
    """The costs of one run by module, without submodules: label → costs of its ops, and elements of its parameters."""

    tree: ModuleTree
    labels: Mapping[str, _Labels]
    parameters: Mapping[str, int]


def _costs_by_module(flops: FlopCountAnalysis, table: FormulaTable) -> _RunCosts:
    sums: dict[str, dict[str, Costs]] = {}

    def add(entry: Entry, costs: Costs) -> None:
        labels = sums.setdefault(innermost(entry.scope), {})
        labels[entry.label] = sum_costs((labels.get(entry.label, _ZERO), costs))

    for entry in flops.counts().entries:
        if entry.value or entry.status is not Status.ZERO_FLOP:
            add(entry, Costs(entry.value, entry.macs, calls=entry.calls))
    activations = ActivationCountAnalysis.from_trace(flops.trace(), table=table, warn=False)
    for entry in activations.counts().entries:
        if entry.value:
            add(entry, Costs(activations=entry.value))
    tree = flops.counts().modules
    parameters: Counter[str] = Counter()
    for parameter in tree.parameters():
        owner = parameter.name.rpartition(".")[0]
        parameters[owner if owner in tree.by_name else ""] += parameter.spec.numel
    return _RunCosts(tree, sums, parameters)


def _module_change(
    before: _RunCosts, after: _RunCosts, names: _Names, statuses: Mapping[str, str], before_names: Mapping[str, str]
) -> ModuleChange:
    runs = list(zip((before, after), names, strict=True))
    first, second = ({} if name is None else run.labels.get(name, {}) for run, name in runs)
    parameters = [0 if name is None else run.parameters.get(name, 0) for run, name in runs]
    classes = ["" if name is None else run.tree.by_name[name].class_name for run, name in runs]
    operators = _operator_changes(first, second, statuses)
    return ModuleChange(
        *names,
        classes[0],
        classes[1],
        sum_costs(first.values())._replace(parameters=parameters[0]),
        sum_costs(second.values())._replace(parameters=parameters[1]),
        tuple(operator for operator in operators if operator.before != operator.after),
        parent_renamed=_is_parent_renamed(names, before_names),
    )


def _is_parent_renamed(names: _Names, before_names: Mapping[str, str]) -> bool:
    """Return whether the names of a module differ because its parent was renamed, and not in their last part."""
    before, after = names
    if not before or not after or before == after:
        return False
    before_parent, before_last = before.rpartition(".")[::2]
    after_parent, after_last = after.rpartition(".")[::2]
    same_parent = before_names.get(after_parent) == before_parent
    return before_last == after_last and same_parent and before_parent != after_parent


def _operator_changes(before: _Labels, after: _Labels, statuses: Mapping[str, str]) -> tuple[OperatorChange, ...]:
    return tuple(
        OperatorChange(label, statuses.get(label, ""), before.get(label, _ZERO), after.get(label, _ZERO))
        for label in dict.fromkeys((*before, *after))
    )


def _sum_labels(modules: Iterable[_Labels]) -> dict[str, Costs]:
    sums: dict[str, Costs] = {}
    for labels in modules:
        for label, costs in labels.items():
            sums[label] = sum_costs((sums.get(label, _ZERO), costs))
    return sums


def _least_certain_statuses(analyses: Iterable[FlopCountAnalysis]) -> dict[str, str]:
    """Return label → the least certain status of its calls."""
    statuses: dict[str, str] = {}
    for analysis in analyses:
        for entry in analysis.counts().entries:
            status = statuses.get(entry.label, _STATUSES[0])
            statuses[entry.label] = max(status, entry.status.value, key=_STATUSES.index)
    return statuses
