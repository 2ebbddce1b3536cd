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
