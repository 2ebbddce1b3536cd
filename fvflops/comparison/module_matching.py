"""Match the modules of two models, including renamed ones.

The submodules of two matched modules are matched by these rules, from the roots down:

1. In a list (all names are numbers on both sides) by order: difflib aligns modules of equal content (classes, parameter
   shapes and costs, submodules included); in the gaps, modules of equal classes and shapes; in the remaining gaps,
   modules of one class; gaps of equal length on both sides are matched one by one.
2. Elsewhere by name: equal name and class; then, among the rest, equal content; equal classes and shapes; equal name;
   and last, two modules that are the only remaining ones of their class.

Then an unmatched module with parameters or costs is matched anywhere in the other model by equal content, or by equal
classes and shapes. If one model is contained in the other, for example in a wrapper, matching starts there.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from fvflops.trace import ModuleTree

Pair = tuple[str, str]
_Numbers = Mapping[str, int]

_MAX_PAIRS = 1_000_000  # for difflib; beyond, only an equal beginning and end are aligned


@dataclass(frozen=True, slots=True)
class _TreeFingerprint:
    """Numbers that are equal for equal modules, by module name.

    `classes` compares the class, `shapes` also the parameter shapes and the submodules, `content` also the costs.
    `names` are all modules, parents first, `with_content` modules with parameters or costs, submodules included.
    """

    names: tuple[str, ...]
    children: Mapping[str, list[str]]
    classes: Mapping[str, int]
    shapes: Mapping[str, int]
    content: Mapping[str, int]
    with_content: frozenset[str]


_LEVELS = ("content", "shapes", "classes")  # from the strictest comparison to the loosest


def match_modules(
    first: ModuleTree,
    second: ModuleTree,
    first_costs: Mapping[str, Hashable] | None = None,
    second_costs: Mapping[str, Hashable] | None = None,
) -> dict[str, str]:
    """Return name in the first tree → name of the matched module in the second.

    The costs map a module's name to any value that is equal for equal costs; modules without costs are absent.
    """
    numbers: dict[Hashable, int] = {}
    before = _fingerprint(first, first_costs or {}, numbers)
    after = _fingerprint(second, second_costs or {}, numbers)
    pairs: dict[str, str] = {}
    matched_after: set[str] = set()
    _match_subtrees(before, after, _find_roots(before, after), pairs, matched_after)
    for level in _LEVELS[:2]:
        for pair in list(_find_moved(before, after, level, pairs, matched_after)):
            if pair[0] not in pairs and pair[1] not in matched_after:
                _match_subtrees(before, after, pair, pairs, matched_after)
    return pairs


def _fingerprint(tree: ModuleTree, costs: Mapping[str, Hashable], numbers: dict[Hashable, int]) -> _TreeFingerprint:
    """Return the fingerprint of a tree; `numbers` are shared by the trees to be compared."""
    modules = list(tree.modules())
    names = {module.name for module in modules}
    children: dict[str, list[str]] = {module.name: [] for module in modules}
    for module in modules:
        if module.name:
            parent = module.name.rpartition(".")[0]
            children[parent if parent in names else ""].append(module.name)
    classes, shapes, content = dict[str, int](), dict[str, int](), dict[str, int]()
    with_content: set[str] = set()

    def number(*parts: Hashable) -> int:
        return numbers.setdefault(parts, len(numbers))

    for module in reversed(modules):  # children before their parents
        name, submodules = module.name, children[module.name]
        parameter_shapes, cost = tuple(parameter.spec.shape for parameter in module.parameters), costs.get(name)
        classes[name] = number("class", module.class_name)
        shapes[name] = number(classes[name], parameter_shapes, tuple(shapes.get(child) for child in submodules))
        content[name] = number(shapes[name], cost, tuple(content.get(child) for child in submodules), "content")
        if parameter_shapes or cost or not with_content.isdisjoint(submodules):
            with_content.add(name)
    ordered = tuple(module.name for module in modules)
    return _TreeFingerprint(ordered, children, classes, shapes, content, frozenset(with_content))


def _find_roots(before: _TreeFingerprint, after: _TreeFingerprint) -> Pair:
    """Return the pair of modules to start from: both roots, or one root and its only equal inside the other model."""
    if before.content[""] == after.content[""]:
        return "", ""
    for level in _LEVELS:
        before_numbers, after_numbers = getattr(before, level), getattr(after, level)
        if before_numbers[""] == after_numbers[""]:
            return "", ""
        in_after = [name for name in after.names if after_numbers[name] == before_numbers[""]]
        in_before = [name for name in before.names if before_numbers[name] == after_numbers[""]]
        if len(in_after) == 1:
            return "", in_after[0]
        if len(in_before) == 1:
            return in_before[0], ""
    return "", ""


def _match_subtrees(
    before: _TreeFingerprint, after: _TreeFingerprint, roots: Pair, pairs: dict[str, str], matched_after: set[str]
) -> None:
    """Match two modules and then their submodules; add them to `pairs` and `matched_after`."""
    queue = [roots]
    while queue:
        before_name, after_name = queue.pop()
        pairs[before_name] = after_name
        matched_after.add(after_name)
        left = [name for name in before.children[before_name] if name not in pairs]
        right = [name for name in after.children[after_name] if name not in matched_after]
        if left and right and all(map(_is_number, left)) and all(map(_is_number, right)):
            queue += _align(left, right, [(getattr(before, level), getattr(after, level)) for level in _LEVELS])
        else:
            queue += _match_by_name(before, after, left, right)


def _is_number(name: str) -> bool:
    return name.rpartition(".")[2].isdecimal()


def _align(left: list[str], right: list[str], levels: Sequence[tuple[_Numbers, _Numbers]]) -> list[Pair]:
    """Return the pairs of two sequences by the first level, and in the gaps by the next ones."""
    if not left or not right:
        return []
    if not levels:
        return list(zip(left, right, strict=True)) if len(left) == len(right) else []
    left_level, right_level = levels[0]
    left_numbers, right_numbers = [left_level[name] for name in left], [right_level[name] for name in right]
    pairs: list[Pair] = []
    left_end = right_end = 0  # of the previous block
    for left_start, right_start, size in (*_find_blocks(left_numbers, right_numbers), (len(left), len(right), 0)):
        pairs += _align(left[left_end:left_start], right[right_end:right_start], levels[1:])
        left_end, right_end = left_start + size, right_start + size
        pairs += zip(left[left_start:left_end], right[right_start:right_end], strict=True)
    return pairs


def _find_blocks(left: list[int], right: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (index in the first, index in the second, length) of the common blocks of two sequences, in order."""
    shorter = min(len(left), len(right))
    prefix = next((index for index in range(shorter) if left[index] != right[index]), shorter)
    remaining = shorter - prefix
    suffix = next((index for index in range(remaining) if left[-1 - index] != right[-1 - index]), remaining)
    yield 0, 0, prefix
    left_middle, right_middle = left[prefix : len(left) - suffix], right[prefix : len(right) - suffix]
    if len(left_middle) * len(right_middle) <= _MAX_PAIRS:
        matcher = SequenceMatcher(None, left_middle, right_middle, autojunk=False)
        for left_start, right_start, size in matcher.get_matching_blocks():
            yield prefix + left_start, prefix + right_start, size
    yield len(left) - suffix, len(right) - suffix, suffix


