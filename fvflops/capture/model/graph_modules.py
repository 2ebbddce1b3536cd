"""Modules of a `torch.fx` graph that was exported or traced, from the metadata that its nodes have."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from fvflops.torch_internals import OpOverload
from fvflops.trace import ModuleInfo, ModuleTree
from fvflops.trace.module_tree import index_children, modules_above

# Where dynamo and torch.export name the exported model itself.
_ROOTS = re.compile(r"^(L\['\w+'\]|L__self__|_export_root)(\.|$)")
# How dynamo of torch 2.8 and older names a child.
_GETATTR = re.compile(r"getattr\(([^()]*), '(\w+)'\)")
_SUBSCRIPT = re.compile(r"\['?([^\]']*)'?\]")
# A further call of a module, in keys of `nn_module_stack` and in names of unflattened modules.
_CALL = re.compile(r"@\d+")
# The module with which torch.export checks its inputs.
_GUARDS = "_guards_fn"
# torch.nn's own modules are defined in torch.nn.modules.
_NN_CLASS = re.compile(r"^torch\.nn\.modules\.\w+\.")


class NodeScope(NamedTuple):
    """A module call around a node: `key` differs between calls, `path` is the module's, `class_name` is qualified."""

    key: str
    path: str
    class_name: str


@dataclass(frozen=True, slots=True)
class GraphModules:
    """The graphs of a model, and the modules that their nodes name.

    `prefixes` maps the position of each GraphModule with such metadata, in the model's modules, to the path of the
    module that was exported. `bodies` are the positions of graphs that another graph passes to an op, such as the
    branches of torch.cond. `added` maps paths to the modules that no longer exist as such, or only as a container of
    their parameters; `aliases` maps further paths of a module to its first. `hidden` are paths that tracing added.
    """

    prefixes: Mapping[int, str]
    bodies: frozenset[int]
    added: Mapping[str, str]
    aliases: Mapping[str, str]
    hidden: frozenset[str]

    def is_hidden(self, path: str) -> bool:
        """Return whether a path is one that tracing added, or inside one."""
        return bool(self.hidden) and (path in self.hidden or not self.hidden.isdisjoint(modules_above(path)))


def read_graphs(modules: Sequence[nn.Module], names: Mapping[nn.Module, str], positions: Iterable[int]) -> GraphModules:
    """Return the modules that the graphs at `positions` of a model's modules name; `names` maps modules to paths.

    >>> graph = torch.export.export(nn.Sequential(nn.LayerNorm(4)), (torch.ones(2, 4),)).module()
    >>> read_graphs([graph], {graph: ""}, [0]).added
    {'': 'torch.nn.Sequential', '0': 'torch.nn.LayerNorm'}
    """
    prefixes: dict[int, str] = {}
    bodies: set[int] = set()
    added: dict[str, str] = {}
    aliases: dict[str, str] = {}
    hidden: set[str] = set()
    by_id = {id(module): position for position, module in enumerate(modules)}
    for position in positions:
        module: Any = modules[position]
        path = names[module]
        children = {prefix_path(path, name): child for name, child in module.named_children()}
        # Graphs that it passes to ops, such as the branches of torch.cond.
        targets = dict.fromkeys(str(node.target) for node in module.graph.nodes if node.op == "get_attr")
        inside = dict(module.named_modules(remove_duplicate=False))
        passed = {name: inside[name] for name in targets if isinstance(inside.get(name), fx.GraphModule)}
        # torch.export checks a program's inputs in a module of this class.
        hidden |= {name for name, child in children.items() if type(child).__name__ == "GuardsFn"}
        hidden |= {
            prefix_path(path, name) for name, body in passed.items() if not [*body.parameters(), *body.buffers()]
        }
        inner = [by_id[id(body)] for body in passed.values()]
        bodies.update(inner)
        prefix = prefixes.get(position, path) if position in bodies else path
        scopes = [scope for node in module.graph.nodes for scope in scopes_of(node)]
        all_scopes = (scope for node in module.graph.nodes for scope in _all_scopes(node))
        root = next((scope.class_name for scope in all_scopes if scope.class_name and not scope.path), "")
        if not (scopes or root):
            continue
        prefixes[position] = prefix
        prefixes.update(dict.fromkeys(inner, prefix))
        if root and position not in bodies:
            added.setdefault(prefix, root)
        by_key: dict[str, str] = {}
        for scope in scopes:
            full = prefix_path(prefix, scope.path)
            added.setdefault(full, scope.class_name)
            identity = _CALL.sub("", scope.key)
            if identity.isdecimal():  # the module's address when it was traced by dynamo
                first = by_key.setdefault(identity, full)
                if first != full:
                    aliases[full] = first
    return GraphModules(prefixes, frozenset(bodies), added, aliases, frozenset(hidden))


