"""The profile of a model as plain data: parameters, MACs, FLOPs and time of each module and phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fvflops.text import short_repr
from fvflops.trace.module_tree import ModuleInfo, ModuleTree, modules_above
from fvflops.units import format_short


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of a module or a phase: parameters, MACs, FLOPs in a convention, and time in ns.

    >>> Costs(flops=3000, duration_ns=1500).flops_per_second
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

    def __add__(self, other: Costs) -> Costs:
        return Costs(
            self.parameters + other.parameters,
            self.macs + other.macs,
            self.flops + other.flops,
            self.duration_ns + other.duration_ns,
        )


@dataclass(frozen=True, slots=True, repr=False)
class ModelProfile:
    """The profile of one model.

    `macs` and `flops` map a module's canonical name to those of its forward calls, without submodules; `durations` maps
    it to the time of these calls in ns, with submodules. `phases` maps each recorded phase ("forward", "recompute",
    "backward", "optimizer") to its costs; "forward" is without the loss. `batches` are the first sizes
    of the first input tensor of each call of the model. `about` has the name of the table under "table", and of that
    for the other phases under "backward_table".

    >>> tree = ModuleTree({"": ModuleInfo("", "", "Net", children=(("a", "a"),)), "a": ModuleInfo("a", "a", "Linear")})
    >>> profile = ModelProfile(tree, macs={"a": 6}, flops={"": 1, "a": 12}, durations={"a": 5})
    >>> profile.by_module()[""]
    Costs(parameters=0, macs=6, flops=13, duration_ns=5)
    """

    modules: ModuleTree
    macs: Mapping[str, int] = field(default_factory=dict)
    flops: Mapping[str, int] = field(default_factory=dict)
    durations: Mapping[str, int] = field(default_factory=dict)
    phases: Mapping[str, Costs] = field(default_factory=dict)
    batches: tuple[int, ...] = ()
    about: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        macs, flops = (format_short(sum(counts.values())) for counts in (self.macs, self.flops))
        return short_repr(self, self.modules.root.class_name, f"{macs} MACs", f"{flops} FLOPs")

    def by_module(self) -> dict[str, Costs]:
        """Return module name → the costs of its forward pass, submodules included.

        A module with several names has its costs under each. A shared submodule or a tied parameter counts once in a
        module that contains it several times. The time of a module that was never called is the sum over its
        submodules.
        """
        modules = self.modules.by_name
        submodules: dict[str, dict[str, None]] = {name: {} for name in modules}
        elements: dict[str, dict[int, int]] = {name: {} for name in modules}
        for module in modules.values():
            for name in (*modules_above(module.name), module.name):
                submodules[name][module.canonical] = None
                elements[name].update({item.identity: item.spec.numel for item in module.parameters})
        durations: dict[str, int] = {}
        for name in reversed(tuple(modules)):  # children before their parents
            module = modules[name]
            children = [durations[child.name] for child in children_of(module, self.modules)]
            durations[name] = self.durations.get(module.canonical) or sum(children)
        return {
            name: Costs(
                sum(elements[name].values()),
                sum(self.macs.get(submodule, 0) for submodule in submodules[name]),
                sum(self.flops.get(submodule, 0) for submodule in submodules[name]),
                durations[name],
            )
            for name in modules
        }

    def by_class(self) -> list[dict[str, Costs]]:
        """Return class → the sum over its modules, for each depth; depth 0 is the model."""
        costs = self.by_module()
        levels: list[dict[str, Costs]] = []
        level = [self.modules.root]
        while level:
            sums: dict[str, Costs] = {}
            for module in level:
                sums[module.class_name] = sums.get(module.class_name, Costs()) + costs[module.name]
            levels.append(sums)
            level = [child for module in level for child in children_of(module, self.modules)]
        return levels


def children_of(module: ModuleInfo, modules: ModuleTree) -> list[ModuleInfo]:
    """Return the direct submodules of a module, each once."""
    children: dict[str, ModuleInfo] = {}
    for _, path in module.children:
        child = modules.by_name.get(path) if path is not None else None
        if child is not None:
            children.setdefault(child.canonical, child)
    return list(children.values())
