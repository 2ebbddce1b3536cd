"""Find and restore the globals and class attributes that a model's code uses."""

from __future__ import annotations

import opcode
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from types import CodeType, FunctionType, GetSetDescriptorType, MemberDescriptorType, ModuleType
from typing import Any

from fvflops.capture.restore.contents import VALUE_TYPES

# Libraries that store no tensors outside modules, or whose caches are searched after the run.
_LIBRARIES = frozenset(
    {
        *sys.stdlib_module_names,
        *("torch", "functorch", "torchgen", "torchvision", "torchaudio", "timm", "transformers", "diffusers", "peft"),
        *("huggingface_hub", "accelerate", "safetensors", "tokenizers", "lightning", "pytorch_lightning", "fvflops"),
        *("numpy", "scipy", "sympy", "pandas", "PIL", "yaml", "tqdm", "requests", "httpx", "packaging", "psutil"),
        *("filelock", "rich", "pytest", "_pytest", "IPython"),
    }
) - {"__main__"}

# Bytecodes that refer to a name by its index; LOAD_GLOBAL does so by twice the index plus a flag from Python 3.11 on.
_NAME_OPCODES = frozenset(opcode.opmap[name] for name in ("STORE_GLOBAL", "DELETE_GLOBAL", "LOAD_NAME", "STORE_NAME"))
_LOAD_GLOBAL, _IMPORT_NAME, _EXTENDED_ARG = (
    opcode.opmap[name] for name in ("LOAD_GLOBAL", "IMPORT_NAME", "EXTENDED_ARG")
)
_LOAD_GLOBAL_SHIFT = 1 if sys.version_info >= (3, 11) else 0

# Methods that Python calls implicitly.
_IMPLICIT_METHODS = frozenset(
    {"__init__", "__call__", "__getitem__", "__setitem__", "__enter__", "__exit__", "__post_init__"}
)

ABSENT = object()

# Bypass overrides in metaclasses.
mro_of = vars(type)["__mro__"].__get__
namespace_of = vars(type)["__dict__"].__get__

# The globals that a code object names, the modules it imports, and all its names.
_Names = tuple[frozenset[str], frozenset[str], frozenset[str]]


def is_library(name: Any) -> bool:
    """Return whether a module belongs to Python, torch, or a known library."""
    return type(name) is str and name.partition(".")[0] in _LIBRARIES


def dict_getter_of(cls: type) -> Any:
    """Return the function that reads `__dict__` of a class's instances, bypassing overrides; None if they have none."""
    for base in mro_of(cls):
        descriptor = namespace_of(base).get("__dict__")
        if type(descriptor) in (GetSetDescriptorType, MemberDescriptorType):
            return descriptor.__get__
    return None


def slots_of(cls: type) -> tuple[Any, ...]:
    """Return the descriptors of a class's `__slots__`, inherited ones included."""
    return tuple(
        value
        for base in mro_of(cls)
        if "__slots__" in namespace_of(base)
        for value in namespace_of(base).values()
        if type(value) is MemberDescriptorType
    )


def read_slot(slot: Any, item: Any) -> Any:
    """Return a slot's value, or ABSENT if it is not set."""
    try:
        return slot.__get__(item)
    except AttributeError:
        return ABSENT


