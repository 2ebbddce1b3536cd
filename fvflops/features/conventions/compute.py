"""Explain why two conventions count one run differently, from the entries of their counts."""

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
    without a match is ignored by the other convention.
    """
    was, now = units
    macs = sum(entry.macs for entry in first.entries)
    values: Counter[tuple[str, str]] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    counted_as_one = _modules_counted_as_one(first) | _modules_counted_as_one(second)
    one, two = _sum_by_scope(first.entries, counted_as_one, now), _sum_by_scope(second.entries, counted_as_one, now)
    for scope in one.keys() | two.keys():
        for pair, value, times in _match(one.get(scope, {}), two.get(scope, {})):
            values[pair] += value
            calls[pair] += times
    unknown = {entry.label for entry in second.entries if entry.status is Status.UNSUPPORTED}
    reasons = [Difference("unit", (now - was) * macs)] if now != was and macs else []
    for (left, right), value in values.items():
        if value:
            kind = ("unknown" if left in unknown else "without") if not right else "otherwise" if left else "beside"
            reasons.append(Difference(kind, value, left, right, calls[left, right]))
    return tuple(sorted(reasons, key=lambda reason: -abs(reason.value)))


def _modules_counted_as_one(counts: Counts) -> set[Scope]:
    """Return the scopes of modules that a table counts by a formula of the module, not by their ops."""
    return {entry.scope for entry in counts.entries if "::" not in entry.op}


def _sum_by_scope(
    entries: Iterable[Entry], counted_as_one: set[Scope], unit: int
) -> dict[Scope, dict[str, tuple[int, int]]]:
    """Return scope → label → (FLOPs, calls); ops inside a module that is counted as one are attributed to it."""
    sums: dict[Scope, dict[str, tuple[int, int]]] = defaultdict(dict)
    for entry in entries:
        scope = entry.scope
        scope = next((scope[:end] for end in range(1, len(scope)) if scope[:end] in counted_as_one), scope)
        amount, calls = sums[scope].get(entry.label, (0, 0))
        sums[scope][entry.label] = amount + unit * entry.macs + entry.flops, calls + entry.calls
    return sums


def _match(
    one: dict[str, tuple[int, int]], two: dict[str, tuple[int, int]]
) -> Iterable[tuple[tuple[str, str], int, int]]:
    """Yield pairs of labels that count the same work in one module, second minus first in FLOPs, and the calls."""
    for label in one.keys() & two.keys():
        was, now = one[label], two[label]
        yield (label if was[0] else "", label if now[0] else ""), now[0] - was[0], max(was[1], now[1])
    left = {label: item for label, item in one.items() if item[0] and label not in two}
    right = {label: item for label, item in two.items() if item[0] and label not in one}
    for label, (amount, _) in list(left.items()):
        equal = next((other for other, (value, _) in right.items() if value == amount), None)
        if equal is not None:
            del left[label], right[equal]
    if sum(amount for amount, _ in left.values()) == sum(amount for amount, _ in right.values()):
        return
    if len(left) == len(right) == 1:
        ((label, (amount, times)),) = left.items()
        ((other, (value, _)),) = right.items()
        yield (label, other), value - amount, times
        return
    yield from (((label, ""), -amount, times) for label, (amount, times) in left.items())
    yield from ((("", label), amount, times) for label, (amount, times) in right.items())
