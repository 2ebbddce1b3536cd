"""Find omissions of a count: unsupported ops, unknown masks, and work that a convention ignores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from fvflops.counting.cost_models import TableCostModel
from fvflops.counting.count_trace import find_covered, name_region, region_costs
from fvflops.formulas import FormulaTable, load_table
from fvflops.formulas.functions.attention import SKIPS, has_unknown_mask
from fvflops.trace import Counts, Status, Trace, tensors_in
from fvflops.trace.module_tree import innermost
from fvflops.units import format_percent


def find_unsupported_locations(trace: Trace, counts: Counts) -> dict[str, Counter[str]]:
    """Return op → location → calls for the unsupported ops; a location is such as "'encoder.scan' at net.py:42".

    The line is known for calls that bypass the dispatcher. The root module is named by its class.
    """
    unsupported = counts.ledger()[Status.UNSUPPORTED]
    if not unsupported:
        return {}
    scopes = trace.scopes()
    locations = _locate(
        trace, [index for index, signature in enumerate(trace.signatures) if signature.packet in unsupported]
    )
    for (index, stack, _), calls in trace.region_calls.items():
        name = name_region(trace, trace.regions[trace.region_signatures[index].region])
        if name in unsupported and name not in locations:
            locations.setdefault(name, Counter())[trace.modules.locate(innermost(scopes[stack]))] += calls
    return locations


def find_unknown_masks(trace: Trace, table: FormulaTable) -> dict[str, Counter[str]]:
    """Return op → location → calls of attention with an unknown mask, {} if the table counts all pairs anyway."""
    if not table.constants.get(SKIPS):
        return {}
    return _locate(trace, [index for index, signature in enumerate(trace.signatures) if has_unknown_mask(signature)])


def _locate(trace: Trace, signatures: list[int]) -> dict[str, Counter[str]]:
    wanted, scopes = set(signatures), trace.scopes()
    locations: dict[str, Counter[str]] = {}
    for (index, stack, _), calls in trace.calls.items() if wanted else ():
        if index in wanted:
            signature = trace.signatures[index]
            location = trace.modules.locate(innermost(scopes[stack]), signature.source)
            locations.setdefault(signature.packet, Counter())[location] += calls
    return locations


def describe_unknown_masks(trace: Trace, table: FormulaTable) -> str:
    """Return the attention with unknown masks in one line, "" if there is none."""
    listed = []
    for op, places in sorted(find_unknown_masks(trace, table).items()):
        first, *more = places
        others = f" and {len(more)} more" if more else ""
        listed.append(f"{op} ×{sum(places.values())} (in {first}{others})")
    return ", ".join(listed)


# More FLOPs than an elementwise op has for each element: below, `exact` is not loaded.
_PER_ELEMENT = 16


def describe_ignored_work(trace: Trace, counts: Counts, table: FormulaTable, handled: Collection[str] = ()) -> str:
    """Return the share of a run's FLOPs that a convention ignores, as text: "all", "86%", or "" up to a half.

    `handled` are ops counted by handles, `counts` the run's FLOPs by the convention.
    """
    if table.floating_point_only or counts.metric != "flops":
        return ""
    # FLOPs with two for a multiply-add; results of handles are not split.
    work = max(counts.total(), sum(2 * entry.macs + entry.flops for entry in counts.entries))
    calls = _ignored_calls(trace, counts, table, handled)
    elements = 0
    for index, number in calls.items():
        signature = trace.signatures[index]
        specs = tensors_in((*signature.inputs, *signature.outputs))
        elements += number * max((spec.numel for spec in specs), default=0)
    if work > _PER_ELEMENT * elements:
        return ""
    exact = load_table("exact")
    ignored = sum(number * exact.price(trace.signatures[index]).value for index, number in calls.items())
    if not counts.total():
        return "all" if ignored else ""
    return format_percent(ignored, ignored + work) if ignored > work else ""


def describe_ignored_products(trace: Trace, counts: Counts, table: FormulaTable) -> str:
    """Return the ops with multiply-adds by `default` that a convention ignores, with calls and their share, or ""."""
    price = TableCostModel(load_table("default"), "flops").op_cost
    calls = _ignored_calls(trace, counts, table)
    macs = {index: number * price(trace.signatures[index])[0].macs for index, number in calls.items()}
    ops: Counter[str] = Counter()
    for index in filter(macs.get, macs):
        ops[trace.signatures[index].packet] += calls[index]
    if not ops:
        return ""
    total = sum(number * price(trace.signatures[index])[0].macs for (index, _, _), number in trace.calls.items())
    listed = "; ".join(f"{op} ×{number}" for op, number in sorted(ops.items()))
    return f"{listed} ({format_percent(sum(macs.values()), total)} of the multiply-adds)"


def _ignored_calls(trace: Trace, counts: Counts, table: FormulaTable, handled: Collection[str] = ()) -> dict[int, int]:
    """Return signature index → calls that a convention ignores or takes for zero-FLOP, not inside a counted module."""
    statuses = {(entry.op, entry.status) for entry in counts.entries}
    named = {op for op, status in statuses if status in (Status.IGNORED, Status.ZERO_FLOP)}.difference(handled)
    covered = find_covered(trace, region_costs(trace, TableCostModel(table, "flops")))
    calls: dict[int, int] = {}
    for (index, stack, phase), number in trace.calls.items():
        signature = trace.signatures[index]
        if signature.packet in named and signature.op not in handled and (stack, phase) not in covered:
            calls[index] = calls.get(index, 0) + number
    return calls
