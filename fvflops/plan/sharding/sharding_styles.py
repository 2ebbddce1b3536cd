"""Sharding styles of the zoo's models: torch.distributed.tensor.parallel's, and further ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

# Changes a tensor, given the mesh.
Change = Callable[[Any, Any], Any]
# Shards a module, given the mesh, in place.
Style = Callable[[nn.Module, Any], Any]
# Parameters of `fvflops.zoo.mixtral.Experts` → the dimension that tensor parallelism divides.
EXPERT_DIMENSIONS: Mapping[str, int] = {"gate_proj": 1, "up_proj": 1, "down_proj": 2}


class ShardingError(ValueError):
    """A model that cannot be split as requested."""


def name_class(model: nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def parallelism_of(model: nn.Module) -> Any:
    """Return the `fvflops.zoo.decoder_parts.Parallelism` of a model of the zoo, None for any other."""
    return getattr(type(model), "zoo_parallelism", None)


def change_module(first: Change | None = None, result: Change | None = None, parameters: Any = None) -> Style:
    """Return the style that changes a module's first input and its result, and places its parameters."""

    def apply(module: nn.Module, mesh: Any) -> None:
        if parameters is not None:
            _distribute(module, mesh, lambda name: [parameters])
        if first is not None:
            module.register_forward_pre_hook(lambda _, args: (first(args[0], mesh), *args[1:]))
        if result is not None:
            module.register_forward_hook(lambda _, args, value: result(value, mesh))

    return apply


