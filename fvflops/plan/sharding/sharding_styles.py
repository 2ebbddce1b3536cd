"""Sharding styles beyond those of torch.distributed.tensor.parallel."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class ShardedElements:
    """Elementwise modules whose first input is a shard by one placement, and whose parameters are so by another."""

    def __init__(self, placement: Any, parameters: Any) -> None:
        self._placement = (placement,)
        self._parameters = (parameters,)

    def _apply(self, module: nn.Module, mesh: Any) -> nn.Module:
        from torch.distributed.tensor import DTensor, distribute_tensor

        for name, parameter in module.named_parameters(recurse=False):
            sharded = distribute_tensor(parameter, mesh, self._parameters)
            module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))

        def prepare(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return DTensor.from_local(args[0], mesh, self._placement, run_check=False), *args[1:]

        def localise(_: nn.Module, args: tuple[Any, ...], result: Any) -> torch.Tensor:
            local: torch.Tensor = result.to_local() if isinstance(result, DTensor) else result
            return local

        module.register_forward_pre_hook(prepare)
        module.register_forward_hook(localise)
        return module


class RegatheredColumns:
    """Column-wise linear layers whose input is a part of the sequence, its first dimension, and gathered twice.

    As in Megatron-LM the backward pass gathers it again, so that only the part is kept: Korthikanti et al., "Reducing
    Activation Recomputation in Large Transformer Models" (arXiv:2205.05198), section 4.2.2.
    """

    def _apply(self, module: nn.Module, mesh: Any) -> nn.Module:
        from torch.distributed.tensor import Shard, distribute_tensor

        for name, parameter in module.named_parameters(recurse=False):
            sharded = distribute_tensor(parameter, mesh, (Shard(0),))
            module.register_parameter(name, nn.Parameter(sharded, requires_grad=parameter.requires_grad))

        def forward(x: torch.Tensor) -> torch.Tensor:
            parameters: tuple[Any, Any] = module.weight, module.bias
            weight, bias = (None if item is None else item.to_local() for item in parameters)
            result: torch.Tensor = GatheredLinear.apply(x, weight, bias, mesh)
            return result

        module.forward = forward
        return module


class GatheredLinear(torch.autograd.Function):
    """Linear layer of an input that is gathered from all ranks' parts, forward and backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, mesh):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.mesh, ctx.has_bias = mesh, bias is not None
        return nn.functional.linear(_gather(x, mesh), weight, bias)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        # In Megatron-LM's order: each matrix product overlaps a collective, whose result is waited for behind it.
        gathered = _gather(x, ctx.mesh)
        of_input = _reduce_scatter(gradient @ weight, ctx.mesh)
        flat = gradient.flatten(0, -2)
        of_weight = flat.T @ gathered.flatten(0, -2)
        of_bias = flat.sum(0) if ctx.has_bias else None
        return of_input.wait() if hasattr(of_input, "wait") else of_input, of_weight, of_bias, None


def _gather(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    part = DTensor.from_local(x, mesh, (Shard(0),), run_check=False)
    whole: torch.Tensor = part.redistribute(mesh, (Replicate(),), async_op=True).to_local()
    return whole


def _reduce_scatter(x: torch.Tensor, mesh: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, Partial, Shard

    whole = DTensor.from_local(x, mesh, (Partial(),), run_check=False)
    part: torch.Tensor = whole.redistribute(mesh, (Shard(0),), async_op=True).to_local()
    return part


class LocalInput:
    """Modules inside of `ShardedElements` that work on each rank's shard, as dropout with the rank's random numbers."""

    def _apply(self, module: nn.Module, mesh: Any) -> nn.Module:
        module.register_forward_pre_hook(lambda _, args: (args[0].to_local(), *args[1:]))
        return module


class RepartitionedOutput:
    """Modules whose result has one placement and is passed on by another."""

    def __init__(self, placement: Any, desired: Any) -> None:
        self._placement = (placement,)
        self._desired = (desired,)

    def _apply(self, module: nn.Module, mesh: Any) -> nn.Module:
        from torch.distributed.tensor import DTensor

        def repartition(_: nn.Module, args: tuple[Any, ...], result: torch.Tensor) -> torch.Tensor:
            sharded = DTensor.from_local(result, mesh, self._placement, run_check=False)
            return sharded.redistribute(mesh, self._desired).to_local()

        module.register_forward_hook(repartition)
        return module


class DividedVocabulary:
    """Losses of the zoo whose logits are divided by the vocabulary."""

    def _apply(self, module: Any, mesh: Any) -> nn.Module:
        module.group = mesh.get_group()
        module.first = mesh.get_local_rank() * -(-module.vocab_size // mesh.size())
        loss: nn.Module = module
        return loss
