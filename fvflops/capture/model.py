"""The reading of a model: its module tree, through the wrappers that people put around models."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fvflops.capture.signature import describe, describe_tensor, tensors_of
from fvflops.trace import ModuleInfo, ModuleTree, ParameterInfo

# Modules whose forward is one of these are never called, or run no op: nobody wonders why nothing was seen in them.
_SILENT_FORWARDS = (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward, nn.Identity.forward)


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` wrapped, or the module itself."""
    while type(module).__name__ == "OptimizedModule" and (inner := module._modules.get("_orig_mod")) is not None:
        module = inner
    return module


def owner_of(model: nn.Module | Callable[..., Any]) -> nn.Module | None:
    """Return the module that a model is, or whose bound method it is; None for a plain function."""
    owner = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    return unwrap_compiled(owner) if isinstance(owner, nn.Module) else None


def devices_of(model: nn.Module | Callable[..., Any], inputs: Any) -> list[torch.device]:
    """Return the devices of the inputs' tensors and of the model's parameters and buffers, the inputs' first."""
    devices = dict.fromkeys(tensor.device for tensor in tensors_of(inputs))
    owner = owner_of(model)
    if owner is not None:
        devices.update(dict.fromkeys(tensor.device for tensor in owner.parameters()))
        devices.update(dict.fromkeys(tensor.device for tensor in owner.buffers()))
    return list(devices)


def named_places(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield (dotted path, module) for each place in a model, a parent before its children, shared modules again.

    A compiled module stands under its own name, without `_orig_mod`. A module that contains itself is not entered
    a second time.
    """
    pending: list[tuple[str, nn.Module, tuple[nn.Module, ...]]] = [("", unwrap_compiled(model), ())]
    while pending:
        path, module, above = pending.pop()
        yield path, module
        inside = (*above, module)
        children = [
            (f"{path}.{key}" if path else key, unwrap_compiled(child), inside)
            for key, child in module._modules.items()
            if child is not None
        ]
        pending.extend(item for item in reversed(children) if not any(item[1] is outer for outer in inside))


def canonical_names(model: nn.Module) -> dict[nn.Module, str]:
    """Return each module of a model with its canonical name, the first path at which it stands."""
    names: dict[nn.Module, str] = {}
    for path, module in named_places(model):
        names.setdefault(module, path)
    return names


def read_modules(model: nn.Module | Callable[..., Any]) -> ModuleTree:
    """Return the module tree of a model, or of the module whose method it is; a function is a root without children.

    A lazy module whose parameters have no shape yet raises ValueError.
    """
    owner = owner_of(model)
    if owner is None:
        name = getattr(model, "__qualname__", type(model).__qualname__)
        return ModuleTree({"": ModuleInfo("", "", name)})
    canonical: dict[nn.Module, str] = {}
    identities: dict[int, int] = {}
    places = {}
    for path, module in named_places(owner):
        places[path] = _read_place(path, module, canonical.setdefault(module, path), identities)
    return ModuleTree(places)


def _read_place(path: str, module: nn.Module, canonical: str, identities: dict[int, int]) -> ModuleInfo:
    prefix = path + "." if path else ""

    def tensors(named: Mapping[str, torch.Tensor | None]) -> tuple[ParameterInfo, ...]:
        return tuple(
            _read_tensor(prefix + name, tensor, identities) for name, tensor in named.items() if tensor is not None
        )

    return ModuleInfo(
        name=path,
        canonical=canonical,
        class_name=module._get_name(),
        classes=tuple(_classes_with_forward(type(module))),
        extra_repr=module.extra_repr(),
        has_forward=_forward_of(type(module)) not in _SILENT_FORWARDS,
        parameters=tensors(module._parameters),
        buffers=tensors(module._buffers),
        attributes={
            name: describe(value)
            for name, value in module.__dict__.items()
            if not name.startswith("_") and _is_plain(value)
        },
        children=tuple((key, None if child is None else prefix + key) for key, child in module._modules.items()),
    )


def _read_tensor(name: str, tensor: torch.Tensor, identities: dict[int, int]) -> ParameterInfo:
    if nn.parameter.is_lazy(tensor):
        raise ValueError(f"{name!r} has no shape yet: run the model once so that its lazy modules are initialised")
    identity = identities.setdefault(id(tensor), len(identities))
    return ParameterInfo(name, describe_tensor(tensor), identity, tensor.requires_grad)


def _classes_with_forward(cls: type) -> Iterator[str]:
    """Yield the qualified names of a class and of those bases whose forward it inherits unchanged."""
    forward = _forward_of(cls)
    for base in cls.__mro__:
        if base is nn.Module or _forward_of(base) is not forward:
            return
        public = getattr(nn, base.__name__, None) is base
        yield f"torch.nn.{base.__name__}" if public else f"{base.__module__}.{base.__qualname__}"


def _forward_of(cls: type) -> Any:
    # Not by attribute: a ScriptModule's forward is a descriptor that can be read from an instance only.
    return next((vars(base)["forward"] for base in cls.__mro__ if "forward" in vars(base)), None)


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(isinstance(item, (int, float, str)) for item in value)
    return isinstance(value, (bool, int, float, str)) or value is None


def describe_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Return each argument of a call as a person would write it down: tensors by dtype and shape.

    >>> describe_inputs((torch.ones(2, 3),), {"scale": 2})
    ['float32[2, 3]', 'scale=2']
    """
    return [_show(value) for value in args] + [f"{name}={_show(value)}" for name, value in kwargs.items()]


def _show(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(describe_tensor(value))
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_show(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name}: {_show(item)}' for name, item in value.items())}}}"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__
