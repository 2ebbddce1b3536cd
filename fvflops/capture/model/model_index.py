"""Index a model's modules, tensors and attributes before a run, with their layout cached for speed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress, islice
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from fvflops.capture.model.attribute_plan import CONTAINERS, IMMUTABLE, MAPPINGS, TENSOR_MAPPINGS, picker, plan_of
from fvflops.capture.model.first_read import FirstRead
from fvflops.capture.model.graph_modules import GraphModules, is_graph, read_graphs, with_graph_modules
from fvflops.capture.model.leaf_kinds import LeafKind, find_kind
from fvflops.capture.model.packed_parameters import LOW_PRECISION
from fvflops.capture.model.read_module_tree import module_paths, owner_of, read_tree, unwrap_compiled
from fvflops.capture.recorder.tensor_specs import inner_tensors
from fvflops.capture.restore.identity_mapping import IdentityMapping
from fvflops.capture.shapes.metadata import Metadata, metadata_of_leaf, metadata_of_leaves
from fvflops.capture.unseen.fake_tensors import contains_fakes
from fvflops.torch_internals import is_wrapper_subclass
from fvflops.trace import ModuleInfo, ModuleTree, Region

# The layout of each indexed model, for the model's lifetime, or _READ_ONCE.
_LAYOUTS = WeakIdKeyDictionary()
_READ_ONCE = object()
_TENSORS = {torch.Tensor, nn.Parameter}


class ModelIndex:
    """A model before a run: modules, their contents, and the module tree.

    `owner` is the model's module, None for a function. `modules` are unique modules, `names` maps each to its first
    path. `mappings` are the dicts of the modules' attributes, parameters, buffers and children; `sizes`, `keys` and
    `values` are their contents, flattened. Among the attributes, `empty` are empty mappings and sets, `lists` lists of
    immutable values, `others` further values of mutable types. `tensors` are the strided parameters and buffers, tied
    ones under their first name; `metadata`, `shapes`, `strides`, `storages`, `offsets`, `requires_grad` and `rows`
    (bytes of the storage, device, "parameter" or "buffer", name) are in the same order. A wrapper subclass, such as a
    DTensor, has no memory: that of its inner tensors is in `inner_storages` and `inner_rows`. `graphs` has the modules
    that fx graphs name, or is None; `has_scripts`: some modules are TorchScript's. `devices` are the tensors' devices,
    `unstrided` the other tensors; `is_fake`: some are FakeTensors. `kinds` are those of leaf modules, None for other
    modules. Uninitialised lazy parameters raise ValueError.
    """

    def __init__(self, model: nn.Module | Callable[..., Any]) -> None:
        self.owner = owner_of(model)
        first, layout, contents = _read_contents(self.owner)
        self.modules = contents.modules
        self.names: Mapping[nn.Module, str] = IdentityMapping(zip(contents.modules, layout.paths, strict=True))
        self.mappings, self.keys, self.values = (contents.mappings, contents.keys, contents.values)
        self.sizes = layout.sizes
        self.empty = contents.empty
        self.lists, self.others = _split_lists(contents.others)
        self.tensors = contents.tensors
        self.unstrided: list[torch.Tensor] = []
        self.inner_storages: list[torch.UntypedStorage] = []
        self.inner_rows: list[tuple[int, str, str, str]] = []
        self.is_fake = False
        labels = layout.labels
        self.has_scripts = bool(layout.script_positions)
        if self.has_scripts:
            found = _script_tensors([(self.modules[index], layout.paths[index]) for index in layout.script_positions])
            self.tensors = (*self.tensors, *(tensor for tensor, _ in found.values()))
            labels = [*labels, *(label for _, label in found.values())]
        is_ordinary = _are_ordinary(self.tensors)
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

    def _update(self, layout: _Names, labels: Sequence[tuple[str, str]], *, is_ordinary: bool) -> None:
        """Derive from the tensors what the layout has of the last index, unless they have not changed since."""
        tensors, sizes = self.tensors, [storage.nbytes() for storage in self.storages]
        if self.inner_storages:
            pairs = zip(tensors, sizes, strict=True)
            sizes = [0 if is_wrapper_subclass(tensor) else nbytes for tensor, nbytes in pairs]
        dtypes, devices = [tensor.dtype for tensor in tensors], [tensor.device for tensor in tensors]
        columns = self.shapes, self.strides, self.requires_grad, dtypes, devices, sizes, labels
        if layout.columns == columns:
            return
        layout.metadata = (
            metadata_of_leaves(tensors, self.shapes, self.strides, dtypes, devices)
            if is_ordinary
            else [metadata for tensor in tensors if (metadata := metadata_of_leaf(tensor)) is not None]
        )
        layout.rows = [
            (nbytes, metadata.spec.device, *label)
            for nbytes, metadata, label in zip(sizes, layout.metadata, labels, strict=True)
        ]
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
        for tensor, (kind, name) in zip(self.tensors, labels, strict=True):
            if is_wrapper_subclass(tensor):
                for inner in inner_tensors(tensor):
                    storage = inner.untyped_storage()
                    self.inner_storages.append(storage)
                    self.inner_rows.append((storage.nbytes(), str(inner.device), kind, name))

    def contents(self) -> Iterator[dict[str, Any]]:
        """Yield the saved contents of each mapping."""
        pairs = zip(self.keys, self.values, strict=True)
        return (dict(islice(pairs, size)) for size in self.sizes)

    def module_of_tensor(self) -> dict[int, str]:
        """Map the ids of parameters and buffers to their modules' paths; tied ones to the first."""
        paths: dict[int, str] = {}
        for module, path in self.names.items():
            for tensors in (module._parameters, module._buffers):
                for tensor in tensors.values():
                    if tensor is not None:
                        paths.setdefault(id(tensor), path)
        return paths


