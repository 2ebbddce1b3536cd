"""The comparison report: what several conventions count, and why they differ from one of them."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from fvflops.features.conventions.model import Comparison, ConventionTotal, Difference
from fvflops.reports.names import printable, printable_short
from fvflops.reports.text.pipe_table import pipe_table
from fvflops.units import format_quantity, format_size

SHOWN = 5  # reasons for each convention
_WIDTH = 100
_PREFACE = (
    "A network multiplies numbers and adds up the products. An addition or a multiplication is a floating-point "
    "operation (FLOP), and a multiplication with its addition is a multiply-add (MAC). Conventions differ in whether "
    "they count a MAC as one FLOP or as two, and in which other arithmetic they count. K, M, G and T stand for a "
    "thousand, a million, a thousand million and a million million."
)


def render(comparison: Comparison, *, against: str | None = None, shown: int = SHOWN) -> str:
    """Return the comparison as text: a table of all conventions, then why each differs from `against`.

    `against` is the first convention if None. Of each convention the `shown` largest reasons are told, and the sum of
    the others. A name that was not compared raises KeyError.
    """
    names = list(comparison.tallies)
    against = names[0] if against is None else against
    comparison.between(against, against)  # which refuses an unknown name
    base = comparison.tallies[against]
    paragraphs = [
        f"{printable_short(comparison.subject)}\n\n" + "\n".join(wrap(_PREFACE, _WIDTH)),
        _draw_tallies(list(comparison.tallies.values())),
        f"Why the others do not say {format_size(base.total)}, as {printable(against)} does:",
    ]
    for name in names:
        if name != against:
            reasons = comparison.between(against, name)
            paragraphs.append(_explain(base, comparison.tallies[name], reasons, shown))
    return "\n\n".join(paragraphs)


def _draw_tallies(tallies: Sequence[ConventionTotal]) -> str:
    headers = ("convention", "it reports", "one MAC is", "MACs", "other FLOPs", "it is")
    rows = [
        (
            printable(tally.name),
            format_size(tally.total),
            "1 FLOP" if tally.multiply_add == 1 else f"{tally.multiply_add} FLOPs",
            format_size(tally.macs),
            format_size(tally.flops),
            printable(tally.description.partition(";")[0]),
        )
        for tally in tallies
    ]
    return pipe_table(headers, rows)


def _explain(base: ConventionTotal, tally: ConventionTotal, reasons: Sequence[Difference], shown: int) -> str:
    head = f"{printable(tally.name)} says {format_size(tally.total)}"
    if not reasons:
        return f"{head}: the same"
    told = [(reason.value, _say(reason, base, tally)) for reason in reasons[:shown]]
    rest = reasons[shown:]
    if rest:
        told.append((sum(reason.value for reason in rest), f"{format_quantity(len(rest), 'smaller difference')}"))
    width = max(len(_sign(value)) for value, _ in told)
    return "\n".join([f"{head}:", *(f"  {_sign(value):>{width}}  {text}" for value, text in told)])


def _say(reason: Difference, base: ConventionTotal, tally: ConventionTotal) -> str:
    calls = f" ({format_quantity(reason.calls, 'call')})"
    first, second = printable_short(reason.first), printable_short(reason.second)
    match reason.kind:
        case "unit":
            return f"it counts a MAC as {format_quantity(tally.multiply_add, 'FLOP')}, not {base.multiply_add}"
        case "without":
            return f"it leaves out {first}{calls}"
        case "unknown":
            return f"it has no formula for {first}{calls}"
        case "beside":
            return f"it also counts {second}{calls}"
    if first == second:
        return f"it counts {'more' if reason.value > 0 else 'less'} for {first}{calls}"
    return f"it counts {second} where {printable(base.name)} counts {first}{calls}"


def _sign(value: int) -> str:
    return f"{'+' if value > 0 else '-'} {format_size(abs(value))}"
