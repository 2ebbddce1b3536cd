"""How to read the attributes of modules with the same attribute names and types, and which modules are leaves."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from operator import is_, itemgetter
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

# Tuples of these are immutable too.
IMMUTABLE = frozenset({type(None), bool, int, float, complex, str, bytes})
MAPPINGS = (dict, OrderedDict)
CONTAINERS = (*MAPPINGS, set)
TENSOR_MAPPINGS = ("_parameters", "_buffers", "_modules")
# Plans of other types are not cached, since that would keep classes alive.
_SHARED_TYPES = frozenset(
    {*IMMUTABLE, *CONTAINERS, tuple, list, FunctionType, MethodType, BuiltinFunctionType, type}
    | {torch.Tensor, nn.Parameter, torch.device, torch.dtype, torch.Size}
)
_NUMBERS_AND_STRINGS = (int, float, str)
_MAX_PLANS = 1 << 12
_PLANS: dict[tuple[tuple[str, ...], tuple[type, ...]], AttributePlan] = {}


# Attributes of fx.GraphModule, and of modules that torch.export.unflatten makes.
_EXPORTED = frozenset({"_graph", "_ty"})


class AttributePlan:
    """Positions in a module's `__dict__` by the kind of value.

    `mappings` are the dicts of parameters, buffers and children, all three if `is_plain`; `pick_containers` returns
    other dicts and sets; `tuples` are tuples, `others` other mutable values. `pick_public` returns the numbers, strings
    and tuples that a module tree contains, `names` are their names. `is_shared`: the plan is cached. `is_exported`: the
    module has the graph, or the class, of an exported module. If `is_constant`, all other values are immutable or
    tuples (`pick_constants`), `pick_tensors` returns parameters and buffers, and `pick_empty` the containers and
    children, all empty in a leaf.
    """

    def __init__(self, keys: tuple[str, ...], types: tuple[type, ...]) -> None:
        containers: list[int] = []
        self.mappings: list[int] = []
        self.tuples: list[int] = []
        self.others: list[int] = []
        public: list[int] = []
        constants: list[int] = []
        for position, (key, kind) in enumerate(zip(keys, types, strict=True)):
            if key in TENSOR_MAPPINGS and kind in MAPPINGS:
                self.mappings.append(position)
            elif kind in CONTAINERS:
                containers.append(position)
            elif kind is tuple:
                self.tuples.append(position)
            elif kind not in IMMUTABLE:
                self.others.append(position)
            if kind is tuple or kind in IMMUTABLE:
                constants.append(position)
            if not key.startswith("_") and (kind is type(None) or issubclass(kind, (*_NUMBERS_AND_STRINGS, tuple))):
                public.append(position)
        self.pick_containers = picker(containers)
        self.pick_public = picker(public)
        self.names = tuple([keys[position] for position in public])
        self.is_plain = len(self.mappings) == len(TENSOR_MAPPINGS)
        self.is_exported = not _EXPORTED.isdisjoint(keys)
        self.has_script_objects = torch.ScriptObject in types
        self.is_shared = _SHARED_TYPES.issuperset(types)
        self.is_constant = self.is_plain and self.is_shared and not self.others
        self.pick_constants = picker(constants)
        by_key = {keys[position]: position for position in self.mappings}
        *tensors, children = [by_key.get(key, 0) for key in TENSOR_MAPPINGS]
        self.pick_tensors = picker(tensors)
        self.pick_empty = picker([*containers, children])


def plan_of(attributes: dict[str, Any], values: list[Any]) -> AttributePlan:
    """Return the plan of a module's attributes."""
    key = tuple(attributes), tuple(map(type, values))
    plan = _PLANS.get(key)
    if plan is None:
        plan = AttributePlan(*key)
        if plan.is_shared:
            if len(_PLANS) >= _MAX_PLANS:
                _PLANS.clear()
            _PLANS[key] = plan
    return plan


def picker(positions: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda values: tuple([values[position] for position in positions])


# Classes whose forward calls this function of torch.nn.functional with the input, attributes and parameters.
_FUNCTIONS: dict[type[nn.Module], str] = {
    nn.Conv1d: "conv1d",
    nn.Conv2d: "conv2d",
    nn.Conv3d: "conv3d",
    nn.Linear: "linear",
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), "batch_norm"),
    nn.LayerNorm: "layer_norm",
    nn.GroupNorm: "group_norm",
    nn.Dropout: "dropout",
    nn.ReLU: "relu",
    nn.ReLU6: "hardtanh",
    nn.GELU: "gelu",
    nn.SiLU: "silu",
    nn.LeakyReLU: "leaky_relu",
    nn.Hardswish: "hardswish",
    nn.Hardsigmoid: "hardsigmoid",
    nn.MaxPool2d: "max_pool2d",
    nn.AvgPool2d: "avg_pool2d",
    nn.AdaptiveAvgPool2d: "adaptive_avg_pool2d",
}
_METHODS = ("forward", "_conv_forward")
# The methods and the function of each class as torch defines them.
_ORIGINALS: dict[type[nn.Module], list[Any]] = {
    cls: [*(getattr(cls, method, None) for method in _METHODS), getattr(F, name)] for cls, name in _FUNCTIONS.items()
}
_INTEGERS = frozenset({int})
_MAX_KINDS = 1 << 14
_KINDS: dict[tuple[Any, ...], LeafKind] = {}
# Class name, classes, has_forward, extra_repr, and public attributes, as in a module tree.
Description = tuple[str, tuple[str, ...], bool, str, Mapping[str, Any]]


class LeafKind:
    """A class with constant attributes and names of parameters and buffers, interned.

    `pick_empty` and `pick_tensors` select, from the values of a module's `__dict__`, the containers that are empty,
    hooks among them, and the mappings of parameters and buffers. `name` is the name of the class's `function`.
    `descriptions` describe such modules, by the names of the parameters that are None.
    """

    __slots__ = ("cls", "descriptions", "function", "name", "pick_empty", "pick_tensors")

    def __init__(self, cls: type[nn.Module], plan: AttributePlan) -> None:
        self.cls = cls
        self.name = _FUNCTIONS[cls]
        self.function = _ORIGINALS[cls][-1]
        self.pick_empty = plan.pick_empty
        self.pick_tensors = plan.pick_tensors
        self.descriptions: dict[tuple[str, ...], Description] = {}

    def is_original(self) -> bool:
        """Return whether the class and its function are as torch defines them."""
        *methods, function = _ORIGINALS[self.cls]
        now = [getattr(self.cls, method, None) for method in _METHODS]
        return all(map(is_, now, methods)) and getattr(F, self.name) is function


def find_kind(cls: type[nn.Module], plan: AttributePlan, values: list[Any]) -> LeafKind | None:
    """Return the kind of a module from its `__dict__`; None if its calls may depend on anything else."""
    if cls not in _FUNCTIONS or not plan.is_constant or any(plan.pick_empty(values)):
        return None
    constants = plan.pick_constants(values)
    for value in constants:
        if type(value) is tuple and not _INTEGERS.issuperset(map(type, value)):
            return None
    key = (cls, plan, constants, *map(tuple, plan.pick_tensors(values)))
    kind = _KINDS.get(key)
    if kind is None:
        if len(_KINDS) >= _MAX_KINDS:
            _KINDS.clear()
        kind = _KINDS[key] = LeafKind(cls, plan)
    return kind
