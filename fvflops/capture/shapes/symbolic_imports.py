"""Run torch's Python shape rules without importing the modules for symbolic sizes.

The rules call `torch.fx.experimental.symbolic_shapes` even for plain ints, and are wrapped for `torch.compile`: this
imports sympy and torch._dynamo, 800 modules. Inside `without_symbolic_imports` torch's own functions get proxies of
these modules, which return the same results for plain numbers, and otherwise import and call the originals.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import operator
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

_SYMBOLIC = "torch.fx.experimental.symbolic_shapes"
_PLAIN = frozenset({bool, int, float})
_ANY_ARITY = (1, sys.maxsize)
_DISABLED = "__dynamo_disable"  # attribute where torch._compile caches torch._dynamo's wrapper of a function


class _ModuleProxy:
    """A proxy of a module that has replacements for some names, and imports the module for any other."""

    def __init__(self, module: str, replacements: Mapping[str, Any]) -> None:
        self._module = module
        self.__dict__.update(replacements)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (isinstance(value, (tuple, list)) and all(map(_is_plain, value)))


def _replace(
    name: str,
    replacement: Callable[..., Any],
    accepts: Callable[[Any], bool] = _is_plain,
    arity: tuple[int, int] = (1, 1),
) -> Callable[..., Any]:
    """Return a function that calls the replacement if `accepts` is true for all arguments, else torch's function."""
    min_arity, max_arity = arity

    def function(*values: Any, **options: Any) -> Any:
        if not options and min_arity <= len(values) <= max_arity and all(map(accepts, values)):
            return replacement(*values)
        return getattr(importlib.import_module(_SYMBOLIC), name)(*values, **options)

    return function


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _has_int_sizes(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value._has_symbolic_sizes_strides


def _identity(value: Any) -> Any:
    return value


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, (tuple, list)) and isinstance(right, (tuple, list)):
        return len(left) == len(right) and all(map(_equal, left, right))
    return bool(left == right)


def _is_integral(value: Any) -> bool:
    return type(value) in (bool, int) or (isinstance(value, (tuple, list)) and all(map(_is_integral, value)))


class _NoExpression:
    """A class without instances, in place of `sympy.Basic` until sympy is imported."""


_PROXIES = {
    "sympy": _ModuleProxy("sympy", {"Basic": _NoExpression}),
    "torch.utils._sympy.functions": _ModuleProxy(
        "torch.utils._sympy.functions",
        {"Max": lambda *values: importlib.import_module("torch.utils._sympy.functions").Max(*values)},
    ),
    _SYMBOLIC: _ModuleProxy(
        _SYMBOLIC,
        {
            "expect_true": _replace("expect_true", _identity, _is_bool),
            "free_unbacked_symbols": _replace("free_unbacked_symbols", lambda _: (), _has_int_sizes),
            "guard_bool": _replace("guard_bool", _identity, _is_bool),
            "guard_int": _replace("guard_int", _identity, lambda value: type(value) is int),
            "guard_or_false": _replace("guard_or_false", _identity, _is_bool),
            "guard_or_true": _replace("guard_or_true", _identity, _is_bool),
            "guard_size_oblivious": _replace("guard_size_oblivious", _identity, lambda _: False),
            "guarding_hint_or_throw": _replace("guarding_hint_or_throw", _identity, _is_integral),
            "has_guarding_hint": _replace("has_guarding_hint", lambda _: True),
            "is_nested_int": _replace("is_nested_int", lambda _: False),
            "statically_known_false": _replace("statically_known_false", operator.not_, _is_bool),
            "statically_known_true": _replace("statically_known_true", _identity, _is_bool),
            "sym_and": _replace(
                "sym_and", lambda *values: functools.reduce(operator.and_, values), _is_bool, _ANY_ARITY
            ),
            "sym_eq": _replace("sym_eq", _equal, _is_integral, (2, 2)),
            "sym_or": _replace("sym_or", lambda *values: functools.reduce(operator.or_, values), _is_bool, _ANY_ARITY),
        },
    ),
}


class _ProxyImport:
    """A temporary `__import__` that gives torch's own functions proxies of modules that are not imported yet."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.is_active = True
        self._undecorated: list[Any] = []
        # While the compiler is not imported, there is nothing to exclude from compilation.
        dynamo = _ModuleProxy("torch._dynamo", {"disable": self._disable, "graph_break": lambda: None})
        self._proxies = {**_PROXIES, "torch._dynamo": dynamo}
        self._torch = _ModuleProxy("torch", {"_dynamo": dynamo})

    def __call__(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        # Only imports inside functions have no locals here; a module-level import would keep the proxy.
        in_function = self.is_active and locals is None and globals is not None
        in_torch = str((globals or {}).get("__name__")).partition(".")[0] == "torch"
        if in_function and name in self._proxies and name not in sys.modules and in_torch:
            if fromlist or name == "sympy":
                return self._proxies[name]
            if name == "torch._dynamo":  # `import torch._dynamo` binds torch
                return self._torch
        return self.original(name, globals, locals, fromlist, level)

    def _disable(self, function: Any, *_: Any, **__: Any) -> Any:
        """Return the function itself in place of `torch._dynamo.disable`."""
        self._undecorated.append(function)
        return function

    def close(self) -> None:
        """Stop returning proxies, also through remaining references, and undo their effect on torch._compile."""
        self.is_active = False
        for function in self._undecorated:
            if getattr(function, _DISABLED, None) is function:
                delattr(function, _DISABLED)


@contextmanager
def without_symbolic_imports() -> Iterator[None]:
    """Keep torch's functions from importing sympy and torch._dynamo where all sizes are plain ints."""
    original = builtins.__import__
    nested = isinstance(original, _ProxyImport) and original.is_active
    if nested or (_SYMBOLIC in sys.modules and "torch._dynamo" in sys.modules):
        yield
        return
    imports = _ProxyImport(original)
    try:
        builtins.__import__ = imports
        yield
    finally:
        if builtins.__import__ is imports:
            builtins.__import__ = original
        imports.close()
