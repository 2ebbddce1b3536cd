"""Read a model's module tree, through compile wrappers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from fvflops.capture.model.graph_modules import public_class
from fvflops.capture.model.packed_layers import (
    ADAPTERS,
    PackedLayer,
    logical_spec,
    packed_layer,
    packed_tensors,
    stored_bytes,
)
from fvflops.capture.model.script_copy import script_class
from fvflops.capture.recorder.tensor_specs import describe, describe_tensor
from fvflops.trace import ModuleInfo, ModuleTree, ParameterInfo, TensorSpec

# Modules with one of these forwards are never called or run no op: that they are uncalled is not reported.
_SILENT_FORWARDS = (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward, nn.Identity.forward)


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """Return the module wrapped by `torch.compile`, or the module itself."""
    # By name: importing the class takes seconds.
    while type(module).__name__ == "OptimizedModule" and (inner := module._modules.get("_orig_mod")) is not None:
        module = inner
    return module


def is_compiled(model: nn.Module) -> bool:
    """Return whether a module or one of its submodules is compiled."""
    paths = [module for _, module in module_paths(model)]  # compiled ones unwrapped
    children = [child for module in paths for child in module._modules.values() if child is not None]
    modules = (model, *paths, *children)
    return any(
        type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None for module in modules
    )


def unwrap_data_parallel(module: nn.Module) -> nn.Module:
    """Return the module wrapped by `torch.compile`, DataParallel or DistributedDataParallel, or the module itself."""
    module = unwrap_compiled(module)
    if isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        module = unwrap_compiled(module.module)
    return module


def owner_of(model: nn.Module | Callable[..., Any]) -> nn.Module | None:
    """Return the module that a model is, or whose bound method it is; None for a plain function."""
    owner = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    return unwrap_compiled(owner) if isinstance(owner, nn.Module) else None


def module_paths(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (dotted path, module) for all paths in a model, parents before children, shared modules once per path.

    The path of a compiled module has no `_orig_mod`. A module that contains itself is not visited again.
    """
    found: list[tuple[str, nn.Module]] = []
    _visit("", unwrap_compiled(model), found, set())
    return found


def _visit(path: str, module: nn.Module, found: list[tuple[str, nn.Module]], ancestors: set[int]) -> None:
    # Not a nested function: a recursive one is a reference cycle, which would keep the modules alive.
    found.append((path, module))
    children = module._modules
    if children:
        ancestors.add(id(module))
        prefix = path + "." if path else ""
        for key, child in children.items():
            if child is not None:
                if type(child).__name__ == "OptimizedModule":
                    child = unwrap_compiled(child)
                if not child._modules:
                    found.append((prefix + key, child))
                elif id(child) not in ancestors:
                    _visit(prefix + key, child, found, ancestors)
        ancestors.discard(id(module))


def read_tree(owner: nn.Module, names: Mapping[nn.Module, str]) -> ModuleTree:
    """Return the module tree of a model (module → first path); uninitialised lazy parameters raise ValueError."""
    identities: dict[int, int] = {}
    layers = {path: layer for path, module in module_paths(owner) if (layer := packed_layer(module)) is not None}
    infos = {}
    for path, module in module_paths(owner):
        layer = layers.get(path)
        # An embedding in a packed layer is its codebook, looked up by the layer's own codes.
        if layer is None and isinstance(module, nn.Embedding) and path.rpartition(".")[0] in layers and path:
            layer = PackedLayer({}, frozenset())
        infos[path] = _read_module(path, module, names[module], identities, layer)
    return ModuleTree(infos)


