"""The difference: why two conventions count differently, from the entries that each has for the same run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from fvflops.features.conventions.model import Difference
from fvflops.trace import Counts, Entry, Status

Scope = tuple[str, ...]


def explain_differences(first: Counts, second: Counts, *, units: tuple[int, int]) -> tuple[Difference, ...]:
    """Return why the second counts differ from the first, largest reason first.

    `units` are the flops that a multiply-add counts for in either. The values add up to `second.total() -
    first.total()`. Ops are matched module by module, since conventions call them by different names: what is left on
    one side alone is left out, or counted beside.
    """
    was, now = units
    macs = sum(entry.macs for entry in first.entries)
    values: Counter[tuple[str, str]] = Counter()
    calls: Counter[tuple[str, str]] = Counter()
    whole = _whole_modules(first) | _whole_modules(second)
    one, two = _gather(first.entries, whole, now), _gather(second.entries, whole, now)
    for scope in one.keys() | two.keys():
        for pair, value, times in _match(one.get(scope, {}), two.get(scope, {})):
            values[pair] += value
            calls[pair] += times
    unknown = {entry.label for entry in second.entries if entry.status is Status.UNKNOWN}
    reasons = [Difference("unit", (now - was) * macs)] if now != was and macs else []
    for (left, right), value in values.items():
        if value:
            kind = ("unknown" if left in unknown else "without") if not right else "otherwise" if left else "beside"
            reasons.append(Difference(kind, value, left, right, calls[left, right]))
    return tuple(sorted(reasons, key=lambda reason: -abs(reason.value)))


def _whole_modules(counts: Counts) -> set[Scope]:
    """Return the scopes of the modules that were counted as one."""
    return {entry.scope for entry in counts.entries if "::" not in entry.op}


def _gather(entries: Iterable[Entry], whole: set[Scope], unit: int) -> dict[Scope, dict[str, tuple[int, int]]]:
    """Return scope → label → amount and calls; what ran inside a module that was counted as one belongs to it."""
    sums: dict[Scope, dict[str, tuple[int, int]]] = defaultdict(dict)
    for entry in entries:
        scope = entry.scope
        scope = next((scope[:end] for end in range(1, len(scope)) if scope[:end] in whole), scope)
        amount, calls = sums[scope].get(entry.label, (0, 0))
        sums[scope][entry.label] = amount + unit * entry.macs + entry.flops, calls + entry.calls
    return sums


def _match(
    one: dict[str, tuple[int, int]], two: dict[str, tuple[int, int]]
) -> Iterable[tuple[tuple[str, str], int, int]]:
    """Yield the pairs of labels that stand for the same work in one module, what the second has more, and the calls."""
    for label in one.keys() & two.keys():
        was, now = one[label], two[label]
        yield (label if was[0] else "", label if now[0] else ""), now[0] - was[0], max(was[1], now[1])
    left = {label: item for label, item in one.items() if item[0] and label not in two}
    right = {label: item for label, item in two.items() if item[0] and label not in one}
    for label, (amount, _) in list(left.items()):
        twin = next((other for other, (value, _) in right.items() if value == amount), None)
        if twin is not None:
            del left[label], right[twin]
    if sum(amount for amount, _ in left.values()) == sum(amount for amount, _ in right.values()):
        return
    if len(left) == len(right) == 1:
        ((label, (amount, times)),) = left.items()
        ((other, (value, _)),) = right.items()
        yield (label, other), value - amount, times
        return
    yield from (((label, ""), -amount, times) for label, (amount, times) in left.items())
    yield from ((("", label), amount, times) for label, (amount, times) in right.items())
