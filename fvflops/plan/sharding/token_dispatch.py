"""Dispatch of tokens to the ranks of their experts and back, as in torchtitan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

Received = Callable[[], torch.Tensor]

# What other ranks would send in the exchange of numbers of tokens, where a plan sends nothing.
_RECEIVED: ContextVar[Received | None] = ContextVar("received", default=None)


@contextmanager
def knowing_counts(received: Received) -> Iterator[None]:
    """Let a dispatch take the numbers of tokens that each expert of this rank gets from each rank as received."""
    token = _RECEIVED.set(received)
    try:
        yield
    finally:
        _RECEIVED.reset(token)


def dispatching(forward: Callable[..., torch.Tensor], group: Any) -> Callable[..., torch.Tensor]:
    """Return the forward of a rank's experts for the tokens of all ranks of a group.

    `forward` and the result take rows that are ordered by expert, and the number of rows of each expert: the result of
    all experts, `forward` of this rank's.
    """
    ranks = dist.get_world_size(group)

    def run(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        from fvflops.torch_internals import all_to_all_with_gradient

        received = _exchange(counts, group).view(ranks, -1)
        sent, arriving = counts.view(ranks, -1).sum(1).tolist(), received.sum(1).tolist()
        x = all_to_all_with_gradient(x, arriving, sent, group)
        order = _order_by_expert(received, sum(arriving))
        results = forward(x[order], received.sum(0))
        x = torch.empty_like(results)
        x[order] = results
        combined: torch.Tensor = all_to_all_with_gradient(x, sent, arriving, group)
        return combined

    return run


def _exchange(counts: torch.Tensor, group: Any) -> torch.Tensor:
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    known = _RECEIVED.get()
    return received if known is None else known()


def _order_by_expert(received: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the rows, which are ordered by rank and then by expert, in the order of the experts."""
    starts = (received.flatten().cumsum(0) - received.flatten()).view_as(received).t().flatten()
    counts = received.t().flatten()
    shifts = starts - (counts.cumsum(0) - counts)
    return torch.arange(rows, device=received.device) + torch.repeat_interleave(shifts, counts, output_size=rows)


def slicing_tokens(forward: Callable[..., Any], mesh: Any) -> Callable[..., Any]:
    """Return a `fvflops.zoo.mixtral.TokenOrder`'s forward for this rank's slice of the tokens of a tp group."""
    ranks, rank = mesh.size(), mesh.get_local_rank()

    def run(weights: torch.Tensor, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens = len(chosen)
        if tokens % ranks:
            raise ValueError(f"tp={ranks} must divide the {tokens} tokens of a batch, which ep divides over tp")
        each = tokens // ranks
        own = slice(rank * each, (rank + 1) * each)
        ordered, rows, counts = forward(weights[own], chosen[own])
        return ordered, rows + rank * each, counts

    return run


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
