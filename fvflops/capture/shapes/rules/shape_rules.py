"""The shape rules of a run: replacements of torch's, and assumed sizes of data-dependent results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from fvflops.capture.shapes.assumptions import assumption_for, can_be_assumed, check_assumptions, read_value
from fvflops.capture.shapes.layouts import convolutions, elementwise, gradients, memory_formats, normalization, spectra
from fvflops.capture.shapes.layouts.cuda import CUDA_RULES
from fvflops.capture.shapes.rules import (
    attention,
    data_dependent,
    detection,
    embedding_bag,
    factorizations,
    grouped_matmul,
    histograms,
    losses,
    quantization,
    rnn,
    same_shape,
    sampling,
    sequences,
)

Rule = Callable[..., Any]

# Each has the op's signature, takes tensors on the meta device, and returns the op's result.
RULES: dict[str, Rule] = {
    **attention.RULES,
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
    **rnn.RULES,
    **sampling.RULES,
    **data_dependent.RULES,
    **sequences.RULES,
}

# Rules for the CPU, where torch's rule is right for CUDA only.
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

    `assume` gives sizes, or values, for data-dependent ops by op name; invalid entries raise ValueError. `exact`
    excludes rules that give an upper bound only; `device` is the device whose kernels are imitated. `bounds` are the
    ops for which an upper bound was used, `assumed` the assumptions about other data-dependent ops.

    >>> rows = ShapeRules({"aten::nonzero": 0.5}).assumed_size("aten::nonzero")
    >>> rows(torch.empty(3, 5, device="meta")).shape
    torch.Size([8, 2])
    """

    def __init__(
        self, assume: Mapping[str, Any] | None = None, *, exact: bool = False, device: str | torch.device = "cpu"
    ) -> None:
        self.assume = dict(assume or {})
        check_assumptions(self.assume)
        self.exact = exact
        self.bounds: set[str] = set()
        self.assumed: dict[str, str] = {}
        self._rules = {**RULES, **{"cpu": CPU_RULES, "cuda": CUDA_RULES}.get(torch.device(device).type, {})}

    def replacement_for(self, name: str) -> Rule | None:
        """Return the rule that replaces torch's, with the op's signature, for tensors on the meta device."""
        return self._rules.get(name)

    def assumed_size(self, name: str) -> Rule | None:
        """Return the rule of an op whose size or value is assumed or bounded, or None."""
        packet = data_dependent.selection_of(name)
        given = assumption_for(name, self.assume)
        if packet in data_dependent.VALUES:
            return None if given is None else partial(read_value, packet, given)
        build = data_dependent.SIZED.get(packet)
        if build is None:
            return None
        if given is not None:
            return partial(build, given)
        if packet in data_dependent.BOUNDED and not self.exact:
            return partial(self._bounded, name, build)
        return None

    def is_data_dependent(self, name: str) -> bool:
        """Return whether the op's result, or its size, depends on its arguments' values."""
        return name in data_dependent.NEED_VALUES or data_dependent.selection_of(name) in data_dependent.NEED_VALUES

    def can_assume(self, name: str) -> bool:
        """Return whether `assume` accepts the op."""
        return can_be_assumed(name)

    def _bounded(self, name: str, build: Rule, *args: Any, **kwargs: Any) -> Any:
        result = build(1.0, *args, **kwargs)
        self.bounds.add(name)
        return result

    def about(self) -> dict[str, str]:
        """Return the bounds and assumptions for the Trace's metadata."""
        about = {}
        if self.bounds:
            about["bounds"] = ", ".join(sorted(self.bounds))
        if self.assumed:
            about["supposed"] = ", ".join(f"{op}: {what}" for op, what in sorted(self.assumed.items()))
        return about
