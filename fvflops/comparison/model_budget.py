"""Measure a model, compare it with its budget, and update the budget file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from fvflops import paths
from fvflops.analysis.model_analysis import analysed_run, model_run
from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.comparison.budget_file import Budget, Limit, budget_keys, update_text
from fvflops.counting.metrics import METRICS, MetricCounts
from fvflops.formulas import load_table
from fvflops.formulas.yaml_document import MAX_CHARACTERS
from fvflops.plan.memory.predict_memory import predict_memory
from fvflops.reports import document as doc
from fvflops.reports.display import Displayed
from fvflops.reports.document import Document, Items, Part, Table, Value, data_only, text_column
from fvflops.reports.escaping import list_ops, plain_name, printable_short
from fvflops.reports.formats import write_document
from fvflops.reports.terminal.collapse import find_pattern, format_range
from fvflops.text import record_data, short_repr
from fvflops.trace import Status
from fvflops.trace.records import RunInfo, list_run_notes, reads_of
from fvflops.units import format_change, format_short, format_thousands


class CheckResult(NamedTuple):
    """A limit, and the value of the model's metric."""

    limit: Limit
    value: int

    @property
    def passed(self) -> bool:
        """Whether the value is within its limit."""
        return self.limit.allows(self.value)


class FlopsChange(NamedTuple):
    """A module or an operator whose FLOPs changed: its FLOPs in the budget, and now."""

    name: str
    before: int
    after: int

    @property
    def difference(self) -> int:
        """After minus before."""
        return self.after - self.before


@dataclass(frozen=True, slots=True, repr=False)
class BudgetReport(Displayed):
    """The result of checking a model against its budget.

    `modules` and `operators` have changed their FLOPs since the budget recorded them, the largest increase first; a
    module's FLOPs include its submodules'. `unsupported` maps each unsupported op to its number of calls, and `about`
    is the Trace's.
    """

    _report = "fvflops.comparison.model_budget:budget_report"

    name: str
    table: str
    results: tuple[CheckResult, ...]
    modules: tuple[FlopsChange, ...] = ()
    operators: tuple[FlopsChange, ...] = ()
    unsupported: Mapping[str, int] = field(default_factory=dict)
    about: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        failed = [result.limit.metric for result in self.results if not result.passed]
        state = f"differs in {', '.join(failed)}" if failed else "within its budget"
        return short_repr(self, self.name, state)

    @property
    def passed(self) -> bool:
        """Whether every value is within its limit."""
        return all(result.passed for result in self.results)


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
    >>> from fvflops.comparison.budget_file import Limit
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
    # A module that was not recorded is new if it is no deeper than the recorded ones.
    deepest = max((name.count(".") for name in before), default=-1)
    names = dict.fromkeys([*before, *(name for name in after if name.count(".") <= deepest)])
    changes = [FlopsChange(name, before.get(name, 0), after.get(name, 0)) for name in names]
    return tuple(sorted((change for change in changes if change.difference), key=lambda change: -change.difference))


# The values of `OTHER_KEYS`.
_OTHER_VALUES: Mapping[str, Callable[[FlopCountAnalysis], int]] = {
    "memory": lambda analysis: predict_memory(analysis).peak,
    "unsupported": lambda analysis: len(analysis.counts().ledger()[Status.UNSUPPORTED]),
}


_MAX_ROWS = 5  # modules or operators whose FLOPs grew most


def render(report: BudgetReport) -> str:
    """Return the result of a check as text.

    >>> results = CheckResult(Limit("flops", 20), 24), CheckResult(Limit("macs", 30), 24)
    >>> print(render(BudgetReport("net", "default", results)))
    OVER BUDGET: net costs more than allowed (convention default).
    <BLANKLINE>
    metric  limit  budget  actual  difference  relative  verdict
    ------  -----  ------  ------  ----------  --------  -------
    FLOPs   max        20      24          +4      +20%  OVER
    MACs    max        30      24          -6      -20%  ok
    """
    return write_document(budget_report(report))


def render_markdown(report: BudgetReport) -> str:
    """Return the result of a check in GitHub's Markdown, with an emoji, for the summary of a workflow step."""
    document = budget_report(report)
    return write_document(replace(document, title=f"{'✅' if report.passed else '❌'} {document.title}"), "markdown")