def _placed(tensor: torch.Tensor, mesh: Any, placement: Any, **options: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(tensor, mesh, (placement,), run_check=False, **options)


def sharded_elements(placement: Any, parameters: Any) -> Style:
    """Return the style of elementwise modules with a first input and parameters placed so, and local results."""
    return change_module(
        lambda x, mesh: _placed(x, mesh, placement),
        lambda x, mesh: x.to_local() if hasattr(x, "to_local") else x,
        parameters,
    )


def mixture_boundary(layout: Any) -> Style:
    """Return the style that replicates a mixture's input, and sums the ranks' parts of its result to the layout."""
    from torch.distributed.tensor import Partial, Replicate

    def replicate(x: torch.Tensor, mesh: Any) -> Any:
        return _placed(x, mesh, layout).redistribute(mesh, (Replicate(),)).to_local(grad_placements=(Partial(),))

    return change_module(
        replicate, lambda x, mesh: _placed(x, mesh, Partial()).redistribute(mesh, (layout,)).to_local()
    )


def regather_columns(module: nn.Module, mesh: Any) -> None:
    """Shard a linear layer by columns, whose input is a part of the sequence, its first dimension, and gathered twice.

    As in Megatron-LM the backward pass gathers it again, so that only the part is kept: Korthikanti et al., "Reducing
    Activation Recomputation in Large Transformer Models" (arXiv:2205.05198), section 4.2.2.
    """
    from torch.distributed.tensor import Shard

    _distribute(module, mesh, lambda name: [Shard(0)])

    def forward(x: torch.Tensor) -> torch.Tensor:
        parameters: tuple[Any, Any] = module.weight, module.bias
        weight, bias = (None if item is None else item.to_local() for item in parameters)
        result: torch.Tensor = GatheredLinear.apply(x, weight, bias, mesh)
        return result

    module.forward = forward


class GatheredLinear(torch.autograd.Function):
    """Linear layer of an input that is gathered from all ranks' parts, forward and backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, mesh):  # type: ignore[no-untyped-def]
        from torch.distributed.tensor import Replicate, Shard

        ctx.save_for_backward(x, weight)
        ctx.mesh, ctx.has_bias = mesh, bias is not None
        return nn.functional.linear(_redistribute(x, mesh, Shard(0), Replicate()), weight, bias)

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):  # type: ignore[no-untyped-def]
        from torch.distributed.tensor import Partial, Replicate, Shard

        x, weight = ctx.saved_tensors
        # In Megatron-LM's order: each matrix product overlaps a collective, whose result is waited for behind it.
        gathered = _redistribute(x, ctx.mesh, Shard(0), Replicate())
        # Under autocast the forward pass cast the operands; the backward pass runs without it.
        of_input = _redistribute(gradient @ weight.to(gradient.dtype), ctx.mesh, Partial(), Shard(0))
        flat = gradient.flatten(0, -2)
        of_weight = flat.T @ gathered.flatten(0, -2).to(gradient.dtype)
        of_bias = flat.sum(0) if ctx.has_bias else None
        return of_input.wait() if hasattr(of_input, "wait") else of_input, of_weight, of_bias, None


def _redistribute(x: torch.Tensor, mesh: Any, placement: Any, desired: Any) -> torch.Tensor:
    changed: torch.Tensor = _placed(x, mesh, placement).redistribute(mesh, (desired,), async_op=True).to_local()
    return changed


def divide_vocabulary(loss: Any, mesh: Any) -> None:
    """Let a loss of the zoo take logits that are divided by the vocabulary."""
    loss.group = mesh.get_group()
    loss.first = mesh.get_local_rank() * -(-loss.vocab_size // mesh.size())


def divide_experts(module: nn.Module, mesh: Any) -> None:
    """Divide each expert's columns, then rows, among the ranks."""
    from torch.distributed.tensor import Shard

    check_width(module, "tp", mesh.size())
    distribute_parameters(module, mesh, lambda name: [Shard(EXPERT_DIMENSIONS[name])])


def styles_of_zoo() -> Mapping[str, Style]:
    """Return name → style of torch.distributed.tensor.parallel."""
    from torch.distributed.tensor import Partial, Replicate, Shard
    from torch.distributed.tensor import parallel as tp

    def replicated(layout: Any) -> Style:
        return change_module(lambda x, mesh: _placed(x, mesh, layout).redistribute(mesh, (Replicate(),)))

    gathered, split = tp.ColwiseParallel(output_layouts=Replicate()), tp.RowwiseParallel(input_layouts=Replicate())
    styles: Mapping[str, Any] = {
        "colwise": tp.ColwiseParallel(),
        "rowwise": tp.RowwiseParallel(),
        **dict.fromkeys(("colwise_gather_output", "colwise_rep"), gathered),
        **dict.fromkeys(("rowwise_split_input", "rowwise_rep", "embedding_rowwise"), split),
        "embedding_colwise": gathered,
        "sequence_parallel": tp.SequenceParallel(use_local_output=True),
        # transformers' name for the norms of queries and keys, (batch, sequence, heads, width of a head).
        "replicated_with_grad_allreduce": tp.SequenceParallel(sequence_dim=2, use_local_output=True),
        # As torch's PrepareModuleInput, for modules with any number of arguments.
        "replicated_input": replicated(Replicate()),
        "sequence_input": replicated(Shard(1)),
        "mixture": mixture_boundary(Replicate()),
        "mixture_of_sequence": mixture_boundary(Shard(1)),
        # Results of a replicated layer get a part of their gradient on each rank, as torchtitan's NoParallel.
        "partial_gradient": change_module(
            lambda x, mesh: _placed(x, mesh, Replicate(), grad_placements=(Partial(),)),
            lambda x, mesh: x.to_local(grad_placements=(Partial(),)),
            Replicate(),
        ),
        "grouped_experts": divide_experts,
        "embedding_rowwise_to_sequence": tp.RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "rowwise_to_sequence": tp.RowwiseParallel(output_layouts=Shard(1)),
        "colwise_of_sequence_gather_output": tp.ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        "colwise_of_sequence": tp.ColwiseParallel(input_layouts=Shard(1)),
        "colwise_bias": sharded_elements(Shard(-1), Shard(0)),
        "colwise_loss": divide_vocabulary,
        # With the sequence as the first dimension, as in Megatron-LM.
        "first_parallel": tp.SequenceParallel(sequence_dim=0, use_local_output=True),
        "first_parallel_bias": sharded_elements(Shard(0), Replicate()),
        # Inside of first_parallel_bias, on each rank's shard: dropout with the rank's random numbers.
        "local_input": change_module(lambda x, mesh: x.to_local()),
        "colwise_of_first": regather_columns,
        "rowwise_to_first": tp.RowwiseParallel(output_layouts=Shard(0)),
        "replicated_to_first": change_module(
            result=lambda x, mesh: _placed(x, mesh, Replicate()).redistribute(mesh, (Shard(0),)).to_local()
        ),
    }
    return {name: getattr(style, "_apply", style) for name, style in styles.items()}


def distribute_parameters(module: nn.Module, mesh: Any, placements: Callable[[str], list[Any]]) -> None:
    """Shard each parameter of a module, and let its forward compute with the local shards."""
    _distribute(module, mesh, placements)
    module.forward = _with_local_parameters(module, module.forward)


def _distribute(module: nn.Module, mesh: Any, placements: Callable[[str], list[Any]]) -> None:
    from torch.distributed.tensor import distribute_tensor

    for name, parameter in module.named_parameters(recurse=False):
        sharded = distribute_tensor(parameter, mesh, placements(name), src_data_rank=None)
        module.register_parameter(name, nn.Parameter(sharded, parameter.requires_grad))


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
    return join_choices(divisor for divisor in range(1, number + 1) if number % divisor == 0)


def join_choices(numbers: Iterable[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last
