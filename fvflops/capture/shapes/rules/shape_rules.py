"""The shape rules of a run: replacements for torch's, and assumed sizes of data-dependent results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from fvflops.capture.shapes import collectives
from fvflops.capture.shapes.assumptions import assumption_for, can_be_assumed, check_assumptions, convert_value
from fvflops.capture.shapes.layouts import convolutions, elementwise, gradients, memory_formats, normalization, spectra
from fvflops.capture.shapes.layouts.cuda import CUDA_RULES
from fvflops.capture.shapes.rules import (
    data_dependent,
    detection,
    embedding_bag,
    factorizations,
    flex_attention,
    grouped_matmul,
    histograms,
    losses,
    quantization,
    rnn_shapes,
    same_shape,
    sequences,
    spatial_transformer,
)
from fvflops.trace.signature import packet_of

Rule = Callable[..., Any]

# A rule has the op's signature, is called with tensors on the meta device, and returns the op's results.
RULES: dict[str, Rule] = {
    **flex_attention.RULES,
    **collectives.RULES,
    **convolutions.RULES,
    **detection.RULES,
    **elementwise.RULES,
    **factorizations.RULES,
    **histograms.RULES,
    **same_shape.RULES,
    **losses.RULES,
    **memory_formats.RULES,
    **normalization.RULES,
    **grouped_matmul.RULES,
    **quantization.RULES,
    **rnn_shapes.RULES,
    **spatial_transformer.RULES,
    **data_dependent.RULES,
    **sequences.RULES,
}

# Rules for the CPU, where torch's own rules match CUDA only.
CPU_RULES: dict[str, Rule] = {
    **embedding_bag.CPU_RULES,
    **convolutions.CPU_RULES,
    **elementwise.CPU_RULES,
    **factorizations.CPU_RULES,
    **memory_formats.CPU_RULES,
    **normalization.CPU_RULES,
    **gradients.CPU_RULES,
    **data_dependent.CPU_RULES,
    **spectra.CPU_RULES,
}


class ShapeRules:
    """Rules that replace or complement torch's shape rules.

    `assume` contains sizes or values of data-dependent ops by op name; invalid entries raise ValueError. `exact`
    excludes rules that return an upper bound; `device` is the device whose kernels are emulated. `bounds` are the ops
    for which an upper bound was used, `given` the entries of `assume` that were used, `assumed` the assumptions about
    other data-dependent ops.

    >>> rule = ShapeRules({"aten::nonzero": 0.5}).assumed_size("aten::nonzero")
    >>> rule(torch.empty(3, 5, device="meta")).shape
    torch.Size([8, 2])
    """

    def __init__(
        self, assume: Mapping[str, Any] | None = None, *, exact: bool = False, device: str | torch.device = "cpu"
    ) -> None:
        self.assume = dict(assume or {})
        check_assumptions(self.assume)
        self.exact = exact
        self.bounds: set[str] = set()
        self.given: dict[str, Any] = {}
        self.assumed: dict[str, str] = {}
        self._rules = {**RULES, **{"cpu": CPU_RULES, "cuda": CUDA_RULES}.get(torch.device(device).type, {})}

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

    def can_assume(self, name: str) -> bool:
        """Return whether `assume` accepts the op."""
        return can_be_assumed(name)

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
