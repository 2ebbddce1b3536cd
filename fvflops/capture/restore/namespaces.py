"""Find and restore the globals and class attributes that a model's code uses."""

from __future__ import annotations

import opcode
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

from fvflops.capture.restore.contents import PLAIN

# Libraries that keep no tensors outside modules, or whose caches are searched after the run.
_LIBRARIES = frozenset(
    {
        *sys.stdlib_module_names,
        *("torch", "functorch", "torchgen", "torchvision", "torchaudio", "timm", "transformers", "diffusers", "peft"),
        *("huggingface_hub", "accelerate", "safetensors", "tokenizers", "lightning", "pytorch_lightning", "fvflops"),
        *("numpy", "scipy", "sympy", "pandas", "PIL", "yaml", "tqdm", "requests", "httpx", "packaging", "psutil"),
        *("filelock", "rich", "pytest", "_pytest", "IPython"),
    }
) - {"__main__"}

_BY_NAME = frozenset(opcode.opmap[name] for name in ("STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "STORE_NAME"))
_LOAD, _IMPORT, _EXTEND = (opcode.opmap[name] for name in ("LOAD_GLOBAL", "IMPORT_NAME", "EXTENDED_ARG"))
_SHIFT = 1 if sys.version_info >= (3, 11) else 0

# Methods that Python calls implicitly.
_IMPLICIT_METHODS = frozenset(
    {"__init__", "__call__", "__getitem__", "__setitem__", "__enter__", "__exit__", "__post_init__"}
)

ABSENT = object()

mro_of = vars(type)["__mro__"].__get__
namespace_of = vars(type)["__dict__"].__get__

# By id of the code: the code, globals it names, modules it imports, and all its names.
_Names = tuple[CodeType, frozenset[str], frozenset[str], frozenset[str]]
_NAMES: dict[int, _Names] = {}
_LIMIT = 1 << 15


def is_library(name: Any) -> bool:
    """Return whether a module belongs to Python, torch, or a known library."""
    return type(name) is str and name.partition(".")[0] in _LIBRARIES


def attributes_of(cls: type) -> Any:
    """Return the function that reads `__dict__` of a class's objects, bypassing overrides; None if they have none."""
    for base in mro_of(cls):
        found = namespace_of(base).get("__dict__")
        if type(found) in (GetSetDescriptorType, MemberDescriptorType):
            return found.__get__
    return None


def slots_of(cls: type) -> tuple[Any, ...]:
    """Return the descriptors of the slots of a class's objects."""
    return tuple(
        value
        for base in mro_of(cls)
        if "__slots__" in namespace_of(base)
        for value in namespace_of(base).values()
        if type(value) is MemberDescriptorType
    )


def read_slot(slot: Any, item: Any) -> Any:
    """Return a slot's value, or ABSENT."""
    try:
        return slot.__get__(item)
    except AttributeError:
        return ABSENT


class Namespaces:
    """Globals and class attributes that code uses, as they were when first found.

    Code is followed through its names without running it: of a class, those methods are read whose names occur in code
    read so far, and those that Python calls implicitly. `whole`: save all globals of the modules of that code.
    """

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._whole_globals: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._globals: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._classes: dict[int, tuple[type, dict[str, Any]]] = {}
        self._names = {"forward"}
        self._pending: dict[str, list[Any]] = {}

    def of_function(self, function: FunctionType) -> list[Any]:
        """Return the objects that a function's code uses and that were not found before."""
        namespace = function.__globals__
        if is_library(namespace.get("__name__")):
            return []
        _, used, imported, names = _names_of(function.__code__)
        found: list[Any] = []
        if self._whole and id(namespace) not in self._whole_globals:
            self._whole_globals[id(namespace)] = namespace, dict(namespace)
        for name in used:
            found += self._read(namespace, name, names)
        for name in imported:
            found += self._read_module(sys.modules.get(name), names)
        for name in names - self._names:
            found += self._pending.pop(name, ())
        self._names |= names
        return found

    def _read(self, namespace: dict[str, Any], name: str, names: Iterable[str]) -> Iterator[Any]:
        _, before = self._globals.setdefault(id(namespace), (namespace, {}))
        value = namespace.get(name, ABSENT)
        was_found = name in before
        before.setdefault(name, value)
        if type(value) is ModuleType:
            yield from self._read_module(value, names)
        elif not was_found and value is not ABSENT and type(value) not in PLAIN:
            yield value

    def _read_module(self, module: Any, names: Iterable[str]) -> Iterator[Any]:
        if type(module) is not ModuleType or is_library(module.__name__):
            return
        namespace = vars(module)
        own = self._globals.get(id(namespace), (None, {}))[1]
        for name in names:
            if name in namespace and name not in own:
                yield from self._read(namespace, name, names)

    def of_class(self, cls: type) -> list[Any]:
        """Return the objects in a class and its bases that were not found before."""
        found: list[Any] = [type(cls)]
        for base in mro_of(cls):
            namespace: Mapping[str, Any] = namespace_of(base)
            if id(base) in self._classes or is_library(namespace.get("__module__")):
                continue
            before = dict(namespace)
            self._classes[id(base)] = base, before
            for name, value in before.items():
                kind = type(value)
                if kind is property:
                    functions: Iterable[Any] = (value.fget, value.fset)
                elif kind is staticmethod or kind is classmethod:
                    functions = (value.__func__,)
                elif kind is FunctionType:
                    functions = (value,)
                else:
                    if kind not in PLAIN:
                        found.append(value)
                    continue
                if name in self._names or name in _IMPLICIT_METHODS:
                    found += functions
                else:
                    self._pending.setdefault(name, []).extend(functions)
        return found

    def values(self) -> Iterator[Any]:
        """Yield the objects that are new in the globals and classes."""
        for namespace, before in (*self._globals.values(), *self._whole_globals.values()):
            yield from (namespace[name] for name, value in before.items() if namespace.get(name, value) is not value)
        for namespace, before in self._whole_globals.values():
            yield from (namespace[name] for name in namespace.keys() - before.keys())
        for cls, before in self._classes.values():
            yield from (value for name, value in namespace_of(cls).items() if before.get(name, ABSENT) is not value)

    def restore(self, advanced: Mapping[int, Any]) -> None:
        """Restore what differs; `advanced` are copies of iterators, by the id of the iterator to replace."""
        for namespace, before in self._whole_globals.values():
            for name in namespace.keys() - before.keys():
                del namespace[name]
        for namespace, before in (*self._globals.values(), *self._whole_globals.values()):
            for name, value in before.items():
                value = advanced.get(id(value), value)
                if namespace.get(name, ABSENT) is not value:
                    if value is ABSENT:
                        del namespace[name]
                    else:
                        namespace[name] = value
        for cls, before in self._classes.values():
            now = namespace_of(cls)
            for name in [name for name in now if name not in before and not name.startswith("__")]:
                type.__delattr__(cls, name)
            for name, value in before.items():
                value = advanced.get(id(value), value)
                if now.get(name, ABSENT) is not value and not name.startswith("__"):
                    type.__setattr__(cls, name, value)


def _names_of(code: CodeType) -> _Names:
    known = _NAMES.get(id(code))
    if known is None:
        if len(_NAMES) >= _LIMIT:
            _NAMES.clear()
        known = _NAMES[id(code)] = _read_code(code)
    return known


def _read_code(code: CodeType) -> _Names:
    """Return the names in code, including nested functions."""
    names = code.co_names
    used: set[str] = set()
    imported: set[str] = set()
    every = set(names)
    extended = 0
    steps = iter(code.co_code)
    for operation, argument in zip(steps, steps, strict=False):
        number = extended << 8 | argument
        extended = number if operation == _EXTEND else 0
        if operation == _LOAD:
            used.add(names[number >> _SHIFT])
        elif operation in _BY_NAME:
            used.add(names[number])
        elif operation == _IMPORT:
            imported.add(names[number])
    for constant in code.co_consts:
        if type(constant) is CodeType:
            _, more, imports, inside = _read_code(constant)
            used |= more
            imported |= imports
            every |= inside
    return code, frozenset(used), frozenset(imported), frozenset(every)
