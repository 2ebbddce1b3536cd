"""Measure a model, compare it with its budget, and update the budget file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fvflops import paths
from fvflops.analysis.model_analysis import analysed_run, model_run
from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.comparison.budget.budget_file import update_text
from fvflops.comparison.budget.budget_records import Budget, BudgetReport, CheckResult, FlopsChange, budget_keys
from fvflops.counting.metrics import METRICS, MetricCounts
from fvflops.formulas import load_table
from fvflops.formulas.yaml_document import MAX_CHARACTERS
from fvflops.plan.memory.predict_memory import predict_memory
from fvflops.trace import Status


def measure(analysis: FlopCountAnalysis, keys: Sequence[str]) -> dict[str, int]:
    """Return key → value for some of `budget_keys()`.

    Peak memory needs a model: an analysis of a loaded Trace, which lacks temporaries, raises ValueError.

    >>> import torch
    >>> measure(FlopCountAnalysis(torch.nn.Linear(3, 2), torch.ones(4, 3)), ["flops", "parameters", "memory"])
    {'flops': 24, 'parameters': 8, 'memory': 112}
    """
    if "memory" in keys and model_run(analysis) is None:
        raise ValueError("the peak memory is predicted from a model, not from a saved run: omit memory from the budget")
    run = analysed_run(analysis)
    counts = MetricCounts(run.trace, run.table or load_table("default"), run.counts)
    return {key: counts[key].total() if key in METRICS else _OTHER_VALUES[key](analysis) for key in keys}


def check_budget(analysis: FlopCountAnalysis, budget: Budget, *, table: str = "") -> BudgetReport:
    """Check an analysed model against its budget.

    >>> import torch
    >>> from fvflops.comparison.budget.budget_records import Limit
    >>> analysis = FlopCountAnalysis(torch.nn.Linear(3, 2), torch.ones(4, 3))
    >>> check_budget(analysis, Budget("net", {"flops": Limit("flops", 20)})).passed
    False
    """
    values = measure(analysis, tuple(budget.limits))
    current = flops_by_part(analysis)
    return BudgetReport(
        budget.name,
        table,
        tuple(CheckResult(limit, values[key]) for key, limit in budget.limits.items()),
        _compare(budget.modules, current["modules"]),
        _compare(budget.operators, current["operators"]),
        dict(analysis.counts().ledger()[Status.UNSUPPORTED]),
        analysis.trace().about,
    )


def flops_by_part(analysis: FlopCountAnalysis, depth: int | None = None) -> dict[str, dict[str, int]]:
    """Return the nonzero FLOPs as "modules", submodules included, down to a depth, and "operators"."""
    modules = {
        name: value
        for name, value in analysis.by_module().items()
        if value and name and (depth is None or name.count(".") < depth)
    }
    return {"modules": modules, "operators": {name: value for name, value in analysis.by_operator().items() if value}}


def rewrite_budget(
    path: str,
    analysis: FlopCountAnalysis,
    budget: Budget | None,
    *,
    name: str,
    table: str | None = None,
    depth: int | None = None,
) -> tuple[tuple[str, str | None, str], ...]:
    """Write a model's costs into a budget file, atomically; return (entry, old text or None, new text).

    The limits of an existing `budget` are rewritten; None adds the model with all metrics and the table. With a
    `depth`, or where the budget has modules, the FLOPs of modules and operators are recorded too.
    """
    can_run = model_run(analysis) is not None
    keys = tuple(key for key in budget_keys() if key != "memory" or can_run)
    values = measure(analysis, keys if budget is None else tuple(budget.limits))
    text = paths.read_text(path, MAX_CHARACTERS) if paths.exists(path) else None
    if depth is None and budget is not None and budget.modules:
        depth = 1 + max(name.count(".") for name in budget.modules)
    recorded = {} if depth is None else flops_by_part(analysis, depth)
    update = update_text(text, path, name, values, recorded=recorded, table=table)
    if update.changes:
        paths.write_text(path, update.text)
    return update.changes


def _compare(before: Mapping[str, int], after: Mapping[str, int]) -> tuple[FlopsChange, ...]:
    changes = [FlopsChange(name, value, after.get(name, 0)) for name, value in before.items()]
    # A module that was not recorded is new if it is no deeper than the recorded ones.
    deepest = max((name.count(".") for name in before), default=-1)
    changes += [
        FlopsChange(name, 0, value)
        for name, value in after.items()
        if name not in before and name.count(".") <= deepest
    ]
    return tuple(sorted((change for change in changes if change.difference), key=lambda change: -change.difference))


# The values of `OTHER_KEYS`.
_OTHER_VALUES: Mapping[str, Callable[[FlopCountAnalysis], int]] = {
    "memory": lambda analysis: predict_memory(analysis).peak,
    "unsupported": lambda analysis: len(analysis.counts().ledger()[Status.UNSUPPORTED]),
}
