"""Explain why two conventions count one run differently, from the `Counts` of both."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from fvflops.features.conventions.model import Difference
from fvflops.trace import Counts, Entry, Status

Scope = tuple[str, ...]


def explain_differences(first: Counts, second: Counts, *, units: tuple[int, int]) -> tuple[Difference, ...]:
    """Return why the second counts differ from the first, largest reason first.

    `units` are the FLOPs per multiply-add of each. The values add up to `second.total() - first.total()`. Ops are
    matched within each module, since conventions count at different ops: `linear` in one is `addmm` in another. An op
    without a match is ignored by the other convention, zero-FLOP or unsupported.
    """
    first_unit, second_unit = units
    macs = sum(entry.macs for entry in first.entries)
    values: Counter[tuple[str, str]] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    modules_with_formula = _scopes_with_formula(first) | _scopes_with_formula(second)
    first_sums, second_sums = (
        _sum_by_scope(counts.entries, modules_with_formula, second_unit) for counts in (first, second)
    )
    for scope in first_sums.keys() | second_sums.keys():
        for pair, value, count in _match(first_sums.get(scope, {}), second_sums.get(scope, {})):
            values[pair] += value
            calls[pair] += count
    unsupported = {entry.label for entry in second.entries if entry.status is Status.UNSUPPORTED}
    reasons = [Difference("unit", (second_unit - first_unit) * macs)] if second_unit != first_unit and macs else []
    for (left, right), value in values.items():
        if value:
            if left and right:
                kind = "different_count"
            elif right:
                kind = "only_second"
            else:
                kind = "unsupported" if left in unsupported else "only_first"
            reasons.append(Difference(kind, value, left, right, calls[left, right]))
    return tuple(sorted(reasons, key=lambda reason: -abs(reason.value)))


def _scopes_with_formula(counts: Counts) -> set[Scope]:
    """Return the scopes of modules that a formula table counts by a formula for the module instead of by their ops."""
    return {entry.scope for entry in counts.entries if "::" not in entry.op}


def _sum_by_scope(
    entries: Iterable[Entry], modules_with_formula: set[Scope], unit: int
) -> dict[Scope, dict[str, tuple[int, int]]]:
    """Return scope → label → (FLOPs, calls); ops inside one of `modules_with_formula` are attributed to it."""
    sums: dict[Scope, dict[str, tuple[int, int]]] = defaultdict(dict)
    for entry in entries:
        scope = entry.scope
        scope = next((scope[:end] for end in range(1, len(scope)) if scope[:end] in modules_with_formula), scope)
        flops, calls = sums[scope].get(entry.label, (0, 0))
        sums[scope][entry.label] = flops + unit * entry.macs + entry.flops, calls + entry.calls
    return sums


def _match(
    first: dict[str, tuple[int, int]], second: dict[str, tuple[int, int]]
) -> Iterable[tuple[tuple[str, str], int, int]]:
    """Match the labels of one module's costs in two conventions; the arguments map label → (FLOPs, calls).

    Yield (first label, second label), the second's FLOPs minus the first's, and the calls; a label is "" where the work
    is not counted. Labels of equal FLOPs on both sides count the same work, and are not yielded.
    """
    for label in first.keys() & second.keys():
        (first_flops, first_calls), (second_flops, second_calls) = first[label], second[label]
        pair = label if first_flops else "", label if second_flops else ""
        yield pair, second_flops - first_flops, max(first_calls, second_calls)
    left = {label: cost for label, cost in first.items() if cost[0] and label not in second}
    right = {label: cost for label, cost in second.items() if cost[0] and label not in first}
    for label, (flops, _) in list(left.items()):
        equal = next((right_label for right_label, (right_flops, _) in right.items() if right_flops == flops), None)
        if equal is not None:
            del left[label], right[equal]
    if sum(flops for flops, _ in left.values()) == sum(flops for flops, _ in right.values()):
        return
    if len(left) == len(right) == 1:
        ((left_label, (left_flops, calls)),) = left.items()
        ((right_label, (right_flops, _)),) = right.items()
        yield (left_label, right_label), right_flops - left_flops, calls
        return
    yield from (((label, ""), -flops, calls) for label, (flops, calls) in left.items())
    yield from ((("", label), flops, calls) for label, (flops, calls) in right.items())
