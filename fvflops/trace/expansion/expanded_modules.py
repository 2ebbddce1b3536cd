"""The module tree of the full model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fvflops.trace.expansion.layer_run import LayerRun
from fvflops.trace.expansion.repeated_items import with_added
from fvflops.trace.module_tree import ModuleInfo, ModuleTree, ParameterInfo
from fvflops.trace.spec import Value


def expand_modules(modules: ModuleTree, run: LayerRun) -> ModuleTree:
    """Return the module tree of the full model from that of a shortened one.

    >>> from fvflops.trace import ModuleInfo
    >>> names = ("", "layers", *(f"layers.{index}" for index in range(4)))
    >>> tree = ModuleTree({name: ModuleInfo(name, name, "Block") for name in names})
    >>> list(expand_modules(tree, LayerRun("layers", 0, 1, 5)).by_name)[-2:]
    ['layers.3', 'layers.4']
    """
    identities: dict[tuple[int, int], int] = {}

    def number(tensor: ParameterInfo, periods: int) -> ParameterInfo:
        """Return a parameter or buffer under its name and with its number in the full model."""
        period = run.period_of(tensor.name)
        # A tied tensor has one number under each of its names; layers do not share tensors.
        key = tensor.identity, 0 if period is None else periods
        identity = identities.setdefault(key, len(identities))
        return replace(tensor, name=run.rename(tensor.name, periods), identity=identity)

    def move(module: ModuleInfo, periods: int) -> ModuleInfo:
        return replace(
            module,
            name=run.rename(module.name, periods),
            canonical=run.rename(module.canonical, periods),
            parameters=tuple([number(tensor, periods) for tensor in module.parameters]),
            buffers=tuple([number(tensor, periods) for tensor in module.buffers]),
            attributes=_move_indexes(module, run, periods),
            children=tuple(_expand_children(module, run, periods)),
        )

    moved = (move(*item) for item in with_added(modules.by_name.values(), lambda module: module.name, run))
    return ModuleTree({module.name: module for module in moved})


def _expand_children(module: ModuleInfo, run: LayerRun, periods: int) -> Iterator[tuple[str, str | None]]:
    if module.name != run.path:
        yield from ((key, None if path is None else run.rename(path, periods)) for key, path in module.children)
        return
    for (_, path), moved_by in with_added(module.children, lambda child: child[1] or "", run):
        name = run.rename(path or "", moved_by)
        yield name.rpartition(".")[2], name


def _move_indexes(module: ModuleInfo, run: LayerRun, periods: int) -> dict[str, Value]:
    """Return a module's attributes, those that count layers moved by a number of periods."""
    attributes = dict(module.attributes)
    if periods and run.period_of(module.name) is not None:
        below = module.name[len(run.path) + bool(run.path) :].partition(".")[2]
        for path, name in run.index_attributes:
            value = attributes.get(name)
            if path == below and isinstance(value, int):
                attributes[name] = value + periods * run.period
    return attributes
