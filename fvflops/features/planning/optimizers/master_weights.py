"""An optimizer that keeps float32 copies of parameters of fewer bits, as mixed-precision training does."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from fvflops.text import short_repr


class MasterWeights(Optimizer):
    """Updates float32 copies ("master weights") of parameters, then copies them back.

    In each step gradients are copied to float32, the norm of this rank's is clipped to `max_norm`, and the optimizer
    that `make` creates from the copies runs. With `float32_gradients` they are accumulated in float32 instead, in
    memory of the optimizer, and those of the parameters are freed at once: Megatron-LM's
    accumulate_allreduce_grads_in_fp32, its default for bfloat16. Source: Micikevicius et al., "Mixed Precision
    Training" (arXiv:1710.03740); the order is that of Megatron-LM's Float16OptimizerWithFloat16Params.

    >>> weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    >>> optimizer = MasterWeights([weight], lambda copies: torch.optim.SGD(copies, lr=2**-10), max_norm=10.0)
    >>> weight.grad = torch.ones_like(weight)
    >>> optimizer.step()
    >>> weight.dtype, optimizer.copies[0].dtype, float(optimizer.copies[0][0])
    (torch.bfloat16, torch.float32, 0.9990234375)
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        make: Callable[[list[torch.Tensor]], Optimizer],
        *,
        max_norm: float = 1.0,
        float32_gradients: bool = False,
    ) -> None:
        super().__init__([parameter for parameter in parameters if parameter.requires_grad], {})
        self._parameters: list[torch.Tensor] = self.param_groups[0]["params"]
        self.copies: list[torch.Tensor] = []
        self._make = make
        self._inner: Optimizer | None = None
        self._max_norm = max_norm
        self._gradients: list[torch.Tensor] = []
        for index, parameter in enumerate(self._parameters if float32_gradients else ()):
            self._gradients.append(torch.zeros_like(local_part(parameter), dtype=torch.float32))
            # The parameter may outlive the optimizer.
            parameter.register_post_accumulate_grad_hook(partial(_accumulate, weakref.ref(self), index))

    def __repr__(self) -> str:
        kind = type(self._inner).__name__
        return short_repr(self, kind, f"float32 copies of {len(self.copies):,} parameters")

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update the copies of parameters with gradients, and the parameters from them."""
        from fvflops.torch_internals import foreach_copy

        if closure is not None:
            raise ValueError("MasterWeights takes no closure: call backward before step()")
        if self._inner is None:  # as other state, the copies are made in the first step
            local = [local_part(parameter) for parameter in self._parameters]
            self.copies = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in local]
            foreach_copy(self.copies, local)
            self._inner = self._make(self.copies)
        for copy, gradient in zip(self.copies, self._gradients, strict=False):
            copy.grad = gradient
        for parameter, copy in () if self._gradients else zip(self._parameters, self.copies, strict=True):
            copy.grad = None if parameter.grad is None else local_part(parameter.grad, parameter).to(torch.float32)
        torch.nn.utils.clip_grad_norm_(self.copies, self._max_norm, foreach=True)
        self._inner.step()
        foreach_copy([local_part(parameter) for parameter in self._parameters], self.copies)
        for copy in self.copies:
            copy.grad = None
        for gradient in self._gradients:
            gradient.zero_()


@torch.no_grad()
def _accumulate(reference: Callable[[], MasterWeights | None], index: int, parameter: torch.Tensor) -> None:
    """Add a parameter's gradient to the optimizer's in float32, and free it."""
    optimizer = reference()
    if optimizer is not None and parameter.grad is not None:
        optimizer._gradients[index].add_(local_part(parameter.grad, parameter))
        parameter.grad = None


def local_part(tensor: torch.Tensor, parameter: torch.Tensor | None = None) -> torch.Tensor:
    """Return a tensor itself, of a DTensor this rank's part, placed as `parameter`: ranks update their parts alone."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return tensor
    if isinstance(parameter, DTensor):
        tensor = tensor.redistribute(placements=parameter.placements)
    return tensor.to_local()
