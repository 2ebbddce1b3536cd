"""Find expert candidates: sibling modules of one class with equal parameter shapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from fvflops.trace import ModuleTree
from fvflops.trace.module_tree import modules_above


def find_expert_groups(tree: ModuleTree) -> Iterator[list[str]]:
    """Yield the names of sibling modules of one class with equal parameter shapes.

    >>> from fvflops.trace import ModuleInfo, ParameterInfo, TensorSpec
    >>> def linear(number: int, name: str, rows: int) -> ModuleInfo:
    ...     weight = ParameterInfo(f"{name}.weight", TensorSpec((rows, 3)), number, True)
    ...     return ModuleInfo(name, name, "Linear", parameters=(weight,))
    >>> root = ModuleInfo("", "", "Net", children=(("a", "a"), ("b", "b"), ("c", "c")))
    >>> tree = ModuleTree({"": root, "a": linear(0, "a", 2), "b": linear(1, "b", 2), "c": linear(2, "c", 4)})
    >>> list(find_expert_groups(tree))
    [['a', 'b']]
    """
    shapes: defaultdict[str, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for parameter in tree.parameters():
        for owner in modules_above(parameter.name)[1:]:
            shapes[owner].append((parameter.name[len(owner) :], parameter.spec.shape))
    for module in tree.modules():
        candidates: defaultdict[tuple[str, tuple[tuple[str, tuple[int, ...]], ...]], list[str]] = defaultdict(list)
        for _, path in module.children:
            child = tree.by_name.get(path) if path is not None else None
            if child is not None and child.name == child.canonical and child.name in shapes:
                candidates[child.class_name, tuple(shapes[child.name])].append(child.name)
        yield from (names for names in candidates.values() if len(names) > 1)
