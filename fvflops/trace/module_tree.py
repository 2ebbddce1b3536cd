"""Module tree of a model as plain data: names, classes, parameters and buffers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fvflops.text import short_repr, suggest
from fvflops.trace.spec import TensorSpec, Value, decode_value, encode_value


@dataclass(frozen=True, slots=True)
class ParameterInfo:
    """One parameter or buffer under one of its names.

    `name` is the full dotted name, `identity` is equal for two names of one tensor (tied weights). `spec` is the
    tensor as the model uses it: of packed weights the logical shape, and a dtype such as int4; `stored` is then its
    number of bytes in memory.

    >>> ParameterInfo("weight", TensorSpec((64, 64), "int4"), 0, False, stored=2048).nbytes
    2048
    """

    name: str
    spec: TensorSpec
    identity: int
    trainable: bool
    stored: int | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in memory; an unknown dtype raises KeyError."""
        return self.spec.nbytes if self.stored is None else self.stored


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """One path in the module tree.

    `name` is the dotted path, `canonical` the first path of the same module object; they differ for a shared module.
    `class_name` is as `repr` prints it; `classes` are the qualified names of its class and of the bases whose `forward`
    that class inherits, most derived first. `has_forward`: its forward computes anything (False for ModuleList and
    pseudo-modules). `attributes` are its public ints, floats, bools and strings. `children` are (attribute, dotted
    path) pairs; a child that is None has the path None.
    """

    name: str
    canonical: str
    class_name: str
    classes: tuple[str, ...] = ()
    extra_repr: str = ""
    has_forward: bool = True
    parameters: tuple[ParameterInfo, ...] = ()
    buffers: tuple[ParameterInfo, ...] = ()
    attributes: Mapping[str, Value] = field(default_factory=dict)
    children: tuple[tuple[str, str | None], ...] = ()


@dataclass(frozen=True, slots=True, repr=False)
class ModuleTree:
    """All module paths of a model, root first, parents before children, a shared module under each of its paths.

    >>> tree = ModuleTree({"": ModuleInfo("", "", "Net"), "fc": ModuleInfo("fc", "fc", "Linear")})
    >>> tree.canonical("fc")
    'fc'
    """

    by_name: Mapping[str, ModuleInfo]

    def __repr__(self) -> str:
        root = self.by_name.get("")
        return short_repr(self, "" if root is None else root.class_name, f"{len(self.by_name):,} modules")

    @property
    def root(self) -> ModuleInfo:
        return self.by_name[""]

    def modules(self) -> Iterator[ModuleInfo]:
        """Yield each module once, under its canonical name, in tree order."""
        return (module for module in self.by_name.values() if module.name == module.canonical)

    def with_pseudo_modules(self, names: Iterable[str]) -> ModuleTree:
        """Return a tree with children added to the root for op owners that are not modules, such as "<name>"."""
        new = [name for name in names if name not in self.by_name]
        root = replace(self.root, children=(*self.root.children, *((name, name) for name in new)))
        pseudo_modules = {name: ModuleInfo(name, name, "", has_forward=False) for name in new}
        return ModuleTree({**self.by_name, "": root, **pseudo_modules})

    def pseudo_modules(self) -> tuple[str, ...]:
        """Return the names that `with_pseudo_modules` added."""
        return tuple(name for name in self.by_name if name.startswith("<"))

    def canonical(self, name: str) -> str:
        """Return the canonical name of a module; an unknown name raises KeyError with the closest match."""
        if not isinstance(name, str):
            raise TypeError(f"a module name must be a string such as 'layer1.0'; got {name!r}")
        if name in self.by_name:
            return self.by_name[name].canonical
        raise KeyError(f"no module is named {name!r}{suggest(name, self.by_name, cutoff=0)}")

    def locate(self, module: str, line: str = "") -> str:
        """Return a module and a source line as in reports; the root module is named by its class.

        >>> ModuleTree({"": ModuleInfo("", "", "Net")}).locate("encoder", "net.py:42")
        "'encoder' at net.py:42"
        """
        name = f"'{module}'" if module else self.root.class_name.rpartition("<locals>.")[2]
        return f"{name} at {line}" if line else name

    def parameters(self) -> Iterator[ParameterInfo]:
        """Yield each parameter once, under its first name, in the order of `Module.named_parameters`."""
        return _distinct(parameter for module in self.modules() for parameter in module.parameters)

    def buffers(self) -> Iterator[ParameterInfo]:
        """Yield each buffer once, under its first name, in the order of `Module.named_buffers`."""
        return _distinct(buffer for module in self.modules() for buffer in module.buffers)

    def count_parameters(self) -> defaultdict[str, int]:
        """Return name of a module or parameter → number of elements, "" being the model; a tied parameter counts once.

        >>> weight = ParameterInfo("fc.weight", TensorSpec((2, 3)), 0, True)
        >>> fc = ModuleInfo("fc", "fc", "Linear", parameters=(weight,))
        >>> dict(ModuleTree({"": ModuleInfo("", "", "Net"), "fc": fc}).count_parameters())
        {'': 6, 'fc': 6, 'fc.weight': 6}
        """
        return add_up(self.parameters(), lambda parameter: parameter.spec.numel)

    def encode(self) -> list[dict[str, Any]]:
        """Return the tree as JSON types."""
        return [
            {
                **{item.name: getattr(module, item.name) for item in fields(module)},
                "parameters": [_encode_parameter(parameter) for parameter in module.parameters],
                "buffers": [_encode_parameter(buffer) for buffer in module.buffers],
                "attributes": {key: encode_value(value) for key, value in module.attributes.items()},
            }
            for module in self.by_name.values()
        ]

    @staticmethod
    def decode(records: list[dict[str, Any]]) -> ModuleTree:
        """Return the tree that `encode` wrote."""
        modules = (
            ModuleInfo(
                **{
                    **record,
                    "classes": tuple(record["classes"]),
                    "parameters": tuple(map(_decode_parameter, record["parameters"])),
                    "buffers": tuple(map(_decode_parameter, record["buffers"])),
                    "attributes": {key: decode_value(value) for key, value in record["attributes"].items()},
                    "children": tuple(map(tuple, record["children"])),
                }
            )
            for record in records
        )
        return ModuleTree({module.name: module for module in modules})


