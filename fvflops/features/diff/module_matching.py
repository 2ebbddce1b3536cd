"""Match the modules of two models, renamed ones too.

Submodules of two matched modules are matched by these rules, beginning with the two models:

1. In a list (all names are numbers on both sides) by order: difflib aligns modules of equal content (classes, parameter
   shapes and counts, submodules included); in the gaps, modules of equal classes and shapes; in the gaps left, modules
   of one class; gaps of one length on both sides are matched one by one.
2. Elsewhere by name: equal name and class; then, of the rest, equal content; equal classes and shapes; equal name; and
   last, two that are the only ones left of their class.

Then an unmatched module with parameters or costs is matched anywhere in the other model by equal content, or by equal
classes and shapes. Where one model contains the other as a whole, they are matched there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from fvflops.trace import ModuleTree

Pair = tuple[str, str]

_MOST = 1_000_000  # pairs for difflib; beyond, only an equal beginning and end are aligned


@dataclass(frozen=True, slots=True)
class _TreeFingerprint:
    """A module tree by content; equal numbers mean equal classes, equal classes and shapes, or equal content."""

    order: tuple[str, ...]
    children: Mapping[str, list[str]]
    classes: Mapping[str, int]
    shapes: Mapping[str, int]
    whole: Mapping[str, int]
    heavy: frozenset[str]


# From equal content to equal class.
_LEVELS: Sequence[Callable[[_TreeFingerprint], Mapping[str, int]]] = (
    lambda look: look.whole,
    lambda look: look.shapes,
    lambda look: look.classes,
)


def match_modules(
    first: ModuleTree,
    second: ModuleTree,
    first_counts: Mapping[str, Hashable] | None = None,
    second_counts: Mapping[str, Hashable] | None = None,
) -> dict[str, str]:
    """Return name in the first tree → name of the matched module in the second.

    The counts are module name → any value that is equal for equal costs; modules without costs are not in them.

    >>> from fvflops.trace import ModuleInfo
    >>> one = ModuleTree({name: ModuleInfo(name, name, kind) for name, kind in {"": "Net", "act": "ReLU"}.items()})
    >>> two = ModuleTree({name: ModuleInfo(name, name, kind) for name, kind in {"": "Net", "relu": "ReLU"}.items()})
    >>> match_modules(one, two)
    {'': '', 'act': 'relu'}
    """
    numbers: dict[Hashable, int] = {}
    one = _fingerprint(first, first_counts or {}, numbers)
    two = _fingerprint(second, second_counts or {}, numbers)
    pairs: dict[str, str] = {}
    taken: set[str] = set()
    _descend(one, two, _find_root(one, two), pairs, taken)
    for alike in _LEVELS[:2]:
        for pair in list(_find_moved(one, two, alike, pairs, taken)):
            if pair[0] not in pairs and pair[1] not in taken:
                _descend(one, two, pair, pairs, taken)
    return pairs


def _fingerprint(tree: ModuleTree, counts: Mapping[str, Hashable], numbers: dict[Hashable, int]) -> _TreeFingerprint:
    places = list(tree.modules())
    names = {place.name for place in places}
    children: dict[str, list[str]] = {place.name: [] for place in places}
    for place in places:
        if place.name:
            parent = place.name.rpartition(".")[0]
            children[parent if parent in names else ""].append(place.name)
    classes: dict[str, int] = {}
    shapes: dict[str, int] = {}
    whole: dict[str, int] = {}
    heavy: set[str] = set()

    def number(*parts: Hashable) -> int:
        return numbers.setdefault(parts, len(numbers))

    for place in reversed(places):  # a parent comes before its children
        held = tuple(parameter.spec.shape for parameter in place.parameters)
        inside = children[place.name]
        classes[place.name] = number("class", place.class_name)
        shapes[place.name] = number(classes[place.name], held, tuple(shapes.get(name) for name in inside))
        count = counts.get(place.name)
        whole[place.name] = number(shapes[place.name], count, tuple(whole.get(name) for name in inside), "whole")
        if held or count or not heavy.isdisjoint(inside):
            heavy.add(place.name)
    return _TreeFingerprint(tuple(place.name for place in places), children, classes, shapes, whole, frozenset(heavy))


def _find_root(one: _TreeFingerprint, two: _TreeFingerprint) -> Pair:
    """Return the two modules to begin with: the models, or one of them and where the other contains it."""
    if one.whole[""] == two.whole[""]:
        return "", ""
    for alike in _LEVELS:
        mine, yours = alike(one), alike(two)
        if mine[""] == yours[""]:
            return "", ""
        inside = [name for name in two.order if yours[name] == mine[""]]
        around = [name for name in one.order if mine[name] == yours[""]]
        if len(inside) == 1:
            return "", inside[0]
        if len(around) == 1:
            return around[0], ""
    return "", ""


def _descend(one: _TreeFingerprint, two: _TreeFingerprint, start: Pair, pairs: dict[str, str], taken: set[str]) -> None:
    """Match two modules and then their submodules."""
    queue = [start]
    while queue:
        mine, yours = queue.pop()
        pairs[mine] = yours
        taken.add(yours)
        left = [name for name in one.children[mine] if name not in pairs]
        right = [name for name in two.children[yours] if name not in taken]
        if left and right and all(map(_is_position, left)) and all(map(_is_position, right)):
            levels = [(look(one), look(two)) for look in _LEVELS]
            queue += _align(left, right, levels)
        else:
            queue += _match_names(one, two, left, right)


def _is_position(name: str) -> bool:
    return name.rpartition(".")[2].isdecimal()


def _align(
    left: list[str], right: list[str], levels: Sequence[tuple[Mapping[str, int], Mapping[str, int]]]
) -> list[Pair]:
    """Return the pairs of two sequences by the first level, and in the gaps by the next ones."""
    if not left or not right:
        return []
    if not levels:
        return list(zip(left, right, strict=True)) if len(left) == len(right) else []
    mine, yours = levels[0]
    pairs: list[Pair] = []
    at, there = 0, 0
    ones, twos = [mine[name] for name in left], [yours[name] for name in right]
    for start, begin, size in (*_find_blocks(ones, twos), (len(left), len(right), 0)):
        pairs += _align(left[at:start], right[there:begin], levels[1:])
        at, there = start + size, begin + size
        pairs += zip(left[start:at], right[begin:there], strict=True)
    return pairs


def _find_blocks(left: list[int], right: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (index in the first, index in the second, length) of the common blocks of two sequences, in order."""
    shorter = min(len(left), len(right))
    head = next((index for index in range(shorter) if left[index] != right[index]), shorter)
    rest = shorter - head
    tail = next((index for index in range(rest) if left[-1 - index] != right[-1 - index]), rest)
    yield 0, 0, head
    one, two = left[head : len(left) - tail], right[head : len(right) - tail]
    if len(one) * len(two) <= _MOST:
        for start, begin, size in SequenceMatcher(None, one, two, autojunk=False).get_matching_blocks():
            yield head + start, head + begin, size
    yield len(left) - tail, len(right) - tail, tail