class Namespaces:
    """Snapshot of the globals and class attributes that code uses.

    Code is searched for names without running it. A class's methods are searched only if their names occur in code
    searched so far, or if Python calls them implicitly. `all_globals`: save all globals of the modules of that code,
    not only globals that it names.
    """

    def __init__(self, *, all_globals: bool) -> None:
        self._saves_all_globals = all_globals
        # By id of a namespace: the namespace, and all its contents before the run, or the contents that code names.
        self._all_globals: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._named_globals: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}
        self._classes: dict[int, tuple[type, dict[str, Any]]] = {}
        self._names = {"forward"}
        self._deferred_methods: dict[str, list[Any]] = {}

    def objects_used_by(self, function: FunctionType) -> list[Any]:
        """Save the globals that a function uses; return the values not returned by earlier calls."""
        namespace = function.__globals__
        if is_library(namespace.get("__name__")):
            return []
        used, imported, names = _read_code(function.__code__)
        objects: list[Any] = []
        if self._saves_all_globals and id(namespace) not in self._all_globals:
            self._all_globals[id(namespace)] = namespace, dict(namespace)
        for name in used:
            objects += self._read(namespace, name, names)
        for name in imported:
            objects += self._read_module(sys.modules.get(name), names)
        for name in names - self._names:
            objects += self._deferred_methods.pop(name, ())
        self._names |= names
        return objects

    def _read(self, namespace: dict[str, Any], name: str, names: Iterable[str]) -> Iterator[Any]:
        _, before = self._named_globals.setdefault(id(namespace), (namespace, {}))
        value = namespace.get(name, ABSENT)
        was_saved = name in before
        before.setdefault(name, value)
        if type(value) is ModuleType:
            yield from self._read_module(value, names)
        elif not was_saved and value is not ABSENT and type(value) not in VALUE_TYPES:
            yield value

    def _read_module(self, module: Any, names: Iterable[str]) -> Iterator[Any]:
        if type(module) is not ModuleType or is_library(module.__name__):
            return
        namespace = vars(module)
        saved = self._named_globals.get(id(namespace), (None, {}))[1]
        for name in names:
            if name in namespace and name not in saved:
                yield from self._read(namespace, name, names)

    def objects_in_class(self, cls: type) -> list[Any]:
        """Save the attributes of a class and its bases; return the values and functions not returned earlier."""
        objects: list[Any] = [type(cls)]
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
                    if kind not in VALUE_TYPES:
                        objects.append(value)
                    continue
                if name in self._names or name in _IMPLICIT_METHODS:
                    objects += functions
                else:
                    self._deferred_methods.setdefault(name, []).extend(functions)
        return objects

    def new_values(self) -> Iterator[Any]:
        """Yield the current values of changed globals and class attributes."""
        for namespace, before in (*self._named_globals.values(), *self._all_globals.values()):
            yield from (namespace[name] for name, value in before.items() if namespace.get(name, value) is not value)
        for namespace, before in self._all_globals.values():
            yield from (namespace[name] for name in namespace.keys() - before.keys())
        for cls, before in self._classes.values():
            yield from (value for name, value in namespace_of(cls).items() if before.get(name, ABSENT) is not value)

    def restore(self, iterator_copies: Mapping[int, Any]) -> None:
        """Restore changed globals and attributes; `iterator_copies` maps ids of advanced iterators to their copies."""
        for namespace, before in self._all_globals.values():
            for name in namespace.keys() - before.keys():
                del namespace[name]
        for namespace, before in (*self._named_globals.values(), *self._all_globals.values()):
            for name, value in before.items():
                value = iterator_copies.get(id(value), value)
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
                value = iterator_copies.get(id(value), value)
                if now.get(name, ABSENT) is not value and not name.startswith("__"):
                    type.__setattr__(cls, name, value)


@lru_cache(maxsize=1 << 15)
def _read_code(code: CodeType) -> _Names:
    names = code.co_names
    used: set[str] = set()
    imported: set[str] = set()
    all_names = set(names)
    extended = 0
    opcodes_and_arguments = iter(code.co_code)
    for operation, argument in zip(opcodes_and_arguments, opcodes_and_arguments, strict=False):
        number = extended << 8 | argument
        extended = number if operation == _EXTENDED_ARG else 0
        if operation == _LOAD_GLOBAL:
            used.add(names[number >> _LOAD_GLOBAL_SHIFT])
        elif operation in _NAME_OPCODES:
            used.add(names[number])
        elif operation == _IMPORT_NAME:
            imported.add(names[number])
    for constant in code.co_consts:
        if type(constant) is CodeType:
            inner_used, inner_imported, inner_names = _read_code(constant)
            used |= inner_used
            imported |= inner_imported
            all_names |= inner_names
    return frozenset(used), frozenset(imported), frozenset(all_names)
