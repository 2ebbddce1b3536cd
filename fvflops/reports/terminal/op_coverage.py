"""Sentences on the coverage of a count: its convention, and the op calls counted, ignored and unsupported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from fvflops.reports.escaping import printable, show_status
from fvflops.trace import Summary
from fvflops.trace.records import list_run_notes
from fvflops.units import format_quantity

TERMS = "https://fvflops.github.io/fvflops/concepts/terms/#op-calls"

# Key of `about` → sentence on ops whose formula the program registered in torch.utils.flop_counter, and how its result
# is read.
_REGISTERED = {
    "registered_halved": "Counted by formulas registered with torch's register_flop_formula, halved to multiply-adds",
    "registered": "Counted by formulas registered with torch's register_flop_formula, taken as FLOPs (elementwise ops)",
}


class Note(NamedTuple):
    """A sentence on the coverage; its `tone`, "assumed" or "unsupported", selects a colour."""

    text: str
    tone: str = ""


def render(summary: Summary) -> str:
    """Return the sentences as lines of plain text, "" if the table, the inputs and the op calls are all unknown."""
    return "\n".join(map(printable, op_coverage_notes(summary)))


def op_coverage_notes(summary: Summary) -> list[str]:
    """Return the sentences on a count's coverage, in which names are not escaped."""
    return [sentence.text for sentence in list_notes(summary)]


def list_notes(summary: Summary) -> list[Note]:
    """Return the sentences on a count's coverage with their tone, in which names are not escaped."""
    sentences = []
    if "table" in summary.about:
        flops = summary.about.get("multiply_add")
        explained = "" if flops is None else f" ({flops} FLOP{'' if flops == '1' else 's'} per multiply-add)"
        sentences.append(Note(f"Convention: {summary.about['table']}{explained}."))
    if "inputs" in summary.about:
        sentences.append(Note(f"Inputs: {summary.about['inputs'] or 'none'}."))
    if not any(summary.ledger.values()):
        return sentences
    calls = {status: sum(ops.values()) for status, ops in summary.ledger.items()}
    statuses = ("counted", "zero_flop", "ignored", "unsupported")
    listed = ", ".join(f"{calls.get(status, 0):,} {show_status(status)}" for status in statuses)
    sentences.append(Note(f"{format_quantity(sum(calls.values()), 'op call')}: {listed}."))
    if ignored := _sort_by_calls(summary.ledger.get("ignored", {})):
        named = [f"{op} ({format_quantity(count, 'call')})" for op, count in ignored[:5]]
        more = len(ignored) - 5
        rest = f", and {format_quantity(more, 'more op')}" if more > 0 else ""
        sentences.append(Note(f"Ignored by this convention: {', '.join(named)}{rest}."))
    if "ignored_work" in summary.about:
        sentences.append(Note(describe_ignored(summary.about["ignored_work"], "this convention"), "unsupported"))
    for key, sentence in _REGISTERED.items():
        if key in summary.about:
            sentences.append(Note(f"{sentence}: {summary.about[key]}."))
    if unused := summary.about.get("unused_rows"):
        explained = "work in it that PyTorch does not dispatch is unseen::NAME.backward"
        text = f"Without effect: {unused}. A function's backward is counted op by op; {explained}."
        sentences.append(Note(text, "assumed"))
    sentences += [Note(text, "assumed") for text in list_run_notes(summary.about)]
    if masks := summary.about.get("unknown_masks"):
        sentences.append(Note(f"Mask unknown, counted as dense: {masks}.", "assumed"))
    if unsupported := _sort_by_calls(summary.ledger.get("unsupported", {})):
        named = [f"{op} ({_describe_unsupported(summary, op, count)})" for op, count in unsupported]
        sentences.append(Note(f"Unsupported, so not counted: {', '.join(named)}.", "unsupported"))
    return sentences


def describe_ignored(share: str, by: str) -> str:
    """Return a sentence on the share of a model's FLOPs that a convention ignores."""
    subject = "All arithmetic" if share == "all" else f"{share} of the arithmetic"
    return f"{subject} of this model is ignored by {by}; see --convention exact."


def _sort_by_calls(ops: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(((op, calls) for op, calls in ops.items() if calls), key=lambda item: (-item[1], item[0]))


def _describe_unsupported(summary: Summary, op: str, calls: int) -> str:
    text = format_quantity(calls, "call")
    if op in summary.unsupported_elements:
        text += ", " + format_quantity(summary.unsupported_elements[op], "output element")
    if locations := summary.unsupported_locations.get(op):
        text += f"; in {format_locations(locations, escape=str)}"
    return text


def format_locations(locations: Iterable[str], *, escape: Callable[[str], str] = printable) -> str:
    """Return the first location and the number of the others."""
    first, *others = locations
    return escape(first) + (f" and {format_quantity(len(others), 'more location')}" if others else "")
