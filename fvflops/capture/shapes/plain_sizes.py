"""Run torch's Python shape rules without importing the modules for symbolic sizes.

The rules call `torch.fx.experimental.symbolic_shapes` even for plain ints, and are wrapped for `torch.compile`: this
imports sympy and torch._dynamo, 800 modules. Within `plain_sizes` torch's own functions get proxies of these modules
that answer for plain numbers as the originals do, and otherwise import and call the originals.
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
_MANY = (1, sys.maxsize)
_DISABLED = "__dynamo_disable"  # attribute where torch._compile caches torch._dynamo's wrapper of a function


class _ModuleProxy:
    """A proxy of a module that answers for some names, and imports the module for any other."""

    def __init__(self, module: str, answers: Mapping[str, Any]) -> None:
        self._module = module
        self.__dict__.update(answers)

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (isinstance(value, (tuple, list)) and all(map(_is_plain, value)))


def _on_plain(
    name: str, answer: Callable[..., Any], accepts: Callable[[Any], bool] = _is_plain, arity: tuple[int, int] = (1, 1)
) -> Callable[..., Any]:
    """Return torch's function of this name, replaced by `answer` where `accepts` holds for all arguments."""
    least, most = arity

    def function(*values: Any, **options: Any) -> Any:
        if not options and least <= len(values) <= most and all(map(accepts, values)):
            return answer(*values)
        return getattr(importlib.import_module(_SYMBOLIC), name)(*values, **options)

    return function


def _is_bool(value: Any) -> bool:
    return type(value) is bool


def _is_int(value: Any) -> bool:
    return type(value) is int


def _never(_: Any) -> bool:
    return False


def _is_of_plain_size(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value._has_symbolic_sizes_strides


def _do_nothing() -> None:
    pass


def _same(value: Any) -> Any:
    return value


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, (tuple, list)) and isinstance(second, (tuple, list)):
        return len(first) == len(second) and all(map(_equal, first, second))
    return bool(first == second)


def _is_whole(value: Any) -> bool:
    return type(value) in (bool, int) or (isinstance(value, (tuple, list)) and all(map(_is_whole, value)))


def _all(*values: bool) -> bool:
    return functools.reduce(operator.and_, values)


def _any(*values: bool) -> bool:
    return functools.reduce(operator.or_, values)


class _NoExpression:
    """A class without instances: until sympy is imported, there are no expressions."""


_PROXIES = {
    "sympy": _ModuleProxy("sympy", {"Basic": _NoExpression}),
    "torch.utils._sympy.functions": _ModuleProxy(
        "torch.utils._sympy.functions",
        {"Max": lambda *values: importlib.import_module("torch.utils._sympy.functions").Max(*values)},
    ),
    _SYMBOLIC: _ModuleProxy(
        _SYMBOLIC,
        {
            "expect_true": _on_plain("expect_true", _same, _is_bool),
            "free_unbacked_symbols": _on_plain("free_unbacked_symbols", lambda _: (), _is_of_plain_size),
            "guard_bool": _on_plain("guard_bool", _same, _is_bool),
            "guard_int": _on_plain("guard_int", _same, _is_int),
            "guard_or_false": _on_plain("guard_or_false", _same, _is_bool),
            "guard_or_true": _on_plain("guard_or_true", _same, _is_bool),
            "guard_size_oblivious": _on_plain("guard_size_oblivious", _same, _never),
            "guarding_hint_or_throw": _on_plain("guarding_hint_or_throw", _same, _is_whole),
            "has_guarding_hint": _on_plain("has_guarding_hint", lambda _: True),
            "is_nested_int": _on_plain("is_nested_int", lambda _: False),
            "statically_known_false": _on_plain("statically_known_false", operator.not_, _is_bool),
            "statically_known_true": _on_plain("statically_known_true", _same, _is_bool),
            "sym_and": _on_plain("sym_and", _all, _is_bool, _MANY),
            "sym_eq": _on_plain("sym_eq", _equal, _is_whole, (2, 2)),
            "sym_or": _on_plain("sym_or", _any, _is_bool, _MANY),
        },
    ),
}


def _is_of_torch(globals: Mapping[str, Any] | None) -> bool:
    return str((globals or {}).get("__name__")).partition(".")[0] == "torch"


class _Imports:
    """A temporary import function: torch's own functions get proxies of modules that are not imported yet."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.lasts = True
        self._marked: list[Any] = []
        # Until the compiler is imported, there is nothing to exclude from compilation.
        compiler = _ModuleProxy("torch._dynamo", {"disable": self._mark, "graph_break": _do_nothing})
        self._proxies = {**_PROXIES, "torch._dynamo": compiler}
        self._torch = _ModuleProxy("torch", {"_dynamo": compiler})

    def __call__(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> Any:
        # Only imports inside functions have no locals here: a module-level import would keep the proxy.
        in_function = self.lasts and locals is None and globals is not None
        if in_function and name in self._proxies and name not in sys.modules and _is_of_torch(globals):
            if fromlist or name == "sympy":
                return self._proxies[name]
            if name == "torch._dynamo":  # `import torch._dynamo` binds torch
                return self._torch
        return self.original(name, globals, locals, fromlist, level)

    def _mark(self, function: Any, *_: Any, **__: Any) -> Any:
        self._marked.append(function)
        return function

    def close(self) -> None:
        """Return no more proxies, even if still referenced, and undo their effect on torch._compile."""
        self.lasts = False
        for function in self._marked:
            if getattr(function, _DISABLED, None) is function:
                delattr(function, _DISABLED)


@contextmanager
def plain_sizes() -> Iterator[None]:
    """Keep torch's functions from importing sympy and torch._dynamo for plain sizes."""
    original = builtins.__import__
    nested = isinstance(original, _Imports) and original.lasts
    if nested or (_SYMBOLIC in sys.modules and "torch._dynamo" in sys.modules):
        yield
        return
    imports = _Imports(original)
    try:
        builtins.__import__ = imports
        yield
    finally:
        if builtins.__import__ is imports:
            builtins.__import__ = original
        imports.close()