def read_modules(model: nn.Module | Callable[..., Any]) -> ModuleTree:
    """Return the module tree of a model, or of a method's module; a function becomes a root without children.

    Raises ValueError for uninitialised lazy parameters.
    """
    return ModelIndex(model).tree


def has_packed(model: nn.Module) -> bool:
    """Return whether a model has packed weights."""
    return any(parameter.stored is not None for parameter in read_modules(model).parameters())


class _Contents(NamedTuple):
    """The current contents of a model's modules."""

    modules: tuple[nn.Module, ...]
    mappings: list[dict[str, Any]]
    keys: list[str]
    values: list[Any]
    empty: tuple[Any, ...]
    others: tuple[Any, ...]
    tensors: tuple[torch.Tensor, ...]


def _read_contents(owner: nn.Module | None) -> tuple[FirstRead | None, _Names, _Contents]:
    """Return a model's layout and contents; the layout is cached until it is outdated.

    A model that is read for the first time, and perhaps for the last, has only names, and is returned as read.
    """
    layout = None if owner is None else _LAYOUTS.get(owner)
    if isinstance(layout, _ModuleLayout):
        contents = layout.read(owner)
        if contents is not None:
            return None, layout, contents
    elif layout is None:
        first = FirstRead(owner)
        if first.is_plain:
            names = _Names(first.first_paths, first.labels, list(map(len, first.mappings)), first.kinds)
            if owner is not None:
                _LAYOUTS[owner] = _READ_ONCE
            return first, names, _contents_of(first)
    layout = _ModuleLayout(owner)
    contents = layout.read(owner)
    assert contents is not None
    if owner is not None:
        _LAYOUTS[owner] = layout
    return None, layout, contents


class _Names:
    """Names of a model's modules and tensors.

    `paths`, `regions` and `kinds` belong to unique modules. `sizes` are the lengths of the mappings with their
    attributes, then of those with parameters, buffers and children. `labels` are kind and name of each tensor. The
    other attributes are results for the last index: its `columns`, and what is derived from them.
    """

    def __init__(
        self, paths: list[str], labels: list[tuple[str, str]], sizes: list[int], kinds: Sequence[LeafKind | None]
    ) -> None:
        self.paths = paths
        self.regions = [Region("module", path) for path in paths]
        self.labels = labels
        self.sizes = sizes
        self.kinds = kinds
        # Of TorchScript modules and of fx graphs, among the modules.
        self.script_positions: list[int] = []
        self.graph_positions: list[int] = []
        self.columns: tuple[Sequence[Any], ...] = ()
        self.metadata: list[Metadata] = []
        self.rows: list[tuple[int, str, str, str]] = []
        self.devices: list[torch.device] = []
        self.tree: ModuleTree | None = None


