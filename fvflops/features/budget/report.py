"""The budget report: how a model compares with its budget, as text or in Markdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction

from fvflops.features.budget.model import BudgetReport, CheckResult, Regression
from fvflops.reports.names import markdown_name, plain_name
from fvflops.reports.terminal.layer_ranges import find_pattern, format_range
from fvflops.reports.text.text_table import text_table
from fvflops.units import format_quantity, format_short, format_thousands

_SHOWN = 5  # modules or operators that grew
_LONGEST = 120  # characters of a name


def render(verdict: BudgetReport) -> str:
    """Return the verdict as text, first of all what is over the budget.

    >>> from fvflops.features.budget.model import Limit
    >>> results = CheckResult(Limit("flops", 20), 24), CheckResult(Limit("macs", 30), 24)
    >>> print(render(BudgetReport("net", "default", results)))
    OVER BUDGET: net costs more than it may, by the table default.
    <BLANKLINE>
    figure  budget  is  difference
    ------  ------  --  ----------  -----
    flops   max 20  24   +4 (+20%)  OVER
    macs    max 30  24   -6 (-20%)  ok
    """
    headers = ("figure", "budget", "is", "difference", "")
    cells = [_write_finding(finding) for finding in verdict.findings]
    table = text_table(headers, [(*cell[:4], cell[4].ljust(5)) for cell in cells])
    lines = [_head(verdict, plain_name), "", *(line.rstrip() for line in table.split("\n"))]
    for sentence in _write_sentences(verdict, plain_name):
        lines += ["", sentence]
    return "\n".join(lines)


def render_markdown(verdict: BudgetReport) -> str:
    """Return the verdict in GitHub's Markdown, as the summary of a step."""
    mark = "✅" if verdict.kept else "❌"
    rows = [f"| {' | '.join(_write_finding(finding))} |" for finding in verdict.findings]
    lines = [f"### {mark} {_head(verdict, markdown_name)}", "", "| figure | budget | is | difference |  |"]
    lines += ["| :--- | ---: | ---: | ---: | :--- |", *rows]
    for sentence in _write_sentences(verdict, markdown_name):
        lines += ["", sentence]
    return "\n".join(lines)


def _head(verdict: BudgetReport, escape: Callable[[str], str]) -> str:
    by = f", by the table {escape(verdict.table)}" if verdict.table else ""
    if verdict.kept:
        return f"{escape(verdict.name)} keeps to its budget{by}."
    over = any(not finding.kept and finding.value > finding.limit.value for finding in verdict.findings)
    what = "costs more than it may" if over else "is not what its budget says exactly"
    return f"{'OVER' if over else 'OFF'} BUDGET: {escape(verdict.name)} {what}{by}."


def _write_finding(finding: CheckResult) -> list[str]:
    limit, value = finding.limit, finding.value
    over = value - limit.value
    share = f" ({100 * over / limit.value:+.3g}%)" if limit.value and over else ""
    budget = f"{'exactly' if limit.exact else 'max'} {_figure(limit.value, value)}"
    if limit.tolerance:
        budget += f" +{_percent(limit.tolerance)}" if not limit.exact else f" ±{_percent(limit.tolerance)}"
    difference = f"{'+' if over > 0 else ''}{format_short(over)}{share}" if over else "0"
    state = "ok" if finding.kept else "OVER" if over > 0 else "UNDER"
    return [limit.figure, budget, _figure(value, limit.value), difference, state]


def _figure(value: int, other: int) -> str:
    """Return a number in short, or in full where its short form is that of another number."""
    short = format_short(value)
    return format_thousands(value) if value != other and short == format_short(other) else short


def _percent(share: Fraction) -> str:
    return f"{float(100 * share):g}%"


def _write_sentences(verdict: BudgetReport, escape: Callable[[str], str]) -> list[str]:
    sentences = []
    for noun, grown in (("modules", verdict.modules), ("operators", verdict.operators)):
        more = [growth for growth in grown if growth.difference > 0]
        if more and not verdict.kept:
            sentences.append(f"Of the {noun}, these grew most in flops: {_list_growths(more, escape)}.")
    if verdict.unknown:
        named = ", ".join(f"{escape(op)} ({format_quantity(calls, 'call')})" for op, calls in verdict.unknown.items())
        sentences.append(f"UNKNOWN, so missing from the numbers: {named}.")
    return sentences


def _list_growths(grown: Sequence[Regression], escape: Callable[[str], str]) -> str:
    alike: dict[tuple[str | None, int, int], list[str]] = {}
    for growth in grown:
        alike.setdefault((find_pattern(growth.name), growth.before, growth.after), []).append(growth.name)
    named = []
    for (_, was, now), names in list(alike.items())[:_SHOWN]:
        share = f", {100 * (now - was) / was:+.3g}%" if was else ", new"
        each = " each" if len(names) > 1 else ""
        numbers = f"{format_short(was)} → {format_short(now)}"
        named.append(f"{escape(format_range(names))} +{format_short(now - was)}{each} ({numbers}{share})")
    rest = len(alike) - _SHOWN
    return "; ".join(named) + (f"; and {format_thousands(rest)} more" if rest > 0 else "")
