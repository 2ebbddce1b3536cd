"""The ledger: in words, which op calls the numbers hold and which they leave out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from fvflops.reports import names
from fvflops.trace import Summary
from fvflops.units import format_quantity, format_thousands

_NAMED = 5  # how many of the ops that a table leaves out are named; unknown ones are all named

# Ops that a program gave torch's flop counter a formula for, and how its number is read.
_REGISTERED = {
    "registered_halved": "By register_flop_formula, two of whose flops are read as one multiply-add",
    "registered": "By register_flop_formula, whose flops are flops, since the ops are elementwise",
}


def render(summary: Summary) -> str:
    """Return the ledger as a few lines of plain text, "" if nothing is known of table and op calls.

    >>> from fvflops.trace import ModuleInfo, ModuleTree
    >>> print(render(Summary(
    ...     ModuleTree({"": ModuleInfo("", "", "Net")}), {},
    ...     ledger={"counted": {"aten::mm": 3}, "omitted": {"aten::sigmoid": 1}, "unknown": {"mylib::scan": 2}},
    ...     unknown_elements={"mylib::scan": 4096}, unknown_places={"mylib::scan": {"'mixer'": 2}},
    ...     about={"table": "default", "multiply_add": "1"})))
    Counted by the table default, in which one multiply-add is 1 flop.
    Of 6 op calls, 3 are counted, 0 do no arithmetic, 1 is left out by the table and 2 are unknown to it.
    Left out by the table: aten::sigmoid (1 call).
    UNKNOWN, so missing from the numbers: mylib::scan (2 calls, 4,096 output elements; in 'mixer').
    """
    return "\n".join(op_coverage_notes(summary))


class Note(NamedTuple):
    """A sentence of the ledger, and whether it tells of a number that is doubtful ("doubt") or missing ("gap")."""

    text: str
    tone: str = ""


def op_coverage_notes(summary: Summary, *, escape: Callable[[str], str] = names.printable) -> list[str]:
    """Return the ledger's sentences; `escape` is applied to each name in them."""
    return [sentence.text for sentence in list_notes(summary, escape=escape)]


def list_notes(summary: Summary, *, escape: Callable[[str], str] = names.printable) -> list[Note]:
    """Return the ledger's sentences with their tone; `escape` is applied to each name in them."""
    sentences = []
    table = summary.about.get("table")
    if table is not None:
        sentences.append(Note(f"Counted by the table {escape(table)}{_explain_multiply_add(summary)}."))
    if "inputs" in summary.about:
        sentences.append(Note(f"Inputs: {escape(summary.about['inputs']) or 'none'}."))
    if not any(summary.ledger.values()):
        return sentences
    sentences.append(Note(_count_calls(summary.ledger)))
    omitted = _rank(summary.ledger.get("omitted", {}))
    if omitted:
        named = [f"{escape(op)} ({format_quantity(calls, 'call')})" for op, calls in omitted[:_NAMED]]
        more = len(omitted) - _NAMED
        rest = f", and {format_quantity(more, 'more op')}" if more > 0 else ""
        sentences.append(Note(f"Left out by the table: {', '.join(named)}{rest}."))
    for key, what in _REGISTERED.items():
        if key in summary.about:
            sentences.append(Note(f"{what}: {escape(summary.about[key])}."))
    if "bounds" in summary.about:
        sentences.append(
            Note(f"AN UPPER BOUND: {escape(summary.about['bounds'])} was taken to keep all it is given.", "doubt")
        )
    if "supposed" in summary.about:
        sentences.append(Note(f"SUPPOSED, for want of a number: {escape(summary.about['supposed'])}.", "doubt"))
    unknown = _rank(summary.ledger.get("unknown", {}))
    if unknown:
        named = [f"{escape(op)} ({_measure(summary, op, calls, escape)})" for op, calls in unknown]
        sentences.append(Note(f"UNKNOWN, so missing from the numbers: {', '.join(named)}.", "gap"))
    return sentences


def _explain_multiply_add(summary: Summary) -> str:
    flops = summary.about.get("multiply_add")
    if flops is None:
        return ""
    return f", in which one multiply-add is {flops} flop{'' if flops == '1' else 's'}"


def _count_calls(ledger: Mapping[str, Mapping[str, int]]) -> str:
    calls = {status: sum(ops.values()) for status, ops in ledger.items()}
    counted, free, omitted, unknown = (calls.get(name, 0) for name in ("counted", "free", "omitted", "unknown"))
    return (
        f"Of {format_quantity(sum(calls.values()), 'op call')}, {_be(counted)} counted, "
        f"{format_thousands(free)} {'does' if free == 1 else 'do'} no arithmetic, "
        f"{_be(omitted)} left out by the table and {_be(unknown)} unknown to it."
    )


def _be(count: int) -> str:
    return f"{format_thousands(count)} {'is' if count == 1 else 'are'}"


def _rank(ops: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(((op, calls) for op, calls in ops.items() if calls), key=lambda item: (-item[1], item[0]))


def _measure(summary: Summary, op: str, calls: int, escape: Callable[[str], str]) -> str:
    text = format_quantity(calls, "call")
    if op in summary.unknown_elements:
        text += ", " + format_quantity(summary.unknown_elements[op], "output element")
    places = summary.unknown_places.get(op)
    if places:
        text += f"; in {format_places(places, escape=escape)}"
    return text


def format_places(places: Iterable[str], *, escape: Callable[[str], str] = names.printable) -> str:
    """Return the first of some places, and how many more there are.

    >>> print(format_places(["'scan' at net.py:42", "'head'"]))
    'scan' at net.py:42 and 1 more place
    """
    first, *more = places
    return escape(first) + (f" and {format_quantity(len(more), 'more place')}" if more else "")