def scopes_of(node: fx.Node) -> tuple[NodeScope, ...]:
    """Return the module calls around a node, outermost first, without the root."""
    return tuple(scope for scope in _all_scopes(node) if scope.path)


def prefix_path(prefix: str, path: str) -> str:
    """Return a path inside a module, from the model's root.

    >>> prefix_path("", "fc"), prefix_path("net", ""), prefix_path("net", "fc")
    ('fc', 'net', 'net.fc')
    """
    return f"{prefix}.{path}" if prefix and path else prefix or path


def public_class(name: str) -> str:
    """Return the name of a class as its users write it.

    >>> public_class("torch.nn.modules.linear.Linear"), public_class("__main__.build.<locals>.Net")
    ('torch.nn.Linear', 'Net')
    """
    return _NN_CLASS.sub("torch.nn.", name.rpartition("<locals>.")[2]).removeprefix("__main__.")


def runs_ops(node: fx.Node) -> bool:
    """Return whether a node may run ops; one that only reads an attribute, an element or a size does not."""
    target = node.target
    if node.op == "call_function":
        if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, int)):  # a size, or a value that is read
            return isinstance(target, OpOverload) and not target.name().startswith("aten::sym_")
        return target is not operator.getitem
    return node.op == "call_method" or (node.op == "call_module" and target != _GUARDS)


def with_graph_modules(tree: ModuleTree, graphs: GraphModules) -> ModuleTree:
    """Return a module tree with the modules that graphs name, and without modules that tracing added."""
    modules = {name: info for name, info in tree.by_name.items() if not graphs.is_hidden(name)}
    for path, class_name in graphs.added.items():
        short = class_name.rpartition(".")[2]
        canonical = graphs.aliases.get(path, path)
        info = modules.get(path)
        if info is None:
            for ancestor in (*modules_above(path)[1:], path):
                if ancestor not in modules:
                    modules[ancestor] = ModuleInfo(ancestor, ancestor, "Module", has_forward=False)
            modules[path] = ModuleInfo(path, canonical, short, (class_name,))
        else:
            # A container of parameters has no forward of its own.
            classes = (class_name,) if info.class_name in ("Module", "GraphModule") else info.classes
            modules[path] = replace(
                info,
                canonical=graphs.aliases.get(path, info.canonical),
                class_name=short,
                classes=classes,
                has_forward=True,
            )
    return ModuleTree(_in_tree_order(modules))


def _in_tree_order(modules: Mapping[str, ModuleInfo]) -> dict[str, ModuleInfo]:
    """Return modules parents before children, with the children that they have now."""
    children = index_children(modules)
    ordered: dict[str, ModuleInfo] = {}
    pending = [""]
    while pending:
        path = pending.pop()
        found = children.get(path, [])
        absent = [(key, child) for key, child in modules[path].children if child is None]
        ordered[path] = replace(
            modules[path], children=(*((child.rpartition(".")[2], child) for child in found), *absent)
        )
        pending += reversed(found)
    return ordered


def _all_scopes(node: fx.Node) -> Iterator[NodeScope]:
    stack: Mapping[str, tuple[str, Any]] = node.meta.get("nn_module_stack") or {}
    for key, (path, kind) in stack.items():
        class_name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        yield NodeScope(str(key), _clean(path), public_class(class_name))


def _clean(path: str) -> str:
    """Return a module's path as `named_modules` writes it.

    >>> _clean("L['self'].layers['0'].fc"), _clean("_export_root.b"), _clean("fc@1"), _clean("getattr(L['fn'], '0').fc")
    ('layers.0.fc', 'b', 'fc', '0.fc')
    """
    while (shorter := _GETATTR.sub(r"\1.\2", path)) != path:
        path = shorter
    return _SUBSCRIPT.sub(r".\1", _CALL.sub("", _ROOTS.sub("", path))).lstrip(".")
