"""Read a model for the first time, using cached plans of modules with the same attributes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn

from fvflops.capture.model.attribute_plan import (
    IMMUTABLE,
    MAPPINGS,
    TENSOR_MAPPINGS,
    AttributePlan,
    Description,
    LeafKind,
    find_kind,
    plan_of,
)
from fvflops.capture.model.read_module_tree import class_facts, extra_repr_of, is_described, module_paths
from fvflops.capture.recorder.tensor_specs import describe
from fvflops.capture.shapes.metadata import Metadata
from fvflops.trace import ModuleInfo, ModuleTree, ParameterInfo
from fvflops.trace.lazy_records import LazyMapping

# (name, index of the tensor)
_Tensors = tuple[tuple[str, int], ...]


# A module's entry in a module tree, except its path and its tensors' places in the model: its description,
# the names of parameters that are None, its parameters, its buffers, and its children with whether they exist.
_ModuleFacts = tuple[Description, tuple[str, ...], _Tensors, _Tensors, tuple[tuple[str, bool], ...]]


class Contents(NamedTuple):
    """The contents of a model's modules, as in ModelIndex; `others` are mutable values, lists included."""

    modules: Sequence[nn.Module]
    mappings: list[dict[str, Any]]
    keys: list[str]
    values: list[Any]
    empty: Sequence[Any]
    others: Sequence[Any]
    tensors: Sequence[torch.Tensor]


class FirstRead:
    """A model's modules, in the order of their first paths, and their contents.

    `paths` are all paths with their modules, `first_paths` one for each of `modules`. `mappings`, `empty`, `others`,
    `tensors` and `kinds` are as in ModelIndex; `labels` are kind and name of each tensor. `is_plain` is False for a
    model with modules that keep their tensors elsewhere, such as a ScriptModule: it has no `tree`.
    """

    def __init__(self, owner: nn.Module | None) -> None:
        self.paths = [] if owner is None else module_paths(owner)
        self.modules: list[nn.Module] = []
        self.first_paths: list[str] = []
        self.mappings: list[dict[str, Any]] = []
        self.empty: list[Any] = []
        self.others: list[Any] = []
        self.kinds: list[LeafKind | None] = []
        self.tensors: list[torch.Tensor] = []
        self.labels: list[tuple[str, str]] = []
        self.is_plain = True
        self._indices: dict[int, int] = {}
        self._facts: dict[int, tuple[str, _ModuleFacts]] = {}
        inner: list[dict[str, Any]] = []
        for path, module in self.paths:
            if id(module) not in self._facts:
                self._facts[id(module)] = path, self._read(path, module, inner)
        self.mappings += inner

    def contents(self) -> Contents:
        keys, values = keys_and_values(self.mappings)
        return Contents(self.modules, self.mappings, keys, values, self.empty, self.others, self.tensors)

    def tree(self, metadata: Sequence[Metadata], trainable: Sequence[bool]) -> ModuleTree:
        """Return the module tree, constructed on access, from the metadata of the tensors."""
        rows = [(path, *self._facts[id(module)]) for path, module in self.paths]
        return ModuleTree(LazyMapping(partial(_make_infos, rows, metadata, trainable)))

    def _read(self, path: str, module: nn.Module, inner: list[dict[str, Any]]) -> _ModuleFacts:
        attributes = module.__dict__
        values = list(attributes.values())
        plan = plan_of(attributes, values)
        named: list[Any] = [attributes.get(key) for key in TENSOR_MAPPINGS]
        if not plan.is_plain or plan.has_script_objects or plan.is_exported:
            self.is_plain = False
            named = [value if type(value) in MAPPINGS else {} for value in named]
        parameters, buffers, children = named
        self.modules.append(module)
        self.first_paths.append(path)
        self.mappings.append(attributes)
        kind = find_kind(type(module), plan, values)
        self.kinds.append(kind)
        if kind is None:
            self._read_values(plan, values, inner)
        else:  # whose containers are empty, and whose tuples contain ints
            self.empty += kind.pick_empty(values)
            for mapping in kind.pick_tensors(values):
                (inner if mapping else self.empty).append(mapping)
        prefix = path + "." if path else ""
        indexed, absent = self._index("parameter", prefix, parameters)
        indexed_buffers, _ = self._index("buffer", prefix, buffers)
        description = None if kind is None else kind.descriptions.get(absent)
        if description is None:
            description = (module._get_name(), *_describe_class(module, plan, values))
            if kind is not None:
                kind.descriptions[absent] = description
        names = tuple([(key, child is not None) for key, child in children.items()]) if children else ()
        return description, absent, indexed, indexed_buffers, names

    def _read_values(self, plan: AttributePlan, values: list[Any], inner: list[dict[str, Any]]) -> None:
        for value in plan.pick_containers(values):
            (self.others if value else self.empty).append(value)
        for position in plan.tuples:
            if not IMMUTABLE.issuperset(map(type, values[position])):
                self.others.append(values[position])
        for position in plan.others:
            self.others.append(values[position])
        for position in plan.mappings:
            if values[position]:
                inner.append(values[position])
            else:
                self.empty.append(values[position])

    def _index(
        self, kind: str, prefix: str, tensors: dict[str, torch.Tensor | None]
    ) -> tuple[_Tensors, tuple[str, ...]]:
        """Return name and index of tensors, and the names that are None."""
        if not tensors:
            return (), ()
        found: list[tuple[str, int]] = []
        absent: tuple[str, ...] = ()
        for name, tensor in tensors.items():
            if tensor is None:
                absent = *absent, name
                continue
            index = self._indices.setdefault(id(tensor), len(self.tensors))
            if index == len(self.tensors):
                self.tensors.append(tensor)
                self.labels.append((kind, prefix + name))
            found.append((name, index))
        return tuple(found), absent


def _describe_class(
    module: nn.Module, plan: AttributePlan, values: list[Any]
) -> tuple[tuple[str, ...], bool, str, Mapping[str, Any]]:
    """Return classes, has_forward, extra_repr, and public attributes."""
    classes, has_forward = class_facts(type(module))  # type: ignore[arg-type]
    public = zip(plan.names, plan.pick_public(values), strict=True)
    described = {name: describe(value) for name, value in public if is_described(value)}
    return classes, has_forward, extra_repr_of(module), described


def _make_infos(
    rows: Sequence[tuple[str, str, _ModuleFacts]], metadata: Sequence[Metadata], trainable: Sequence[bool]
) -> dict[str, ModuleInfo]:
    def tensors(prefix: str, named: _Tensors) -> tuple[ParameterInfo, ...]:
        return tuple(
            [ParameterInfo(prefix + name, metadata[index].spec, index, trainable[index]) for name, index in named]
        )

    infos = {}
    for path, first_path, (description, absent, parameters, buffers, children) in rows:
        class_name, classes, has_forward, extra_repr, public = description
        prefix = path + "." if path else ""
        own_tensors = tensors(prefix, parameters), tensors(prefix, buffers)
        attributes = {**public, **dict.fromkeys(absent)}
        below = tuple([(key, prefix + key if exists else None) for key, exists in children])
        facts = class_name, classes, extra_repr, has_forward
        infos[path] = ModuleInfo(path, first_path, *facts, *own_tensors, attributes, below)
    return infos


def keys_and_values(mappings: Sequence[dict[str, Any]]) -> tuple[list[str], list[Any]]:
    return list(chain.from_iterable(mappings)), list(chain.from_iterable([mapping.values() for mapping in mappings]))
