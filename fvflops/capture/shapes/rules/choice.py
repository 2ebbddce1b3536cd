"""Choose the rule that infers an op call's results, inside composite ops too."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fvflops.capture.recorder.signature import cached_schema
from fvflops.capture.shapes.layouts.elementwise import NOT_ELEMENTWISE, with_elementwise_strides
from fvflops.capture.shapes.rules.fast_path import with_fast_path
from fvflops.torch_internals import DispatchKey, TorchDispatchMode, has_kernel_for_key

_Rule = Callable[..., Any]
_COMPOSITE = DispatchKey.CompositeImplicitAutograd
_Find = Callable[[str], "_Rule | None"]


def choose_rule(func: Any, find: _Find) -> _Rule:
    """Return the rule for an op's results on the meta device; `find` returns this package's rule by op name."""
    name = cached_schema(func).name
    return with_fast_path(name, find(name) or _by_kind(func, name, find))


def _by_kind(func: Any, name: str, find: _Find) -> _Rule:
    if cached_schema(func).composite:
        return _decomposition_rule(func, find)
    if torch.Tag.pointwise in getattr(func, "tags", ()) and name not in NOT_ELEMENTWISE:
        return with_elementwise_strides(func, func)
    return func


def _decomposition_rule(func: Any, find: _Find) -> _Rule:
    """Return a rule that decomposes a composite op and applies the chosen rule to each op inside."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        with _Chosen(find):
            # Not a Python decomposition registered by torch, which real execution does not call.
            return func._op_dk(_COMPOSITE, *args, **kwargs) if compiled else func.decompose(*args, **kwargs)

    compiled = has_kernel_for_key(func.name(), "CompositeImplicitAutograd")
    return rule


class _Chosen(TorchDispatchMode):
    """A dispatch mode that answers ops on the meta device by their chosen rules."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler to exclude the handler from compilation

    def __init__(self, find: _Find) -> None:
        super().__init__()
        self._find = find

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return choose_rule(func, self._find)(*args, **(kwargs or {}))
