"""The shape rules of a run: replacements of torch's, and assumed sizes of data-dependent results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import NoneType
from typing import Any

import torch

from fvflops.capture.recorder.tensor_specs import cached_schema
from fvflops.capture.shapes.rules import (
    convolutions,
    data_dependent,
    elementwise,
    layer_rules,
    matrix_rules,
    memory_formats,
    missing_rules,
    normalization,
    vision_rules,
)
from fvflops.capture.shapes.rules.assumptions import assumption_for, check_assumptions, convert_value
from fvflops.capture.shapes.rules.fast_path import FAST_RULES
from fvflops.text import shown
from fvflops.torch_internals import DispatchKey, TorchDispatchMode, has_kernel_for_key
from fvflops.trace.calls import packet_of

Rule = Callable[..., Any]

# A rule has the op's signature, is called with tensors on the meta device, and returns the op's results.
RULES: dict[str, Rule] = {
    **convolutions.RULES,
    **data_dependent.RULES,
    **elementwise.RULES,
    **layer_rules.RULES,
    **matrix_rules.RULES,
    **memory_formats.RULES,
    **missing_rules.RULES,
    **normalization.RULES,
    **vision_rules.RULES,
}

# Rules for the CPU, where torch's own rules match CUDA only.
CPU_RULES: dict[str, Rule] = {
    **convolutions.CPU_RULES,
    **data_dependent.CPU_RULES,
    **elementwise.CPU_RULES,
    **layer_rules.CPU_RULES,
    **matrix_rules.CPU_RULES,
    **memory_formats.CPU_RULES,
    **normalization.CPU_RULES,
}


class ShapeRules:
    """Rules that replace or complement torch's shape rules.

    `assume` contains sizes or values of data-dependent ops by op name; invalid entries raise ValueError. `exact`
    excludes rules that return an upper bound; `device` is the device whose kernels are emulated. `bounds` are the ops
    for which an upper bound was used, `given` the entries of `assume` that were used, `assumed` the assumptions about
    other data-dependent ops.
    """

    def __init__(
        self, assume: Mapping[str, Any] | None = None, *, exact: bool = False, device: str | torch.device = "cpu"
    ) -> None:
        if not isinstance(assume, (Mapping, NoneType)):
            raise TypeError(f"assume={shown(assume)} is not a mapping: pass a dict such as {{'aten::nonzero': 100}}")
        self.assume = dict(assume or {})
        check_assumptions(self.assume)
        self.exact = exact
        self.bounds: set[str] = set()
        self.given: dict[str, Any] = {}
        self.assumed: dict[str, str] = {}
        self._rules = {**RULES, **{"cpu": CPU_RULES, "cuda": layer_rules.CUDA_RULES}.get(torch.device(device).type, {})}

    def replacement_for(self, name: str) -> Rule | None:
        """Return the rule that replaces torch's, with the op's signature, for tensors on the meta device."""
        return self._rules.get(name)

    def assumed_size(self, name: str) -> Rule | None:
        """Return the rule of an op whose size or value is assumed or bounded, or None."""
        key = data_dependent.data_dependent_key(name)
        assumption = assumption_for(name, self.assume)
        if assumption is not None:
            self.given[packet_of(name)] = assumption
        if key in data_dependent.SCALAR_RESULTS:
            return None if assumption is None else partial(convert_value, key, assumption)
        size_rule = data_dependent.SIZE_RULES.get(key)
        if size_rule is None:
            return None
        if assumption is not None:
            return partial(size_rule, assumption)
        if key in data_dependent.UPPER_BOUNDED and not self.exact:
            return partial(self._bounded, name, size_rule)
        return None

    def rule_for(self, func: Any) -> Rule:
        """Return the rule for an op's results on the meta device: the fast one where it applies, else another."""
        name = cached_schema(func).name
        general, fast = self.replacement_for(name) or self._torch_rule(func, name), FAST_RULES.get(name)
        if fast is None:
            return general

        def rule(*args: Any, **kwargs: Any) -> Any:
            result = fast(*args, **kwargs)
            return general(*args, **kwargs) if result is NotImplemented else result

        return rule

    def _torch_rule(self, func: Any, name: str) -> Rule:
        if cached_schema(func).composite:
            return partial(self._decompose, func)
        if torch.Tag.pointwise in getattr(func, "tags", ()) and name not in elementwise.NOT_ELEMENTWISE:
            return elementwise.with_elementwise_strides(func, func)
        return func

    def _decompose(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Decompose a composite op, with the rule of each op inside."""
        with _RuleMode(self):
            # Prefer the C++ kernel, as real execution does, to a Python decomposition registered by torch.
            if has_kernel_for_key(func.name(), "CompositeImplicitAutograd"):
                return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
            return func.decompose(*args, **kwargs)

    def _bounded(self, name: str, size_rule: Rule, *args: Any, **kwargs: Any) -> Any:
        result = size_rule(1.0, *args, **kwargs)
        self.bounds.add(name)
        return result

    def about(self) -> dict[str, str]:
        """Return the bounds, the given results and the assumptions for the Trace's metadata."""
        metadata = {}
        if self.bounds:
            metadata["bounds"] = ", ".join(sorted(self.bounds))
        if self.given:
            metadata["given"] = ", ".join(f"{op}={assumption}" for op, assumption in sorted(self.given.items()))
        if self.assumed:
            metadata["supposed"] = ", ".join(f"{op}: {assumption}" for op, assumption in sorted(self.assumed.items()))
        return metadata


class _RuleMode(TorchDispatchMode):
    """A dispatch mode that calls the rule of each op on the meta device."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler to exclude the handler from compilation

    def __init__(self, rules: ShapeRules) -> None:
        super().__init__()
        self._rules = rules

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return self._rules.rule_for(func)(*args, **(kwargs or {}))
