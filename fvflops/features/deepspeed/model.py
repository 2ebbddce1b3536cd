"""The profile of a model: what each of its modules holds, counts and takes, and what each phase does; plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fvflops.trace.module_tree import ModuleInfo, ModuleTree, modules_above


@dataclass(frozen=True, slots=True)
class Figures:
    """What a module, or a phase, comes to: parameters, multiply-adds, flops in a convention, and time in ns.

    >>> Figures(flops=3000, duration_ns=1500).flops_per_second
    2000000000.0
    """

    parameters: int = 0
    macs: int = 0
    flops: int = 0
    duration_ns: int = 0

    @property
    def flops_per_second(self) -> float:
        """The flops by the time that they took; 0 where that was nothing."""
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
    """One profiled model, ready to be rendered.

    `macs` and `flops` map a module's canonical name to what its forward calls did themselves, without the modules
    inside; `durations` to what these calls took, in ns, with the modules inside. `phases` maps a phase that was
    recorded ("forward", "recompute", "backward", "optimizer") to its sum; that of "forward" is the model's own work,
    without the loss. `batches` are the first sizes of the first tensor that went into each call of the model. `about`
    names the table, and under "backward_table" that of the other phases where it is another.

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
        """Return the figures of the forward pass at every place of the tree.

        A module that stands at several places has its figures at each, and once in what holds it more than once; so has
        a tied parameter. A module that was never called takes what the modules inside it take.
        """
        places = self.modules.places
        inside: dict[str, dict[str, None]] = {name: {} for name in places}
        elements: dict[str, dict[int, int]] = {name: {} for name in places}
        for place in places.values():
            for name in (*modules_above(place.name), place.name):
                inside[name][place.canonical] = None
                elements[name].update({item.identity: item.spec.numel for item in place.parameters})
        durations: dict[str, int] = {}
        for name in reversed(tuple(places)):  # children before their parents
            place = places[name]
            children = [durations[child.name] for child in children_of(place, self.modules)]
            durations[name] = self.durations.get(place.canonical) or sum(children)
        return {
            name: Figures(
                sum(elements[name].values()),
                sum(self.macs.get(module, 0) for module in inside[name]),
                sum(self.flops.get(module, 0) for module in inside[name]),
                durations[name],
            )
            for name in places
        }

    def by_class(self) -> list[dict[str, Figures]]:
        """Return for each depth, the model's being 0, class → the sum over the modules of that class there."""
        figures = self.by_place()
        levels: list[dict[str, Figures]] = []
        level = [self.modules.root]
        while level:
            sums: dict[str, Figures] = {}
            for place in level:
                sums[place.class_name] = sums.get(place.class_name, Figures()) + figures[place.name]
            levels.append(sums)
            level = [child for place in level for child in children_of(place, self.modules)]
        return levels


def children_of(place: ModuleInfo, modules: ModuleTree) -> list[ModuleInfo]:
    """Return the places right inside a place, and of a module that stands there twice the first."""
    found: dict[str, ModuleInfo] = {}
    for _, path in place.children:
        child = modules.places.get(path) if path is not None else None
        if child is not None:
            found.setdefault(child.canonical, child)
    return list(found.values())