class _ModuleLayout(_Names):
    """Positions of a model's modules, attributes and tensors, valid while the model does not change.

    Refers only to immutable values of the model.
    """

    def __init__(self, owner: nn.Module | None) -> None:
        module_list = [] if owner is None else module_paths(owner)
        names = IdentityMapping((module, path) for path, module in module_list)
        self._steps, nodes = _steps_to(names)
        self._classes = list(map(type, nodes))
        positions = {id(node): position for position, node in enumerate(nodes)}
        self._modules = picker([positions[id(module)] for module in names])
        attributes = [module.__dict__ for module in names]
        self._keys, values = _contents(attributes)
        immutable: list[int] = []
        empty: list[int] = []
        mappings: list[int] = []
        others: list[int] = []
        for position, (key, value) in enumerate(zip(self._keys, values, strict=True)):
            cls = type(value)
            if cls in IMMUTABLE or (cls is tuple and IMMUTABLE.issuperset(map(type, value))):
                immutable.append(position)
            elif cls in CONTAINERS and not value:
                empty.append(position)
            elif key in TENSOR_MAPPINGS and cls in MAPPINGS:
                mappings.append(position)
            else:
                others.append(position)
        self._pick_immutable = picker(immutable)
        self._immutable = self._pick_immutable(values)
        self._pick_empty = picker(empty)
        self._empty_types = list(map(type, self._pick_empty(values)))
        self._pick_mappings = picker(mappings)
        self._pick_others = picker(others)
        inner = self._pick_mappings(values)
        self._inner_keys, inner_values = _contents(inner)
        self._inner_ids = list(map(id, inner_values))
        sizes = list(map(len, (*attributes, *inner)))
        inner_positions = {id(value): position for position, value in reversed(list(enumerate(inner_values)))}
        labels: dict[int, tuple[str, str]] = {}
        for module, path in names.items():
            prefix = path + "." if path else ""
            for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
                for name, tensor in tensors.items():
                    if tensor is not None and id(tensor) in inner_positions:
                        labels.setdefault(id(tensor), (kind, prefix + name))
        self._pick_tensors = picker([inner_positions[key] for key in labels])
        kinds = []
        for module in names:
            contents = list(module.__dict__.values())
            kinds.append(find_kind(type(module), plan_of(module.__dict__, contents), contents))
        super().__init__(list(names.values()), list(labels.values()), sizes, kinds)
        self.script_positions = [
            position for position, module in enumerate(names) if issubclass(type(module), torch.jit.ScriptModule)
        ]
        self.graph_positions = [position for position, module in enumerate(names) if is_graph(type(module))]

    def read(self, owner: nn.Module | None) -> _Contents | None:
        """Return the modules' contents, or None if the layout is outdated."""
        nodes = [] if owner is None else [owner]
        try:
            for parent, key in self._steps:
                nodes.append(nodes[parent]._modules[key])  # type: ignore[arg-type]
        except (KeyError, AttributeError):
            return None
        if list(map(type, nodes)) != self._classes:
            return None
        modules = self._modules(nodes)
        attributes = [module.__dict__ for module in modules]
        keys, values = _contents(attributes)
        if keys != self._keys:
            return None
        empty = self._pick_empty(values)
        if (
            list(map(type, empty)) != self._empty_types
            or any(empty)
            or not all(map(is_, self._pick_immutable(values), self._immutable))
        ):
            return None
        inner = self._pick_mappings(values)
        inner_keys, inner_values = _contents(inner)
        mappings = [*attributes, *inner]
        if (
            inner_keys != self._inner_keys
            or list(map(id, inner_values)) != self._inner_ids
            or list(map(len, mappings)) != self.sizes
        ):
            return None
        keys += inner_keys
        values += inner_values
        others, tensors = self._pick_others(values), self._pick_tensors(inner_values)
        return _Contents(modules, mappings, keys, values, empty, others, tensors)


def _script_tensors(modules: Iterable[tuple[nn.Module, str]]) -> dict[int, tuple[torch.Tensor, tuple[str, str]]]:
    """Return id → tensor, kind and name of TorchScript modules' parameters and buffers, which are in no dict."""
    found: dict[int, tuple[torch.Tensor, tuple[str, str]]] = {}
    for module, path in modules:
        prefix = path + "." if path else ""
        for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, tensor in tensors.items():
                if tensor is not None:
                    found.setdefault(id(tensor), (tensor, (kind, prefix + name)))
    return found


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


def _are_ordinary(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether all tensors are strided and of torch's classes."""
    return {*map(type, tensors)} <= _TENSORS and {*map(attrgetter("layout"), tensors)} <= {torch.strided}


def _contents_of(first: FirstRead) -> _Contents:
    return _Contents(
        tuple(first.modules),
        first.mappings,
        *_contents(first.mappings),
        tuple(first.empty),
        tuple(first.others),
        tuple(first.tensors),
    )


def _split_lists(values: Sequence[Any]) -> tuple[list[list[Any]], Sequence[Any]]:
    """Return the lists of immutable values, and the other values."""
    lists = [value for value in values if type(value) is list]
    if IMMUTABLE.issuperset(map(type, chain.from_iterable(lists))):
        return lists, [value for value in values if type(value) is not list] if lists else values
    is_flat = [type(value) is list and IMMUTABLE.issuperset(map(type, value)) for value in values]
    others = [value for value, flat in zip(values, is_flat, strict=True) if not flat]
    return list(compress(values, is_flat)), others


def _contents(mappings: Iterable[dict[str, Any]]) -> tuple[list[str], list[Any]]:
    """Return the concatenated keys and values of mappings."""
    mappings = list(mappings)
    return (list(chain.from_iterable(mappings)), list(chain.from_iterable([mapping.values() for mapping in mappings])))
