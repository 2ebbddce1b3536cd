"""Report of a comparison: the total by each convention, and why it differs from a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fvflops.comparison.convention_differences import Comparison, ConventionTotal, Difference
from fvflops.reports.document import Document, Items, Table, Value, number_column, text_column
from fvflops.reports.escaping import plain_name
from fvflops.reports.formats import write_document
from fvflops.reports.terminal.op_coverage import describe_ignored
from fvflops.units import format_quantity, format_short

MAX_REASONS = 5  # for each convention
_PREFACE = (
    "A FLOP is one floating-point operation: an addition, a multiplication, a comparison and so on. A MAC "
    "(multiply-add) is a multiplication and the addition of its product. Conventions differ in whether a MAC counts as "
    "one FLOP or two, and in which other operations they count. K, M, G and T are 10^3, 10^6, 10^9 and 10^12."
)
_TOTALS = (
    text_column("convention"),
    number_column("total"),
    number_column("multiply_add", "FLOPs per MAC", form=str),
    number_column("macs", "MACs", missing="-"),
    number_column("flops", "other FLOPs"),
)


def render(comparison: Comparison, *, against: str | None = None, shown: int = MAX_REASONS) -> str:
    """Return the comparison as text; the arguments and errors are those of `comparison_report`."""
    return write_document(comparison_report(comparison, against=against, shown=shown))


def comparison_report(comparison: Comparison, *, against: str | None = None, shown: int = MAX_REASONS) -> Document:
    """Return the totals of all conventions, then why each differs from `against`, by default the first.

    For each convention the `shown` largest reasons are listed, and the sum of the others. A name that was not compared
    raises KeyError.
    """
    against = next(iter(comparison.totals)) if against is None else against
    comparison.between(against, against)  # raises KeyError for an unknown name
    base = comparison.totals[against]
    counts = comparison.totals.values()
    descriptions = [
        f"{name}: {convention.description.partition(';')[0]}." for name, convention in comparison.totals.items()
    ]
    # One that counts FLOPs only, where others count multiply-adds too.
    without_macs = [count.name for count in counts if not count.macs and count.flops and any(c.macs for c in counts)]
    rows = [
        (count.name, count.total, count.multiply_add, None if count.name in without_macs else count.macs, count.flops)
        for count in counts
    ]
    notes = [f"{', '.join(without_macs)}: multiply-adds are among the other FLOPs."] if without_macs else []
    by_share: dict[str, list[str]] = {}
    for count in counts:
        if count.ignored_work:
            by_share.setdefault(count.ignored_work, []).append(count.name)
    notes += [describe_ignored(share, ", ".join(names)) for share, names in by_share.items()]
    unsupported = set.intersection(*(set(count.unsupported) for count in counts))
    if unsupported:
        notes.append(f"Unsupported, so counted by none: {', '.join(map(plain_name, sorted(unsupported)))}.")
    if comparison.left_out:
        notes.append(f"Not by {', '.join(comparison.left_out)}: the Trace was recorded by another convention.")
    reasons: list[tuple[Value, ...]] = []
    for name, convention in comparison.totals.items():
        if name != against:
            reasons += _list_reasons(base, convention, comparison.between(against, name), shown)
    parts: list[Any] = [
        Table("conventions", _TOTALS, rows, noun="convention", notes=notes),
        Items("", descriptions),
    ]
    if reasons:
        columns = (text_column("convention"), number_column("difference", form=_sign), text_column("reason"))
        title = f"Why the others do not report {format_short(base.total)}, as {against} does"
        parts.append(Table("reasons", columns, reasons, title=title, noun="reason"))
    totals = [count.total for count in counts]
    title = f"{comparison.subject}: {format_short(base.total)} FLOPs by {against}"
    if min(totals) < max(totals):
        title += f", {format_short(min(totals))} to {format_short(max(totals))} by {len(totals)} conventions"
    return Document("comparison", title, [*parts, _PREFACE], data=_encode(comparison))


def _list_reasons(
    base: ConventionTotal, convention: ConventionTotal, reasons: Sequence[Difference], shown: int
) -> list[tuple[Value, ...]]:
    if not reasons:
        return [(convention.name, 0, "no difference")]
    rows: list[tuple[Value, ...]] = [
        (convention.name, reason.value, _describe(reason, base, convention)) for reason in reasons[:shown]
    ]
    rest = reasons[shown:]
    if rest:
        value = sum(reason.value for reason in rest)
        rows.append((convention.name, value, format_quantity(len(rest), "smaller difference")))
    return rows


def _describe(reason: Difference, base: ConventionTotal, convention: ConventionTotal) -> str:
    calls = f" ({format_quantity(reason.calls, 'call')})"
    match reason.kind:
        case "unit":
            return f"a MAC is {format_quantity(convention.multiply_add, 'FLOP')}, not {base.multiply_add}"
        case "only_first":
            return f"ignores {reason.first}{calls}"
        case "unsupported":
            return f"no formula for {reason.first}{calls}"
        case "only_second":
            return f"also counts {reason.second}{calls}"
    if reason.first == reason.second:
        return f"counts {'more' if reason.value > 0 else 'less'} for {reason.first}{calls}"
    return f"counts {reason.second}, not {reason.first}{calls}"


def _sign(value: int) -> str:
    return f"{'+' if value > 0 else '-'}{format_short(abs(value))}" if value else "0"


def _encode(comparison: Comparison) -> dict[str, Any]:
    return {
        "subject": comparison.subject,
        "conventions": {
            name: {**asdict(convention), "total": convention.total} for name, convention in comparison.totals.items()
        },
        "differences": [
            {"from": first, "to": second, "reasons": [asdict(reason) for reason in reasons]}
            for (first, second), reasons in comparison.differences.items()
        ],
    }
