"""Index a model's modules, tensors and attributes before a run, with their layout cached for speed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress
from operator import attrgetter, is_
from typing import Any

import torch
from torch import fx, nn
from torch.utils.weak import WeakIdKeyDictionary

from fvflops.capture.model.attribute_plan import picker
from fvflops.capture.model.first_read import Contents, FirstRead, keys_and_values
from fvflops.capture.model.graph_modules import GraphModules, prefix_path, read_graphs, with_graph_modules
from fvflops.capture.model.packed_layers import LOW_PRECISION, named_tensors
from fvflops.capture.model.read_module_tree import owner_of, read_tree, unwrap_compiled
from fvflops.capture.recorder.tensor_specs import PLAIN_TENSORS, inner_tensors
from fvflops.capture.restore.containers import IdentityMapping
from fvflops.capture.shapes.metadata import Metadata, metadata_of_leaf, metadata_of_leaves
from fvflops.capture.unseen.fake_tensors import contains_fakes
from fvflops.torch_internals import is_wrapper_subclass
from fvflops.trace import ModuleInfo, ModuleTree, Region

# The layout of each indexed model, for the model's lifetime.
_LAYOUTS = WeakIdKeyDictionary()


class ModelIndex:
    """A model before a run: modules, their contents, and the module tree.

    `owner` is the model's module, None for a function. `modules` are unique modules, `names` maps each to its first
    path. `mappings` are the dicts of the modules' attributes, parameters, buffers and children; `sizes`, `keys` and
    `values` are their contents, flattened. Among the attributes, `empty` are empty mappings and sets, `others` further
    values of mutable types. `tensors` are the strided parameters and buffers, tied ones under their first name;
    `metadata`, `shapes`, `strides`, `storages`, `offsets`, `requires_grad` and `rows` (bytes of the storage, device,
    "parameter" or "buffer", name) are in the same order. A wrapper subclass, such as a DTensor, has no memory:
    `inner_storages` and `inner_rows` describe its inner tensors. `graphs` has the modules that fx graphs name, or is
    None; `has_scripts`: some modules are TorchScript's. `devices` are the tensors' devices, `unstrided` the other
    tensors; `is_fake`: some are FakeTensors. `kinds` are the kinds of leaf modules, None for other modules.
    Uninitialised lazy parameters raise ValueError.
    """

    def __init__(self, model: nn.Module | Callable[..., Any]) -> None:
        self.owner = owner_of(model)
        layout, contents, first = _read_contents(self.owner)
        self.modules, self.mappings, self.keys, self.values, self.empty, self.others, self.tensors = contents
        self.names: Mapping[nn.Module, str] = IdentityMapping(zip(self.modules, layout.paths, strict=True))
        self.sizes = list(map(len, self.mappings))
        self.unstrided: list[torch.Tensor] = []
        self.inner_storages: list[torch.UntypedStorage] = []
        self.inner_rows: list[tuple[int, str, str, str]] = []
        self.is_fake = False
        labels = layout.labels
        self.has_scripts = bool(layout.script_positions)
        # TorchScript modules' parameters and buffers are in no dict.
        found: dict[int, tuple[torch.Tensor, tuple[str, str]]] = {}
        for index in layout.script_positions:
            for kind, name, tensor in named_tensors(self.modules[index]):
                found.setdefault(id(tensor), (tensor, (kind, prefix_path(layout.paths[index], name))))
        if found:
            self.tensors = (*self.tensors, *(tensor for tensor, _ in found.values()))
            labels = [*labels, *(label for _, label in found.values())]
        layouts = set(map(attrgetter("layout"), self.tensors))
        is_ordinary = set(map(type, self.tensors)) <= PLAIN_TENSORS and layouts <= {torch.strided}
        if not is_ordinary:
            self.is_fake = contains_fakes(self.tensors)
            is_strided = [metadata_of_leaf(tensor) is not None for tensor in self.tensors]
            self.unstrided = [tensor for tensor, strided in zip(self.tensors, is_strided, strict=True) if not strided]
            self.tensors = tuple(compress(self.tensors, is_strided))
            labels = list(compress(labels, is_strided))
            self._read_inner_storages(labels)
        self.shapes = [tensor.shape for tensor in self.tensors]
        self.strides = [tensor.stride() for tensor in self.tensors]
        self.requires_grad = [tensor.requires_grad for tensor in self.tensors]
        self.storages = list(map(torch.Tensor.untyped_storage, self.tensors))
        self.offsets = list(map(torch.Tensor.storage_offset, self.tensors))
        self._update(layout, labels, is_ordinary=is_ordinary)
        self.devices = layout.devices
        self.metadata: list[Metadata] = layout.metadata
        self.rows = layout.rows
        self.regions = layout.regions
        self.kinds = layout.kinds
        self.graphs: GraphModules | None = None
        if layout.graph_positions:
            self.graphs = read_graphs(self.modules, self.names, layout.graph_positions)
        if self.owner is None:
            name = getattr(model, "__qualname__", type(model).__qualname__)
            layout.tree = ModuleTree({"": ModuleInfo("", "", name)})
        elif layout.tree is None or self.unstrided:
            layout.tree = self._read_tree(first, is_ordinary=is_ordinary)
            if self._has_low_precision():
                parameters = {parameter.name for parameter in layout.tree.parameters()}
                self.rows = layout.rows = [
                    (nbytes, device, "parameter" if name in parameters else kind, name)
                    for nbytes, device, kind, name in layout.rows
                ]
            if self.graphs is not None:
                layout.tree = with_graph_modules(layout.tree, self.graphs)
        self.tree = layout.tree

    def _update(self, layout: _Layout, labels: Sequence[tuple[str, str]], *, is_ordinary: bool) -> None:
        """Update the layout's derived results, unless the tensors are as in the last index."""
        tensors, sizes = self.tensors, [storage.nbytes() for storage in self.storages]
        if self.inner_storages:
            pairs = zip(tensors, sizes, strict=True)
            sizes = [0 if is_wrapper_subclass(tensor) else nbytes for tensor, nbytes in pairs]
        dtypes, devices = [tensor.dtype for tensor in tensors], [tensor.device for tensor in tensors]
        columns = self.shapes, self.strides, self.requires_grad, dtypes, devices, sizes, labels
        if layout.columns == columns:
            return
        if is_ordinary:
            layout.metadata = metadata_of_leaves(tensors, self.shapes, self.strides, dtypes, devices)
        else:
            layout.metadata = [item for item in map(metadata_of_leaf, tensors) if item is not None]
        columns_of_rows = zip(sizes, layout.metadata, labels, strict=True)
        layout.rows = [(nbytes, metadata.spec.device, *label) for nbytes, metadata, label in columns_of_rows]
        layout.tree = None
        layout.devices = list(dict.fromkeys([metadata.device for metadata in layout.metadata]))
        layout.columns = columns  # last: after an interruption the next index recomputes all

    def _read_tree(self, first: FirstRead | None, *, is_ordinary: bool) -> ModuleTree:
        assert self.owner is not None
        if is_ordinary and not self._has_low_precision():
            first = FirstRead(self.owner) if first is None else first
            if first.is_plain:
                return first.tree(self.metadata, self.requires_grad)
        return read_tree(self.owner, self.names)

    def _has_low_precision(self) -> bool:
        """Return whether a layer may have packed weights."""
        return not LOW_PRECISION.isdisjoint([metadata.dtype for metadata in self.metadata])

    def _read_inner_storages(self, labels: Sequence[tuple[str, str]]) -> None:
        for tensor, label in zip(self.tensors, labels, strict=True):
            if is_wrapper_subclass(tensor):
                for inner in inner_tensors(tensor):
                    storage = inner.untyped_storage()
                    self.inner_storages.append(storage)
                    self.inner_rows.append((storage.nbytes(), str(inner.device), *label))

    def module_of_tensor(self) -> dict[int, str]:
        """Map the ids of parameters and buffers to their modules' paths; tied ones to the first."""
        paths: dict[int, str] = {}
        for module, path in self.names.items():
            for _, _, tensor in named_tensors(module):
                paths.setdefault(id(tensor), path)
        return paths


