"""The reading of a model: its module tree, through the wrappers that people put around models."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from itertools import chain
from operator import attrgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fvflops.capture.metadata import Metadata, metadata_of_leaf
from fvflops.capture.signature import describe, describe_tensor
from fvflops.trace import ModuleInfo, ModuleTree, ParameterInfo

# Modules whose forward is one of these are never called, or run no op: nobody wonders why nothing was seen in them.
_SILENT_FORWARDS = (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward, nn.Identity.forward)


def unwrap_compiled(module: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` wrapped, or the module itself."""
    # By name: importing the class takes seconds.
    while type(module).__name__ == "OptimizedModule" and (inner := module._modules.get("_orig_mod")) is not None:
        module = inner
    return module


def owner_of(model: nn.Module | Callable[..., Any]) -> nn.Module | None:
    """Return the module that a model is, or whose bound method it is; None for a plain function."""
    owner = model if isinstance(model, nn.Module) else getattr(model, "__self__", None)
    return unwrap_compiled(owner) if isinstance(owner, nn.Module) else None


def named_places(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (dotted path, module) for each place in a model, a parent before its children, shared modules again.

    A compiled module stands under its own name, without `_orig_mod`. A module that contains itself is not entered
    a second time.
    """
    found: list[tuple[str, nn.Module]] = []
    inside: set[int] = set()

    def visit(path: str, module: nn.Module) -> None:
        found.append((path, module))
        children = module._modules
        if children:
            inside.add(id(module))
            prefix = path + "." if path else ""
            for key, child in children.items():
                if child is not None:
                    child = unwrap_compiled(child)
                    if id(child) not in inside:
                        visit(prefix + key, child)
            inside.discard(id(module))

    visit("", unwrap_compiled(model))
    return found


class Reading:
    """A model as it stands before a run: its modules, what they hold, and its module tree.

    `owner` is None for a plain function. `places` are (path, module) pairs, a shared module at each of its places;
    `names` gives each module the first of its paths. `mappings` are the modules' attributes, parameters, buffers and
    children, each with a copy of it; `empty` those of their mappings and sets that are empty, `others` values that
    are neither and no numbers, texts and the like. `tensors` are the parameters and buffers that are strided, a tied
    one under its first name, and what is to be known of them stands in `metadata`, `storages`, `offsets`,
    `requires_grad` and `labels` ("parameter" or "buffer", name) in the same order; `odd` are those that are not
    strided. A lazy module whose parameters have no shape yet raises ValueError.
    """

    def __init__(self, model: nn.Module | Callable[..., Any]) -> None:
        self.owner = owner_of(model)
        self.places = [] if self.owner is None else named_places(self.owner)
        self.names: dict[nn.Module, str] = {}
        for path, module in self.places:
            self.names.setdefault(module, path)
        attributes = [module.__dict__ for module in self.names]
        self.mappings = [(now, now.copy()) for now in attributes]
        self.odd: list[torch.Tensor] = []
        values = list(chain.from_iterable([before.values() for _, before in self.mappings]))
        layout = None if self.owner is None else _LAYOUTS.get(self.owner)
        if layout is None or not layout.fits(self.places, self.mappings, values):
            layout = _Layout(self.places, self.names, self.mappings, values)
        inner = [values[position] for position in layout.mappings]
        self.mappings += [(now, now.copy()) for now in inner]
        self.empty = [values[position] for position in layout.empty]
        self.others = [values[position] for position in layout.others]
        held = list(chain.from_iterable([now.values() for now in inner]))
        if not layout.fits_tensors(inner, held):
            layout.learn_tensors(self.places, self.names, inner, held)
        self.tensors: list[torch.Tensor] = [held[position] for position in layout.tensors]
        self.labels = layout.labels
        found = layout.metadata_of(self.tensors)
        self.requires_grad = [tensor.requires_grad for tensor in self.tensors]
        if self.owner is None:
            self.tree = ModuleTree({"": ModuleInfo("", "", getattr(model, "__qualname__", type(model).__qualname__))})
        else:
            if layout.tree is None or layout.requires_grad != self.requires_grad:
                layout.tree = self._read_tree()
                layout.requires_grad = self.requires_grad
            self.tree = layout.tree
            _LAYOUTS[self.owner] = layout
        self.metadata: list[Metadata] = [metadata for metadata in found if metadata is not None]
        if len(self.metadata) < len(found):
            self.odd = [tensor for tensor, metadata in zip(self.tensors, found, strict=True) if metadata is None]
            self.tensors, self.labels, self.requires_grad = (
                [item for item, metadata in zip(self.tensors, found, strict=True) if metadata is not None],
                [item for item, metadata in zip(self.labels, found, strict=True) if metadata is not None],
                [item for item, metadata in zip(self.requires_grad, found, strict=True) if metadata is not None],
            )
        self.storages = [tensor.untyped_storage() for tensor in self.tensors]
        self.offsets = [tensor.storage_offset() for tensor in self.tensors]

    def _read_tree(self) -> ModuleTree:
        identities: dict[int, int] = {}
        return ModuleTree(
            {path: _read_place(path, module, self.names[module], identities) for path, module in self.places}
        )


class _Layout:
    """Where in a model's attributes things stand, and its module tree, kept for as long as the model does not change.

    Only plain values are kept alive, nothing else of the model; so an attribute with the id of one is that one.
    Positions count through all attributes of all modules, `tensors` through the parameters, buffers and children.
    """

    def __init__(
        self,
        places: list[tuple[str, nn.Module]],
        names: Mapping[nn.Module, str],
        attributes: list[tuple[dict[str, Any], dict[str, Any]]],
        values: list[Any],
    ) -> None:
        self.marks = self._marks(places, attributes, values)
        self.plain = [value for value in values if is_plain(value)]
        self.mappings: list[int] = []
        self.empty: list[int] = []
        self.others: list[int] = []
        self.tree: ModuleTree | None = None
        self.requires_grad: list[bool] = []
        self._columns: Any = None
        self._metadata: list[Metadata | None] = []
        self.inner_marks: Any = None
        names_of_values = chain.from_iterable([before for _, before in attributes])
        for position, (name, value) in enumerate(zip(names_of_values, values, strict=True)):
            if is_plain(value):
                continue
            if type(value) in (dict, OrderedDict, set) and not value:
                self.empty.append(position)
            elif type(value) in (dict, OrderedDict) and name in ("_parameters", "_buffers", "_modules"):
                self.mappings.append(position)
            else:
                self.others.append(position)

    def fits(
        self,
        places: list[tuple[str, nn.Module]],
        attributes: list[tuple[dict[str, Any], dict[str, Any]]],
        values: list[Any],
    ) -> bool:
        """Return whether the same modules have the same attributes, and nothing is in what was empty."""
        return self.marks == self._marks(places, attributes, values) and not any(map(values.__getitem__, self.empty))

    def fits_tensors(self, mappings: list[dict[str, Any]], held: list[Any]) -> bool:
        """Return whether the parameters, buffers and children are as they were."""
        return bool(self.inner_marks == (list(map(len, mappings)), list(map(id, held))))

    def learn_tensors(
        self,
        places: list[tuple[str, nn.Module]],
        names: Mapping[nn.Module, str],
        mappings: list[dict[str, Any]],
        held: list[Any],
    ) -> None:
        """Note where the parameters and buffers stand, and their names."""
        self.inner_marks = list(map(len, mappings)), list(map(id, held))
        self.tree = None
        labels: dict[int, tuple[str, str]] = {}
        for module, path in names.items():
            prefix = path + "." if path else ""
            for kind, tensors in (("parameter", module._parameters), ("buffer", module._buffers)):
                for name, tensor in tensors.items():
                    labels.setdefault(id(tensor), (kind, prefix + name))
        positions = {id(value): position for position, value in reversed(list(enumerate(held)))}
        self.tensors = [positions[key] for key in labels if key in positions and held[positions[key]] is not None]
        self.labels = [labels[id(held[position])] for position in self.tensors]

    def metadata_of(self, tensors: list[torch.Tensor]) -> list[Metadata | None]:
        """Return the metadata of the parameters and buffers, None for one that is not strided."""
        ordinary = {*map(type, tensors)} <= _TENSORS and {*map(attrgetter("layout"), tensors)} <= {torch.strided}
        if not ordinary:
            return [metadata_of_leaf(tensor) for tensor in tensors]
        columns = (
            [tensor.shape for tensor in tensors],
            [tensor.stride() for tensor in tensors],
            [tensor.dtype for tensor in tensors],
            [tensor.device for tensor in tensors],
        )
        if columns != self._columns:
            self._columns = columns
            self._metadata = [metadata_of_leaf(tensor) for tensor in tensors]
            self.tree = None
        return self._metadata

    @staticmethod
    def _marks(
        places: list[tuple[str, nn.Module]],
        attributes: list[tuple[dict[str, Any], dict[str, Any]]],
        values: list[Any],
    ) -> tuple[list[Any], ...]:
        return (
            [path for path, _ in places],
            [type(module) for _, module in places],
            [next(reversed(before)) for _, before in attributes],
            [len(before) for _, before in attributes],
            list(map(id, values)),
        )


_TENSORS = {torch.Tensor, nn.Parameter}
_LAYOUTS: WeakKeyDictionary[nn.Module, _Layout] = WeakKeyDictionary()
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})


def is_plain(value: Any) -> bool:
    """Return whether a value is a number, a text or the like, or a tuple of such, which a run cannot change."""
    return type(value) in _PLAIN or (type(value) is tuple and _PLAIN.issuperset(map(type, value)))


def read_modules(model: nn.Module | Callable[..., Any]) -> ModuleTree:
    """Return the module tree of a model, or of the module whose method it is; a function is a root without children.

    A lazy module whose parameters have no shape yet raises ValueError.
    """
    return Reading(model).tree


def _read_place(path: str, module: nn.Module, canonical: str, identities: dict[int, int]) -> ModuleInfo:
    prefix = path + "." if path else ""

    def tensors(named: Mapping[str, torch.Tensor | None]) -> tuple[ParameterInfo, ...]:
        return tuple(
            _read_tensor(prefix + name, tensor, identities) for name, tensor in named.items() if tensor is not None
        )

    classes, has_forward = _classes(type(module))  # type: ignore[arg-type]
    return ModuleInfo(
        name=path,
        canonical=canonical,
        class_name=module._get_name(),
        classes=classes,
        extra_repr=module.extra_repr(),
        has_forward=has_forward,
        parameters=tensors(module._parameters),
        buffers=tensors(module._buffers),
        attributes={
            name: describe(value)
            for name, value in module.__dict__.items()
            if not name.startswith("_") and _is_described(value)
        },
        children=tuple((key, None if child is None else prefix + key) for key, child in module._modules.items()),
    )


def _read_tensor(name: str, tensor: torch.Tensor, identities: dict[int, int]) -> ParameterInfo:
    if nn.parameter.is_lazy(tensor):
        raise ValueError(f"{name!r} has no shape yet: run the model once so that its lazy modules are initialised")
    identity = identities.setdefault(id(tensor), len(identities))
    return ParameterInfo(name, describe_tensor(tensor), identity, tensor.requires_grad)


@lru_cache(maxsize=4096)
def _classes(cls: type) -> tuple[tuple[str, ...], bool]:
    """Return the classes whose forward a module class runs, and whether its forward is one that computes."""
    return tuple(_classes_with_forward(cls)), _forward_of(cls) not in _SILENT_FORWARDS


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


def _is_described(value: Any) -> bool:
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
