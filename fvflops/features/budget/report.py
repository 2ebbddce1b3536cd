"""Report of a model's costs against its budget, and of an updated budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fvflops.counting.metrics import METRICS
from fvflops.features.budget.model import BudgetReport, CheckResult, Regression
from fvflops.reports import document as doc
from fvflops.reports.document import Document, Part, Table, Value, data_only, text_column
from fvflops.reports.formats import write_document
from fvflops.reports.names import list_ops, plain_name, printable_short
from fvflops.reports.terminal.layer_ranges import find_pattern, format_range
from fvflops.units import format_change, format_short, format_thousands

_SHOWN = 5  # modules or operators that cost more


def render(verdict: BudgetReport) -> str:
    """Return the verdict as text.

    >>> from fvflops.features.budget.model import Limit
    >>> results = CheckResult(Limit("flops", 20), 24), CheckResult(Limit("macs", 30), 24)
    >>> print(render(BudgetReport("net", "default", results)))
    OVER BUDGET: net costs more than allowed (convention default).
    <BLANKLINE>
    metric  limit  budget  actual  difference  relative  verdict
    ------  -----  ------  ------  ----------  --------  -------
    FLOPs   max        20      24          +4      +20%  OVER
    MACs    max        30      24          -6      -20%  ok
    """
    return write_document(budget_report(verdict))


def render_markdown(verdict: BudgetReport) -> str:
    """Return the verdict in GitHub's Markdown with a mark, as the summary of a step."""
    document = budget_report(verdict)
    return write_document(replace(document, title=f"{'✅' if verdict.kept else '❌'} {document.title}"), "markdown")


def budget_report(verdict: BudgetReport) -> Document:
    """Return each limit with what the model costs and, where it is over its budget, what costs more than noted."""
    parts: list[Part] = [_list_findings(verdict.findings)]
    if not verdict.kept:
        parts += [_list_regressions(verdict.modules, "module"), _list_regressions(verdict.operators, "operator")]
    if verdict.unknown:
        parts.append(f"Unsupported, so not counted: {list_ops(verdict.unknown)}.")
    return Document("budget", _write_title(verdict), parts, main="limits", data=_encode(verdict))


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


def _write_title(verdict: BudgetReport) -> str:
    by = f" (convention {plain_name(verdict.table)})" if verdict.table else ""
    if verdict.kept:
        return f"{plain_name(verdict.name)} is within its budget{by}."
    over = any(not finding.kept and finding.value > finding.limit.value for finding in verdict.findings)
    what = "costs more than allowed" if over else "differs from its exact budget"
    return f"{'OVER' if over else 'OFF'} BUDGET: {plain_name(verdict.name)} {what}{by}."


def _list_findings(findings: Sequence[CheckResult]) -> Table:
    # Exact values where rounded ones would not show that a value differs from its limit.
    alike = any(
        finding.value != finding.limit.value and format_short(finding.value) == format_short(finding.limit.value)
        for finding in findings
    )
    form = format_thousands if alike else format_short
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
    hidden = [] if any(finding.limit.tolerance for finding in findings) else ["tolerance"]
    rows = [_list_values(finding) for finding in findings]
    return Table("limits", data_only(columns, hidden), rows, noun="limit")


def _list_values(finding: CheckResult) -> tuple[Value, ...]:
    limit, value = finding.limit, finding.value
    over = value - limit.value
    state = "ok" if finding.kept else "OVER" if over > 0 else "UNDER"
    return (
        limit.figure,
        "exact" if limit.exact else "max",
        limit.value,
        float(limit.tolerance),
        value,
        over,
        over / limit.value if limit.value else None,
        state,
    )


def _name_metric(key: str) -> str:
    return METRICS[key].title if key in METRICS else {"memory": "Peak memory", "unknown": "Unsupported"}.get(key, key)


def _list_regressions(regressions: Sequence[Regression], noun: str) -> Table:
    """Return the modules or operators whose FLOPs grew most; names that differ in digits only share a row."""
    alike: dict[tuple[str | None, int, int], list[str]] = {}
    for grown in regressions:
        if grown.difference > 0:
            alike.setdefault((find_pattern(grown.name), grown.before, grown.after), []).append(grown.name)
    rows = [
        (format_range(names), len(names), before, after, after - before, (after - before) / before if before else None)
        for (_, before, after), names in alike.items()
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
    return table.ranked(top=_SHOWN)


def _encode(verdict: BudgetReport) -> dict[str, Any]:
    columns = _list_findings(()).columns
    return {
        "name": verdict.name,
        "table": verdict.table,
        "kept": verdict.kept,
        "limits": [
            dict(zip([column.key for column in columns], _list_values(finding), strict=True))
            for finding in verdict.findings
        ],
        "modules": [grown._asdict() for grown in verdict.modules],
        "operators": [grown._asdict() for grown in verdict.operators],
        "unknown": dict(verdict.unknown),
    }
