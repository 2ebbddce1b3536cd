"""Sharding styles of the zoo's models: those of torch.distributed.tensor.parallel, and further ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

# Parameters of `fvflops.zoo.mixtral.Experts` → the dimension that tensor parallelism divides.
EXPERT_DIMENSIONS: Mapping[str, int] = {"gate_proj": 1, "up_proj": 1, "down_proj": 2}


class ShardingError(ValueError):
    """A model that cannot be split as requested."""


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


def styles_of_zoo() -> Mapping[str, Callable[[], Any]]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    return {
        "colwise": tp.ColwiseParallel,
        "rowwise": tp.RowwiseParallel,
        "colwise_gather_output": lambda: tp.ColwiseParallel(output_layouts=Replicate()),
        "colwise_rep": lambda: tp.ColwiseParallel(output_layouts=Replicate()),
        "rowwise_split_input": lambda: tp.RowwiseParallel(input_layouts=Replicate()),
        "rowwise_rep": lambda: tp.RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": lambda: tp.RowwiseParallel(input_layouts=Replicate()),
        "embedding_colwise": lambda: tp.ColwiseParallel(output_layouts=Replicate()),
        "sequence_parallel": lambda: tp.SequenceParallel(use_local_output=True),
        # transformers' name for the norms of queries and keys, (batch, sequence, heads, width of a head).
        "replicated_with_grad_allreduce": lambda: tp.SequenceParallel(sequence_dim=2, use_local_output=True),
        "replicated_input": lambda: _FirstInput(Replicate()),
        "sequence_input": lambda: _FirstInput(Shard(1)),
        "mixture": lambda: _MixtureBoundary(Replicate()),
        "mixture_of_sequence": lambda: _MixtureBoundary(Shard(1)),
        "partial_gradient": _PartialGradient,
        "grouped_experts": _GroupedExperts,
        "embedding_rowwise_to_sequence": lambda: tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "rowwise_to_sequence": lambda: tp.RowwiseParallel(output_layouts=Shard(1)),
        "colwise_of_sequence_gather_output": lambda: tp.ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Replicate()
        ),
        "colwise_of_sequence": lambda: tp.ColwiseParallel(input_layouts=Shard(1)),
        "colwise_bias": lambda: ShardedElements(Shard(-1), Shard(0)),
        "colwise_loss": DividedVocabulary,
        # With the sequence as the first dimension, as in Megatron-LM.
        "first_parallel": lambda: tp.SequenceParallel(sequence_dim=0, use_local_output=True),
        "first_parallel_bias": lambda: ShardedElements(Shard(0), Replicate()),
        "local_input": LocalInput,
        "colwise_of_first": RegatheredColumns,
        "rowwise_to_first": lambda: tp.RowwiseParallel(output_layouts=Shard(0)),
        "replicated_to_first": lambda: RepartitionedOutput(Replicate(), Shard(0)),
    }


class _FirstInput:
    """torch's PrepareModuleInput for modules with any number of arguments: replicates the first."""

    def __init__(self, layout: Any) -> None:
        self._layout = layout

    def _apply(self, module: nn.Module, mesh: Any) -> nn.Module:
        from torch.distributed.tensor import DTensor, Replicate

        def prepare(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            first = DTensor.from_local(args[0], mesh, (self._layout,), run_check=False)
            return (first.redistribute(mesh, (Replicate(),)), *args[1:])

        module.register_forward_pre_hook(prepare)
        return module


class _MixtureBoundary:
    """Replicate a mixture's input, and sum the ranks' parts of its result to the layout of the input."""

    def __init__(self, layout: Any) -> None:
        self._layout = layout

    def _apply(self, module: nn.Module, mesh: Any) -> nn.Module:
        from torch.distributed.tensor import DTensor, Partial, Replicate

        def prepare(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            x = DTensor.from_local(args[0], mesh, (self._layout,), run_check=False)
            return (x.redistribute(mesh, (Replicate(),)).to_local(grad_placements=(Partial(),)), *args[1:])

        def finish(_: nn.Module, args: tuple[Any, ...], result: Any) -> Any:
            x = DTensor.from_local(result, mesh, (Partial(),), run_check=False)
            return x.redistribute(mesh, (self._layout,)).to_local()

        module.register_forward_pre_hook(prepare)
        module.register_forward_hook(finish)
        return module


class _PartialGradient:
    """A replicated linear layer whose results get a part of their gradient on each rank, as torchtitan's NoParallel."""

    def _apply(self, module: nn.Module, mesh: Any) -> nn.Module:
        from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

        def prepare(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (DTensor.from_local(args[0], mesh, (Replicate(),), run_check=False, grad_placements=(Partial(),)),)

        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                replicated = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=None)
                module._parameters[name] = nn.Parameter(replicated, parameter.requires_grad)
        module.register_forward_pre_hook(prepare)
        module.register_forward_hook(lambda _, args, result: result.to_local(grad_placements=(Partial(),)))
        return module


class _GroupedExperts:
    """Each expert's columns, then rows, divided among the ranks."""

    def _apply(self, module: nn.Module, mesh: Any) -> nn.Module:
        from torch.distributed.tensor import Shard

        check_width(module, "tp", mesh.size())
        distribute_parameters(module, mesh, lambda name: [Shard(EXPERT_DIMENSIONS[name])])
        return module


def distribute_parameters(module: nn.Module, mesh: Any, placements: Callable[[str], list[Any]]) -> None:
    """Shard each parameter of a module, and let its forward compute with the local shards."""
    from torch.distributed.tensor import distribute_tensor

    for name, parameter in list(module._parameters.items()):
        if parameter is not None:
            sharded = distribute_tensor(parameter, mesh, placements(name), src_data_rank=None)
            module._parameters[name] = nn.Parameter(sharded, parameter.requires_grad)
    module.forward = _with_local_parameters(module, module.forward)


def _with_local_parameters(module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    from torch.distributed.tensor import DTensor

    def run(*args: Any) -> Any:
        originals = dict(module._parameters)
        for name, parameter in originals.items():
            if isinstance(parameter, DTensor):
                module._parameters[name] = parameter.to_local()
        try:
            return forward(*args)
        finally:
            module._parameters.update(originals)

    return run


def check_width(experts: nn.Module, axis: str, ranks: int) -> None:
    """Raise ShardingError where a number of ranks does not divide the experts' width."""
    width = next(
        parameter.shape[EXPERT_DIMENSIONS[name]] for name, parameter in experts.named_parameters(recurse=False)
    )
    if width % ranks:
        raise ShardingError(f"{axis}={ranks} must divide the experts' width {width}: use {axis}={list_divisors(width)}")


def list_divisors(number: int) -> str:
    """Return the divisors of a number, such as "1, 2 or 4"."""
    *others, last = (str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
    return f"{', '.join(others)} or {last}" if others else last
