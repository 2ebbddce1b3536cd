"""The step of an optimizer in a run whose dynamic loss scale is still too large."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer


class SkippedStep(Optimizer):
    """Copies gradients to float32 and unscales them; since some have overflowed, nothing else is done.

    Megatron starts with a loss scale of 2^32, halves it after each overflow, and updates no parameter until then.
    Source: Float16OptimizerWithFloat16Params.step and DynamicGradScaler of Megatron-LM.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(list(parameters), {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Copy and unscale the gradients."""
        copies = []
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                copies.append(torch.empty_like(gradient, dtype=torch.float32))
                copies[-1].grad = gradient.to(torch.float32)
        # One kernel, which multiplies by a scalar tensor, as unscaling does.
        torch.nn.utils.clip_grads_with_norm_(copies, 1.0, torch.ones((), device=copies[0].device), foreach=True)