def read_modules(model: nn.Module | Callable[..., Any]) -> ModuleTree:
    """Return the module tree of a model or method, a root for a function; uninitialised parameters raise ValueError."""
    return ModelIndex(model).tree


def has_packed(model: nn.Module) -> bool:
    return any(parameter.stored is not None for parameter in read_modules(model).parameters())


def _read_contents(owner: nn.Module | None) -> tuple[_Layout, Contents, FirstRead | None]:
    """Return a model's layout and contents, and the reading if the model has no layout yet, or an outdated one.

    A model that is read for the first time, and perhaps for the last, has a layout without positions.
    """
    known = None if owner is None else _LAYOUTS.get(owner)
    contents = None if known is None else known.read(owner)
    if known is not None and contents is not None:
        return known, contents, None
    first = FirstRead(owner)
    layout = _Layout(first)
    if owner is not None:
        _LAYOUTS[owner] = layout
    if known is not None or not first.is_plain:
        layout.find_positions(first)
    return layout, first.contents(), first


class _Layout:
    """Names of a model's modules and tensors, and where its contents are while the model does not change.

    `paths`, `regions` and `kinds` belong to unique modules, `labels` are kind and name of each tensor. The other
    attributes are results for the last index: its `columns`, and results derived from them. Refers only to immutable
    values of the model.
    """

    def __init__(self, first: FirstRead) -> None:
        self.paths, self.labels, self.kinds = first.first_paths, first.labels, first.kinds
        self.regions = [Region("module", path) for path in self.paths]
        special = [] if first.is_plain else list(enumerate(map(type, first.modules)))
        self.script_positions = [index for index, cls in special if issubclass(cls, torch.jit.ScriptModule)]
        self.graph_positions = [index for index, cls in special if issubclass(cls, fx.GraphModule)]
        self.columns: tuple[Sequence[Any], ...] = ()
        self.metadata: list[Metadata] = []
        self.rows: list[tuple[int, str, str, str]] = []
        self.devices: list[torch.device] = []
        self.tree: ModuleTree | None = None
        self._has_positions = False

    def find_positions(self, first: FirstRead) -> None:
        """Find where the contents are, so that `read` can read them without looking for them."""
        self._steps, nodes = _steps_to(first.modules)
        self._classes = list(map(type, nodes))
        node_positions = {id(node): position for position, node in enumerate(nodes)}
        self._pick_modules = picker([node_positions[id(module)] for module in first.modules])
        attributes, inner = first.mappings[: len(first.modules)], first.mappings[len(first.modules) :]
        roles = {id(value): role for role, kept in enumerate((inner, first.empty, first.others)) for value in kept}
        self._keys, values = keys_and_values(attributes)
        positions: list[list[int]] = [[], [], [], []]
        for position, value in enumerate(values):
            positions[roles.get(id(value), -1)].append(position)
        self._pick_mappings, self._pick_empty, self._pick_others, self._pick_immutable = map(picker, positions)
        self._immutable = self._pick_immutable(values)
        self._empty_types = list(map(type, self._pick_empty(values)))
        mappings = self._pick_mappings(values)
        self._sizes = list(map(len, (*attributes, *mappings)))
        self._inner_keys, inner_values = keys_and_values(mappings)
        self._inner_ids = list(map(id, inner_values))
        inner_positions = {id(value): position for position, value in reversed(list(enumerate(inner_values)))}
        self._pick_tensors = picker([inner_positions[id(tensor)] for tensor in first.tensors])
        self._has_positions = True

    def read(self, owner: nn.Module | None) -> Contents | None:
        """Return the modules' contents, or None if the layout is outdated or without positions."""
        if not self._has_positions:
            return None
        nodes = [] if owner is None else [owner]
        try:
            for parent, key in self._steps:
                nodes.append(nodes[parent]._modules[key])  # type: ignore[arg-type]
        except (KeyError, AttributeError):
            return None
        if list(map(type, nodes)) != self._classes:
            return None
        modules = self._pick_modules(nodes)
        attributes = [module.__dict__ for module in modules]
        keys, values = keys_and_values(attributes)
        if keys != self._keys:
            return None
        empty = self._pick_empty(values)
        is_empty = list(map(type, empty)) == self._empty_types and not any(empty)
        if not is_empty or not all(map(is_, self._pick_immutable(values), self._immutable)):
            return None
        inner = self._pick_mappings(values)
        inner_keys, inner_values = keys_and_values(inner)
        mappings = [*attributes, *inner]
        has_same_keys = list(map(len, mappings)) == self._sizes and inner_keys == self._inner_keys
        if not has_same_keys or list(map(id, inner_values)) != self._inner_ids:
            return None
        others, tensors = self._pick_others(values), self._pick_tensors(inner_values)
        return Contents(modules, mappings, keys + inner_keys, values + inner_values, empty, others, tensors)


def _steps_to(modules: Iterable[nn.Module]) -> tuple[list[tuple[int, str]], list[nn.Module]]:
    """Return the steps to each module as (index of its parent, key there), and the modules reached.

    The first module needs no step. A compiled module needs one to its wrapper and one from there.
    """
    steps: list[tuple[int, str]] = []
    nodes = list(modules)[:1]
    positions = dict.fromkeys(map(id, nodes), 0)
    for module in modules:
        for key, child in module._modules.items():
            parent = positions[id(module)]
            while child is not None and id(child) not in positions:
                steps.append((parent, key))
                parent = positions[id(child)] = len(nodes)
                nodes.append(child)
                if unwrap_compiled(child) is child:
                    break
                key, child = "_orig_mod", child._modules["_orig_mod"]
    return steps, nodes
