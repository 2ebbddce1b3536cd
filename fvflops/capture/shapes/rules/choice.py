"""Choose the shape rule of an op, also for the ops that a composite op calls."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fvflops.capture.recorder.tensor_specs import cached_schema
from fvflops.capture.shapes.layouts.elementwise import NOT_ELEMENTWISE, with_elementwise_strides
from fvflops.capture.shapes.rules.fast_path import with_fast_path
from fvflops.torch_internals import DispatchKey, TorchDispatchMode, has_kernel_for_key

_Rule = Callable[..., Any]
_COMPOSITE = DispatchKey.CompositeImplicitAutograd
_RuleLookup = Callable[[str], "_Rule | None"]


def choose_rule(func: Any, find_rule: _RuleLookup) -> _Rule:
    """Return the rule for an op's results on the meta device; `find_rule` returns this package's rule by op name."""
    name = cached_schema(func).name
    return with_fast_path(name, find_rule(name) or _default_rule(func, name, find_rule))


def _default_rule(func: Any, name: str, find_rule: _RuleLookup) -> _Rule:
    if cached_schema(func).composite:
        return _decomposition_rule(func, find_rule)
    if torch.Tag.pointwise in getattr(func, "tags", ()) and name not in NOT_ELEMENTWISE:
        return with_elementwise_strides(func, func)
    return func


def _decomposition_rule(func: Any, find_rule: _RuleLookup) -> _Rule:
    """Return a rule that decomposes a composite op and applies the chosen rule to each op inside."""

    def rule(*args: Any, **kwargs: Any) -> Any:
        with _ChosenRules(find_rule):
            # Prefer the C++ kernel, as real execution does, to a Python decomposition registered by torch.
            return func._op_dk(_COMPOSITE, *args, **kwargs) if has_kernel else func.decompose(*args, **kwargs)

    has_kernel = has_kernel_for_key(func.name(), "CompositeImplicitAutograd")
    return rule


class _ChosenRules(TorchDispatchMode):
    """A dispatch mode that calls the chosen rule of each op on the meta device."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler to exclude the handler from compilation

    def __init__(self, find_rule: _RuleLookup) -> None:
        super().__init__()
        self._find_rule = find_rule

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return choose_rule(func, self._find_rule)(*args, **(kwargs or {}))
