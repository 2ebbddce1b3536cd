"""Kinds of torch's leaf modules, such as Conv2d(3, 8, 1): modules of one kind do the same with equal inputs."""

from __future__ import annotations

from operator import is_
from typing import Any

from torch import nn
from torch.nn import functional as F

from fvflops.capture.model.attribute_plan import AttributePlan

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
# Class name, classes, has_forward, extra_repr, and names and values of public attributes, as in a module tree.
Description = tuple[str, tuple[str, ...], bool, str, tuple[str, ...], tuple[Any, ...]]


class LeafKind:
    """A class with constant attributes and names of parameters and buffers; equal ones are one object.

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