def budget_report(report: BudgetReport) -> Document:
    """Return each limit with the actual value and, if a limit is exceeded, the modules and operators that grew."""
    parts: list[Part] = [_list_results(report.results)]
    if not report.passed:
        parts += [_list_increases(report.modules, "module"), _list_increases(report.operators, "operator")]
    if report.unsupported:
        parts.append(f"Unsupported, so not counted: {list_ops(report.unsupported)}.")
    parts.append(Items("", list(list_run_notes(report.about, plain_name))))
    names = ("name", "table", "passed", "limits=results", "modules", "operators", "unsupported")
    reads = reads_of(RunInfo.read(report.about))
    data = {**record_data(report, *names), "limits": _list_results(report.results).records(), **reads}
    return Document("budget", _write_title(report), parts, main="limits", data=data)


def update_report(file: str, name: str, changes: Sequence[tuple[str, str | None, str]], *, added: bool) -> Document:
    """Return the changes of a budget file by an update: (entry, old text or None, new text)."""
    state = "is up to date" if not changes else "added" if added else "updated"
    title = f"{plain_name(file)}: {plain_name(name)} {state}."
    columns = [text_column(key, form=printable_short) for key in ("entry", "before")] + [text_column("after")]
    hidden = [] if any(old is not None for _, old, _ in changes) else ["before"]
    return Document("budget_update", title, [Table("changes", data_only(columns, hidden), changes, noun="entry")])


def _write_title(report: BudgetReport) -> str:
    by = f" (convention {plain_name(report.table)})" if report.table else ""
    if report.passed:
        return f"{plain_name(report.name)} is within its budget{by}."
    over = any(not result.passed and result.value > result.limit.value for result in report.results)
    what = "costs more than allowed" if over else "differs from its exact budget"
    return f"{'OVER' if over else 'OFF'} BUDGET: {plain_name(report.name)} {what}{by}."


def _list_results(results: Sequence[CheckResult]) -> Table:
    # Rounded values may hide that a value differs from its limit.
    unequal = [(result.value, result.limit.value) for result in results if result.value != result.limit.value]
    needs_all_digits = any(format_short(value) == format_short(limit) for value, limit in unequal)
    form = format_thousands if needs_all_digits else format_short
    columns = (
        text_column("metric", form=_name_metric),
        text_column("limit"),
        doc.number_column("budget", form=form),
        doc.number_column("tolerance", form=lambda share: f"{100 * share:g}%"),
        doc.number_column("actual", form=form),
        doc.difference_column("difference"),
        doc.difference_column("relative", form=format_change),
        text_column("verdict"),
    )
    hidden = [] if any(result.limit.tolerance for result in results) else ["tolerance"]
    rows = [_list_values(result) for result in results]
    return Table("limits", data_only(columns, hidden), rows, noun="limit")


def _list_values(result: CheckResult) -> tuple[Value, ...]:
    limit, value = result.limit, result.value
    difference = value - limit.value
    relative = difference / limit.value if limit.value else None
    verdict = "ok" if result.passed else "OVER" if difference > 0 else "UNDER"
    kind = "exact" if limit.exact else "max"
    return limit.metric, kind, limit.value, float(limit.tolerance), value, difference, relative, verdict


def _name_metric(key: str) -> str:
    return METRICS[key].title if key in METRICS else {"memory": "Peak memory"}.get(key, key.capitalize())


def _list_increases(changes: Sequence[FlopsChange], noun: str) -> Table:
    """Return the modules or operators whose FLOPs grew most; equal changes of layers 0, 1, 2 ... share a row."""
    names_by_change: dict[tuple[str | None, int, int], list[str]] = {}
    for change in changes:
        if change.difference > 0:
            key = find_pattern(change.name), change.before, change.after
            names_by_change.setdefault(key, []).append(change.name)
    rows = [
        (format_range(names), len(names), before, after, after - before, (after - before) / before if before else None)
        for (_, before, after), names in names_by_change.items()
    ]
    columns = (
        text_column(noun, form=lambda name: printable_short(name) or "model"),
        doc.number_column("count", form=format_thousands),
        doc.number_column("before"),
        doc.number_column("after"),
        doc.difference_column("difference"),
        doc.difference_column("relative", form=format_change),
    )
    several = any(row[1] > 1 for row in rows)
    title = f"FLOPs of the {noun}s that grew most" + (", each" if several else "")
    shown = data_only(columns, [] if several else ["count"])
    return Table(f"{noun}s", shown, rows, title=title, noun=noun).ranked(top=_MAX_ROWS)
