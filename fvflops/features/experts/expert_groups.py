"""The siblings: modules side by side that may be experts, since they are of one class and hold the same shapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from fvflops.trace import ModuleTree
from fvflops.trace.module_tree import modules_above


def find_expert_groups(tree: ModuleTree) -> Iterator[list[str]]:
    """Yield the names of modules side by side that are of one class and hold parameters of the same shapes.

    >>> from fvflops.trace import ModuleInfo, ParameterInfo, TensorSpec
    >>> def hold(number: int, name: str, rows: int) -> ModuleInfo:
    ...     weight = ParameterInfo(f"{name}.weight", TensorSpec((rows, 3)), number, True)
    ...     return ModuleInfo(name, name, "Linear", parameters=(weight,))
    >>> root = ModuleInfo("", "", "Net", children=(("a", "a"), ("b", "b"), ("c", "c")))
    >>> tree = ModuleTree({"": root, "a": hold(0, "a", 2), "b": hold(1, "b", 2), "c": hold(2, "c", 4)})
    >>> list(find_expert_groups(tree))
    [['a', 'b']]
    """
    held: defaultdict[str, list[tuple[str, tuple[int, ...]]]] = defaultdict(list)
    for parameter in tree.parameters():
        for module in modules_above(parameter.name)[1:]:
            held[module].append((parameter.name[len(module) :], parameter.spec.shape))
    for place in tree.modules():
        alike: defaultdict[tuple[str, tuple[tuple[str, tuple[int, ...]], ...]], list[str]] = defaultdict(list)
        for _, path in place.children:
            child = tree.places.get(path) if path is not None else None
            if child is not None and child.name == child.canonical and child.name in held:
                alike[child.class_name, tuple(held[child.name])].append(child.name)
        yield from (names for names in alike.values() if len(names) > 1)