def _match_by_name(before: _TreeFingerprint, after: _TreeFingerprint, left: list[str], right: list[str]) -> list[Pair]:
    pairs: list[Pair] = []

    def match(key: Callable[[_TreeFingerprint, str], Any]) -> None:
        """Pair the remaining modules of equal keys, in order."""
        queues: dict[Any, deque[str]] = {}
        matched_left, matched_right = {pair[0] for pair in pairs}, {pair[1] for pair in pairs}
        for name in right:
            if name not in matched_right:
                queues.setdefault(key(after, name), deque()).append(name)
        for name in left:
            queue = queues.get(key(before, name)) if name not in matched_left else None
            if queue:
                pairs.append((name, queue.popleft()))

    match(lambda tree, name: (name.rpartition(".")[2], tree.classes[name]))
    match(lambda tree, name: tree.content[name])
    match(lambda tree, name: tree.shapes[name])
    match(lambda tree, name: name.rpartition(".")[2])
    left_classes = Counter(before.classes[name] for name in set(left) - {pair[0] for pair in pairs})
    right_classes = Counter(after.classes[name] for name in set(right) - {pair[1] for pair in pairs})
    unique = {number for number in left_classes if left_classes[number] == right_classes[number] == 1}
    match(lambda tree, name: tree.classes[name] if tree.classes[name] in unique else (tree is before, name))
    return pairs


def _find_moved(
    before: _TreeFingerprint, after: _TreeFingerprint, level: str, pairs: Mapping[str, str], matched_after: set[str]
) -> Iterator[Pair]:
    """Yield the pairs of modules under different parents, parents first."""
    queues: dict[int, deque[str]] = {}
    before_numbers, after_numbers = getattr(before, level), getattr(after, level)
    for name in after.names:
        if name not in matched_after and name in after.with_content:
            queues.setdefault(after_numbers[name], deque()).append(name)
    for name in before.names:
        queue = queues.get(before_numbers[name]) if name not in pairs and name in before.with_content else None
        while queue and queue[0] in matched_after:
            queue.popleft()
        if queue:
            yield name, queue.popleft()
