"""Report of a model's costs against its budget, and of an updated budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fvflops.comparison.budget.budget_records import BudgetReport, CheckResult, FlopsChange
from fvflops.counting.metrics import METRICS
from fvflops.reports import document as doc
from fvflops.reports.document import Document, Items, Part, Table, Value, data_only, text_column
from fvflops.reports.escaping import list_ops, plain_name, printable_short
from fvflops.reports.formats import write_document
from fvflops.reports.terminal.layer_ranges import find_pattern, format_range
from fvflops.trace.records import RunInfo
from fvflops.trace.run_notes import list_run_notes, reads_of
from fvflops.units import format_change, format_short, format_thousands

_MAX_ROWS = 5  # modules or operators whose FLOPs grew most


def render(report: BudgetReport) -> str:
    """Return the result of a check as text.

    >>> from fvflops.comparison.budget.budget_records import Limit
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
    return Document("budget", _write_title(report), parts, main="limits", data=_encode(report))


def update_report(file: str, name: str, changes: Sequence[tuple[str, str | None, str]], *, added: bool) -> Document:
    """Return what an update of a budget file changed: (entry, old text or None, new text)."""
    if not changes:
        title = f"{plain_name(file)}: {plain_name(name)} is up to date."
    else:
        title = f"{plain_name(file)}: {plain_name(name)} {'added' if added else 'updated'}."
    columns = (
        text_column("entry", form=printable_short),
        text_column("before", form=printable_short),
        text_column("after"),
    )
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
    needs_all_digits = any(
        result.value != result.limit.value and format_short(result.value) == format_short(result.limit.value)
        for result in results
    )
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
    verdict = "ok" if result.passed else "OVER" if difference > 0 else "UNDER"
    return (
        limit.metric,
        "exact" if limit.exact else "max",
        limit.value,
        float(limit.tolerance),
        value,
        difference,
        difference / limit.value if limit.value else None,
        verdict,
    )


def _name_metric(key: str) -> str:
    return (
        METRICS[key].title if key in METRICS else {"memory": "Peak memory", "unsupported": "Unsupported"}.get(key, key)
    )


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
    table = Table(
        f"{noun}s",
        data_only(columns, [] if any(row[1] > 1 for row in rows) else ["count"]),
        rows,
        title=f"FLOPs of the {noun}s that grew most" + (", each" if any(row[1] > 1 for row in rows) else ""),
        noun=noun,
    )
    return table.ranked(top=_MAX_ROWS)


def _encode(report: BudgetReport) -> dict[str, Any]:
    columns = _list_results(()).columns
    return {
        "name": report.name,
        "table": report.table,
        "passed": report.passed,
        "limits": [
            dict(zip([column.key for column in columns], _list_values(result), strict=True))
            for result in report.results
        ],
        "modules": [change._asdict() for change in report.modules],
        "operators": [change._asdict() for change in report.operators],
        "unsupported": dict(report.unsupported),
        **reads_of(RunInfo.read(report.about)),
    }