def modules_above(name: str) -> list[str]:
    """Return the ancestors of a dotted name, root first.

    >>> modules_above("layer.0.weight"), modules_above("fc"), modules_above("")
    (['', 'layer', 'layer.0'], [''], [])
    """
    parts = name.split(".") if name else []
    return [".".join(parts[:length]) for length in range(len(parts)) if length != 1 or parts[0]]


def index_children(names: Iterable[str]) -> dict[str, list[str]]:
    """Return name → the names below it and below no other name, in order.

    >>> index_children(["", "layer", "layer.0", "scale_0.5"])  # an attribute "scale_0.5" has no parent "scale_0"
    {'': ['layer', 'scale_0.5'], 'layer': ['layer.0']}
    """
    names = list(names)
    known = {"", *names}
    children: dict[str, list[str]] = {}
    for name in names:
        if name:
            parent = name.rpartition(".")[0]
            if parent not in known:
                parent = next(above for above in reversed(modules_above(name)) if above in known)
            children.setdefault(parent, []).append(name)
    return children


def innermost(scope: tuple[str, ...]) -> str:
    """Return the innermost module of a scope, the last of its names; the model for an empty one."""
    return scope[-1] if scope else ""


def add_up(tensors: Iterable[ParameterInfo], measure: Callable[[ParameterInfo], Any]) -> defaultdict[str, Any]:
    """Return name → sum of `measure` over tensors, for each tensor and each of its ancestor modules, "" the model."""
    sums: defaultdict[str, Any] = defaultdict(int)
    for tensor in tensors:
        value = measure(tensor)
        for name in (*modules_above(tensor.name), tensor.name):
            sums[name] += value
    return sums


def _distinct(tensors: Iterable[ParameterInfo]) -> Iterator[ParameterInfo]:
    first: dict[int, ParameterInfo] = {}
    for tensor in tensors:
        first.setdefault(tensor.identity, tensor)
    return iter(first.values())


def _encode_parameter(parameter: ParameterInfo) -> list[Any]:
    record = [parameter.name, encode_value(parameter.spec), parameter.identity, parameter.trainable]
    return record if parameter.stored is None else [*record, parameter.stored]


def _decode_parameter(record: Any) -> ParameterInfo:
    values: Any = decode_value(record)
    parameter = ParameterInfo(*values)
    if not isinstance(parameter.spec, TensorSpec):
        raise ValueError(f"parameter {parameter.name!r} has {record[1]} instead of a tensor spec")
    return parameter