def _match_names(one: _TreeFingerprint, two: _TreeFingerprint, left: list[str], right: list[str]) -> list[Pair]:
    """Return the pairs of two sets of submodules by name."""

    def key(name: str) -> str:
        return name.rpartition(".")[2]

    pairs: list[Pair] = []

    def match(mine: Callable[[str], Any], yours: Callable[[str], Any]) -> None:
        waiting: dict[Any, deque[str]] = {}
        done = {name for pair in pairs for name in pair[1:]}
        for name in right:
            if name not in done:
                waiting.setdefault(yours(name), deque()).append(name)
        paired = {pair[0] for pair in pairs}
        for name in left:
            queue = waiting.get(mine(name)) if name not in paired else None
            if queue:
                pairs.append((name, queue.popleft()))

    match(lambda name: (key(name), one.classes[name]), lambda name: (key(name), two.classes[name]))
    match(one.whole.__getitem__, two.whole.__getitem__)
    match(one.shapes.__getitem__, two.shapes.__getitem__)
    match(key, key)
    mine = Counter(one.classes[name] for name in set(left) - {pair[0] for pair in pairs})
    yours = Counter(two.classes[name] for name in set(right) - {pair[1] for pair in pairs})
    lone = {number for number in mine if mine[number] == yours[number] == 1}
    match(
        lambda name: one.classes[name] if one.classes[name] in lone else ("left", name),
        lambda name: two.classes[name] if two.classes[name] in lone else ("right", name),
    )
    return pairs


def _find_moved(
    one: _TreeFingerprint,
    two: _TreeFingerprint,
    alike: Callable[[_TreeFingerprint], Mapping[str, int]],
    pairs: Mapping[str, str],
    taken: set[str],
) -> Iterator[Pair]:
    """Yield the pairs of modules under different parents, parents first."""
    waiting: dict[int, deque[str]] = {}
    mine, yours = alike(one), alike(two)
    for name in two.order:
        if name not in taken and name in two.heavy:
            waiting.setdefault(yours[name], deque()).append(name)
    for name in one.order:
        queue = waiting.get(mine[name]) if name not in pairs and name in one.heavy else None
        while queue and queue[0] in taken:
            queue.popleft()
        if queue:
            yield name, queue.popleft()
