"""Find how much of a model's arithmetic a convention ignores: the share of what `exact` counts."""

from __future__ import annotations

from collections.abc import Collection

from fvflops.formulas import FormulaTable, load_table
from fvflops.trace import Counts, Signature, Status, Trace, tensors_in
from fvflops.units import format_percent

# More FLOPs than an elementwise op has for each element: below, `exact` is not loaded.
_PER_ELEMENT = 16


def describe_ignored_work(trace: Trace, counts: Counts, table: FormulaTable, handled: Collection[str] = ()) -> str:
    """Return the share of a run's FLOPs that a convention ignores, as text: "all", "86%", or "" up to a half.

    `handled` are ops counted by handles, `counts` those of the run in FLOPs by the convention.

    >>> from fvflops import FlopCountAnalysis
    >>> import torch
    >>> flops = FlopCountAnalysis(torch.nn.Softplus(), torch.ones(4))
    >>> describe_ignored_work(flops.trace(), flops.counts(), load_table("default"))
    'all'
    """
    if table.floating_point_only or counts.metric != "flops":
        return ""
    work = max(counts.total(), sum(2 * entry.macs + entry.flops for entry in counts.entries))  # of handles the total
    statuses = {(entry.op, entry.status) for entry in counts.entries}
    named = {op for op, status in statuses if status in (Status.IGNORED, Status.ZERO_FLOP)}
    calls: dict[int, int] = {}
    for (index, _, _), number in trace.calls.items():
        signature = trace.signatures[index]
        if signature.packet in named and signature.op not in handled and signature.packet not in handled:
            calls[index] = calls.get(index, 0) + number
    elements = sum(number * _most_elements(trace.signatures[index]) for index, number in calls.items())
    if work > _PER_ELEMENT * elements:
        return ""
    exact = load_table("exact")
    ignored = sum(number * exact.price(trace.signatures[index]).value for index, number in calls.items())
    if not counts.total():
        return "all" if ignored else ""
    return format_percent(ignored, ignored + work) if ignored > work else ""


def _most_elements(signature: Signature) -> int:
    return max((spec.numel for spec in tensors_in((*signature.inputs, *signature.outputs))), default=0)
