"""The choice of the rule by which an op call's results are inferred, inside composite ops too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fvflops.capture.recorder.signature import known_schema
from fvflops.capture.shapes.layouts.elementwise import OTHERWISE, laid_out
from fvflops.capture.shapes.rules.fast_path import with_fast_path
from fvflops.torch_internals import DispatchKey, TorchDispatchMode, has_kernel_for_key

_Rule = Callable[..., Any]
_COMPOSITE = DispatchKey.CompositeImplicitAutograd
_Find = Callable[[str], "_Rule | None"]


def choose_rule(func: Any, find: _Find) -> _Rule:
    """Return what gives an op's results on the meta device; `find` gives a rule of our own by the op's name."""
    name = known_schema(func).name
    return with_fast_path(name, find(name) or _by_kind(func, name, find))


def _by_kind(func: Any, name: str, find: _Find) -> _Rule:
    if known_schema(func).composite:
        return _look_inside(func, find)
    if torch.Tag.pointwise in getattr(func, "tags", ()) and name not in OTHERWISE:
        return laid_out(func, func)
    return func


def _look_inside(func: Any, find: _Find) -> _Rule:
    """Return a rule that runs what a composite op consists of, each by the rule that is chosen for it."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        with _Chosen(find):
            # Not what Python code may have registered instead, which a real run does not call.
            return func._op_dk(_COMPOSITE, *args, **kwargs) if compiled else func.decompose(*args, **kwargs)

    compiled = has_kernel_for_key(func.name(), "CompositeImplicitAutograd")
    return rule


class _Chosen(TorchDispatchMode):
    """A dispatch mode in which ops on the meta device are answered by the rules that are chosen for them."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would import its compiler, to be kept out of the handler

    def __init__(self, find: _Find) -> None:
        super().__init__()
        self._find = find

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return choose_rule(func, self._find)(*args, **(kwargs or {}))