def _read_module(
    path: str, module: nn.Module, canonical: str, identities: dict[int, int], layer: PackedLayer | None
) -> ModuleInfo:
    prefix = path + "." if path else ""
    tensors = dict((*module._parameters.items(), *module._buffers.items()))  # TorchScript's are not dicts
    names = set(module._parameters.keys())
    if layer is not None:
        names = {*layer.weights, *layer.biases, *(name for name in tensors if name.startswith(ADAPTERS))}

    def read(is_parameter: bool) -> tuple[ParameterInfo, ...]:
        return tuple(
            _read_tensor(prefix + name, tensor, identities, None if layer is None else layer.weights.get(name))
            for name, tensor in tensors.items()
            if tensor is not None and (name in names) is is_parameter
        )

    packed = [
        ParameterInfo(prefix + name, describe_tensor(tensor), identities.setdefault(key, len(identities)), False)
        for name, key, tensor in packed_tensors(module)
    ]
    classes, has_forward = class_facts(type(module))  # type: ignore[arg-type]
    class_name = _original_class(module)
    if class_name:
        classes = (public_class(class_name),)
    return ModuleInfo(
        name=path,
        canonical=canonical,
        class_name=class_name.rpartition(".")[2] or module._get_name(),
        classes=classes,
        extra_repr=extra_repr_of(module),
        has_forward=has_forward,
        parameters=(*read(True), *packed),
        buffers=read(False),
        attributes={
            **{
                name: describe(value)
                for name, value in module.__dict__.items()
                if not name.startswith("_") and is_described(value)
            },
            # So that a formula can test for the absence of a bias.
            **dict.fromkeys([name for name, tensor in module._parameters.items() if tensor is None]),
        },
        children=tuple((key, None if child is None else prefix + key) for key, child in module._modules.items()),
    )


def _original_class(module: Any) -> str:
    """Return the qualified name of the class that a module was compiled or exported from, "" for an ordinary one."""
    if isinstance(module, torch.jit.ScriptModule):
        return script_class(module)
    read_name = getattr(type(module), "type_name", None)  # a module that torch.export.unflatten made
    return str(read_name(module) or "") if type(module).__module__ == "torch.export.unflatten" and read_name else ""


def extra_repr_of(module: nn.Module) -> str:
    """Return a module's `extra_repr`, "" if that raises."""
    try:
        return str(module.extra_repr())
    except Exception:  # the model runs without it
        return ""


def check_initialised(model: nn.Module) -> None:
    """Raise ValueError for a parameter or buffer of a lazy module that has no shape yet."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        _check_initialised(name, tensor)


def _check_initialised(name: str, tensor: torch.Tensor) -> None:
    if nn.parameter.is_lazy(tensor):
        raise ValueError(f"{name!r} has no shape yet: run the model once so that its lazy modules are initialised")


def _read_tensor(
    name: str, tensor: torch.Tensor, identities: dict[int, int], logical: TensorSpec | None
) -> ParameterInfo:
    _check_initialised(name, tensor)
    identity = identities.setdefault(id(tensor), len(identities))
    own = describe_tensor(tensor)
    spec = logical_spec(tensor, own) if logical is None else logical
    stored = stored_bytes(tensor) if spec is not own else None
    return ParameterInfo(name, spec, identity, tensor.requires_grad, stored)


@lru_cache(maxsize=4096)
def class_facts(cls: type[nn.Module]) -> tuple[tuple[str, ...], bool]:
    """Return the classes whose forward a module class uses, and whether that computes anything."""
    # By name, to avoid importing torch.ao. The forward of its PackedParams classes returns its argument.
    is_packed_params = cls.__module__.startswith("torch.ao.nn.") and cls.__name__.endswith("PackedParams")
    return tuple(_classes_with_forward(cls)), not is_packed_params and _forward_of(cls) not in _SILENT_FORWARDS


def _classes_with_forward(cls: type) -> Iterator[str]:
    """Yield the qualified names of a class and of the bases whose forward it inherits unchanged.

    Bases without a forward, such as the FSDPModule of torch's fully_shard, are left out.
    """
    forward = _forward_of(cls)
    for base in cls.__mro__:
        own = _forward_of(base)
        if base is nn.Module or own not in (forward, None):
            return
        if own is None:
            continue
        public = getattr(nn, base.__name__, None) is base
        yield (f"torch.nn.{base.__name__}" if public else f"{base.__module__}.{base.__qualname__}")


def _forward_of(cls: type) -> Any:
    # Not by getattr: a ScriptModule's forward is a descriptor that works on instances only.
    return next((vars(base)["forward"] for base in cls.__mro__ if "forward" in vars(base)), None)


def is_described(value: Any) -> bool:
    """Return whether a module tree contains an attribute with this value."""
    # By type and the base's methods: a subclass's may raise, and `__class__` may be overridden.
    kind = type(value)
    if issubclass(kind, tuple):
        return all(issubclass(type(item), (int, float, str)) for item in tuple.__iter__(value))
    return issubclass(kind, (int, float, str)) or value is None


def describe_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """Return each argument of a call in readable form: tensors by dtype and shape.

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
