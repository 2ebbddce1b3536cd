"""Read a model for the first time, with what is known of other modules with the same attributes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from fvflops.capture.model.attribute_plan import IMMUTABLE, AttributePlan, plan_of
from fvflops.capture.model.leaf_kinds import Description, LeafKind, find_kind
from fvflops.capture.model.read_module_tree import ReprKind, class_facts, extra_repr_of, is_described, module_paths
from fvflops.capture.recorder.tensor_specs import describe
from fvflops.capture.shapes.metadata import Metadata
from fvflops.trace import ModuleInfo, ModuleTree, ParameterInfo
from fvflops.trace.lazy_records import LazyMapping

_INTEGERS = frozenset({int})
_MAX_TEXTS = 1 << 12  # per plan
# (name, index of the tensor)
_Tensors = tuple[tuple[str, int], ...]


# What a module tree contains of a module, except where the module and its tensors are in the model: its description,
# the names of parameters that are None, its parameters, its buffers, and its children with whether they exist.
_ModuleFacts = tuple[Description, tuple[str, ...], _Tensors, _Tensors, tuple[tuple[str, bool], ...]]


class FirstRead:
    """A model's modules, in the order of their first paths, and their contents.

    `paths` are all paths with their modules, `first_paths` those of `modules`. `mappings`, `empty`, `others`, `tensors`
    and `kinds` are those of ModelIndex; `labels` are kind and name of each tensor. `is_plain` is False for a model with
    modules that keep their tensors elsewhere, such as a ScriptModule: then the rest is incomplete.
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
        self._indices: dict[int, int] = {}
        self._facts: dict[int, tuple[str, _ModuleFacts]] = {}
        inner: list[dict[str, Any]] = []
        self.is_plain = all(
            self._read(path, module, inner) for path, module in self.paths if id(module) not in self._facts
        )
        self.mappings += inner

    def tree(self, metadata: Sequence[Metadata], trainable: Sequence[bool]) -> ModuleTree:
        """Return the module tree, constructed on access, from the metadata of the tensors."""
        rows = [(path, *self._facts[id(module)]) for path, module in self.paths]
        return ModuleTree(LazyMapping(partial(_make_infos, rows, metadata, trainable)))

    def _read(self, path: str, module: nn.Module, inner: list[dict[str, Any]]) -> bool:
        """Read a module; return whether it is plain."""
        attributes = module.__dict__
        values = list(attributes.values())
        plan = plan_of(attributes, values)
        if not plan.is_plain or plan.has_script_objects or plan.is_exported:
            return False
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
        parameters, absent = self._index("parameter", prefix, attributes["_parameters"])
        buffers, _ = self._index("buffer", prefix, attributes["_buffers"])
        children = attributes["_modules"]
        description = None if kind is None else kind.descriptions.get(absent)
        if description is None:
            description = (module._get_name(), *_describe_class(module, plan, values, absent))
            if kind is not None:
                kind.descriptions[absent] = description
        names = tuple([(key, child is not None) for key, child in children.items()]) if children else ()
        self._facts[id(module)] = path, (description, absent, parameters, buffers, names)
        return True

    def _read_values(self, plan: AttributePlan, values: list[Any], inner: list[dict[str, Any]]) -> None:
        """Sort a module's values by what can change in them."""
        containers = plan.pick_containers(values)
        if any(containers):
            for value in containers:
                (self.others if value else self.empty).append(value)
        else:
            self.empty += containers
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
        """Return name and index of tensors, and the names of those that are None."""
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
    module: nn.Module, plan: AttributePlan, values: list[Any], absent: tuple[str, ...]
) -> tuple[tuple[str, ...], bool, str, tuple[str, ...], tuple[Any, ...]]:
    """Return classes, has_forward, extra_repr, and names and values of public attributes."""
    cls: Any = type(module)
    classes, has_forward, repr_kind = class_facts(cls)
    names, public = plan.names, plan.pick_public(values)
    is_key = plan.is_shared
    for index in plan.public_tuples:
        value = public[index]
        if type(value) is not tuple or not _INTEGERS.issuperset(map(type, value)):
            is_key = False
    if not is_key:
        described = [(name, describe(value)) for name, value in zip(names, public, strict=True) if is_described(value)]
        names, public = (tuple([name for name, _ in described]), tuple([value for _, value in described]))
    if repr_kind is ReprKind.EMPTY and not plan.has_extra_repr:
        text = ""
    elif repr_kind is ReprKind.BY_ATTRIBUTES and is_key and not plan.has_extra_repr:
        key = cls, public, absent
        cached = plan.texts.get(key)
        if cached is None:
            if len(plan.texts) >= _MAX_TEXTS:
                plan.texts.clear()
            cached = plan.texts[key] = extra_repr_of(module)
        text = cached
    else:
        text = extra_repr_of(module)
    return classes, has_forward, text, names, public


def _make_infos(
    rows: Sequence[tuple[str, str, _ModuleFacts]], metadata: Sequence[Metadata], trainable: Sequence[bool]
) -> dict[str, ModuleInfo]:
    def tensors(prefix: str, named: _Tensors) -> tuple[ParameterInfo, ...]:
        return tuple(
            [ParameterInfo(prefix + name, metadata[index].spec, index, trainable[index]) for name, index in named]
        )

    infos = {}
    for path, first_path, (description, absent, parameters, buffers, children) in rows:
        class_name, classes, has_forward, extra_repr, names, values = description
        prefix = path + "." if path else ""
        infos[path] = ModuleInfo(
            path,
            first_path,
            class_name,
            classes,
            extra_repr,
            has_forward,
            tensors(prefix, parameters),
            tensors(prefix, buffers),
            {**dict(zip(names, values, strict=True)), **dict.fromkeys(absent)},
            tuple([(key, prefix + key if exists else None) for key, exists in children]),
        )
    return infos
