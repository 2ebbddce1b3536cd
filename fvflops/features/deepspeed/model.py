"""The profile of a model as plain data: parameters, MACs, FLOPs and time of each module and phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fvflops.trace.module_tree import ModuleInfo, ModuleTree, modules_above


@dataclass(frozen=True, slots=True)
class Figures:
    """The cost of a module or a phase: parameters, MACs, FLOPs in a convention, and time in ns.

    >>> Figures(flops=3000, duration_ns=1500).flops_per_second
    2000000000.0
    """

    parameters: int = 0
    macs: int = 0
    flops: int = 0
    duration_ns: int = 0

    @property
    def flops_per_second(self) -> float:
        """FLOPs per second; 0 where no time was measured."""
        return self.flops * 1e9 / self.duration_ns if self.duration_ns else 0.0

    def __add__(self, other: Figures) -> Figures:
        return Figures(
            self.parameters + other.parameters,
            self.macs + other.macs,
            self.flops + other.flops,
            self.duration_ns + other.duration_ns,
        )


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """The profile of one model.

    `macs` and `flops` map a module's canonical name to the work of its forward calls without submodules; `durations` to
    the time of these calls in ns, with submodules. `phases` maps each recorded phase ("forward", "recompute",
    "backward", "optimizer") to its sum; "forward" is the model alone, without the loss. `batches` are the first sizes
    of the first input tensor of each call of the model. `about` names the table, and under "backward_table" the table
    of the other phases.

    >>> tree = ModuleTree({"": ModuleInfo("", "", "Net", children=(("a", "a"),)), "a": ModuleInfo("a", "a", "Linear")})
    >>> profile = ModelProfile(tree, macs={"a": 6}, flops={"": 1, "a": 12}, durations={"a": 5})
    >>> profile.by_place()[""]
    Figures(parameters=0, macs=6, flops=13, duration_ns=5)
    """

    modules: ModuleTree
    macs: Mapping[str, int] = field(default_factory=dict)
    flops: Mapping[str, int] = field(default_factory=dict)
    durations: Mapping[str, int] = field(default_factory=dict)
    phases: Mapping[str, Figures] = field(default_factory=dict)
    batches: tuple[int, ...] = ()
    about: Mapping[str, str] = field(default_factory=dict)

    def by_place(self) -> dict[str, Figures]:
        """Return module path → the cost of its forward pass.

        A module with several paths has its cost at each, and counts once in a module that contains it more than once;
        so does a tied parameter. The time of a module that was never called is the sum over its submodules.
        """
        places = self.modules.by_name
        inside: dict[str, dict[str, None]] = {name: {} for name in places}
        elements: dict[str, dict[int, int]] = {name: {} for name in places}
        for module in places.values():
            for name in (*modules_above(module.name), module.name):
                inside[name][module.canonical] = None
                elements[name].update({item.identity: item.spec.numel for item in module.parameters})
        durations: dict[str, int] = {}
        for name in reversed(tuple(places)):  # children before their parents
            module = places[name]
            children = [durations[child.name] for child in children_of(module, self.modules)]
            durations[name] = self.durations.get(module.canonical) or sum(children)
        return {
            name: Figures(
                sum(elements[name].values()),
                sum(self.macs.get(path, 0) for path in inside[name]),
                sum(self.flops.get(path, 0) for path in inside[name]),
                durations[name],
            )
            for name in places
        }

    def by_class(self) -> list[dict[str, Figures]]:
        """Return for each depth, 0 being the model, class → the sum over its modules of that class."""
        figures = self.by_place()
        levels: list[dict[str, Figures]] = []
        level = [self.modules.root]
        while level:
            sums: dict[str, Figures] = {}
            for module in level:
                sums[module.class_name] = sums.get(module.class_name, Figures()) + figures[module.name]
            levels.append(sums)
            level = [child for module in level for child in children_of(module, self.modules)]
        return levels


def children_of(module: ModuleInfo, modules: ModuleTree) -> list[ModuleInfo]:
    """Return the direct submodules of a module, each once."""
    found: dict[str, ModuleInfo] = {}
    for _, path in module.children:
        child = modules.by_name.get(path) if path is not None else None
        if child is not None:
            found.setdefault(child.canonical, child)
    return list(found.values())
