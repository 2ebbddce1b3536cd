"""Tokens of each expert, which depend on values that a plan lacks, and their dispatch to the experts' ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist

from fvflops.text import suggest
from fvflops.torch_internals import disable_dispatch_modes

# Tokens per expert: of every rank, or of each rank of an expert-parallel group.
Histogram = Sequence[int] | Sequence[Sequence[int]]
# None: every expert gets as many. A mapping has the name of each mixture's experts.
Routing = Histogram | Mapping[str, Histogram] | None


class RoutingError(ValueError):
    """A histogram of tokens per expert that a mixture cannot have."""


def check_routing(routing: Routing, names: Sequence[str]) -> None:
    """Raise RoutingError where a routing names experts that the model lacks, or lacks some of its `names`."""
    if not isinstance(routing, Mapping):
        return
    for name in routing:
        if name not in names:
            raise RoutingError(f"routing has {name!r}, but the model's experts are {', '.join(names) or 'none'}")
    missing = [name for name in names if name not in routing]
    if missing:
        raise RoutingError(f"routing lacks {missing[0]!r}{suggest(missing[0], list(routing))}")


def count_tokens(routing: Routing, name: str, *, experts: int, pairs: Sequence[int], top_k: int) -> list[list[int]]:
    """Return rank → expert → how many of the rank's tokens it gets.

    `pairs` are the pairs of a token and one of its `top_k` experts, by rank. A histogram is scaled to them.

    >>> count_tokens(None, "mlp.experts", experts=4, pairs=[6, 6], top_k=2)
    [[2, 2, 1, 1], [1, 1, 2, 2]]
    >>> count_tokens([30, 10, 10, 10], "mlp.experts", experts=4, pairs=[6], top_k=2)
    [[3, 1, 1, 1]]
    """
    histogram = routing[name] if isinstance(routing, Mapping) else routing
    if histogram is None:
        # Round-robin over the tokens of all ranks.
        ends = [0, *accumulate(pairs)]
        before = [[(end - 1 - expert) // experts for expert in range(experts)] for end in ends]
        return [[b - a for a, b in zip(*rows, strict=True)] for rows in pairwise(before)]
    rows: Sequence[Any] = histogram
    if not rows or not isinstance(rows[0], Sequence):
        rows = [histogram] * len(pairs)
    if len(rows) != len(pairs) or any(len(row) != experts for row in rows):
        shape = f"{len(rows)} rows of {len(rows[0])}" if isinstance(histogram[0], Sequence) else f"{len(rows[0])}"
        raise RoutingError(
            f"routing for {name} must have a number for each of {experts} experts, or {len(pairs)} rows of them, one "
            f"for each rank of ep; got {shape}"
        )
    counts = [_scale(row, count, name) for row, count in zip(rows, pairs, strict=True)]
    for row, count in zip(counts, pairs, strict=True):
        if max(row) * top_k > count:
            raise RoutingError(
                f"routing for {name} sends {max(row)} of a rank's {count // top_k} tokens to expert "
                f"{row.index(max(row))}: a token is sent to {top_k} different experts, so an expert gets each at most "
                "once"
            )
    return counts


def _scale(shares: Sequence[int], total: int, name: str) -> list[int]:
    """Return integers in proportion to some shares that sum to a total, by largest remainders."""
    whole = sum(shares)
    if whole <= 0 or min(shares) < 0:
        raise RoutingError(f"routing for {name} must have non-negative numbers, not all zero; got {list(shares)}")
    scaled = [share * total // whole for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda expert: -(shares[expert] * total % whole))
    for expert in by_remainder[: total - sum(scaled)]:
        scaled[expert] += 1
    return scaled


def choose_experts(counts: Sequence[int], top_k: int) -> torch.Tensor:
    """Return the `top_k` experts of each token, all different, so that each expert gets its number of tokens.

    >>> choose_experts([2, 2, 1, 1], 2).tolist()
    [[0, 1], [0, 2], [1, 3]]
    """
    pairs = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(list(counts)))
    return pairs.view(top_k, len(pairs) // top_k).t().contiguous()


@dataclass(slots=True)
class RoutedTokens:
    """The tokens that each expert of one mixture gets from each of the `ranks` of ep, of which this is `rank`.

    `slices` are the ranks of tp that divide a batch's tokens among them, and `batch` is the shape of the last batch:
    tokens, and experts per token. The tensors are constants of a run, so they are kept: one that is freed
    during the run would look like a result of unrecorded work.
    """

    name: str
    routing: Routing
    experts: int
    ranks: int
    rank: int
    slices: int
    batch: tuple[int, int] = (0, 1)
    _counts: dict[tuple[int, int], list[list[int]]] = field(default_factory=dict)
    _constants: dict[tuple[str, int, int], torch.Tensor] = field(default_factory=dict)

    def counts(self) -> list[list[int]]:
        """Return rank → expert → tokens."""
        if self.batch not in self._counts:
            tokens, top_k = self.batch
            size = -(-tokens // self.slices)  # as torch.chunk divides them
            sizes = [max(0, min(size, tokens - size * part)) for part in range(self.slices)]
            pairs = [sizes[rank % self.slices] * top_k for rank in range(self.ranks)]
            counts = count_tokens(self.routing, self.name, experts=self.experts, pairs=pairs, top_k=top_k)
            self._counts[self.batch] = counts
        return self._counts[self.batch]

    def chosen(self) -> torch.Tensor:
        """Return the experts of each token of this rank's batch, (tokens, experts of a token)."""
        first = self.rank - self.rank % self.slices
        own = slice(first, first + self.slices)
        parts = (choose_experts(part, self.batch[1]) for part in self.counts()[own])
        return self._constant("chosen", lambda: torch.cat(list(parts)))

    def received(self) -> torch.Tensor:
        """Return the tokens that this rank's experts get from each rank, (ranks, experts of a rank)."""
        each = self.experts // self.ranks
        own = slice(self.rank * each, (self.rank + 1) * each)
        return self._constant("received", lambda: torch.tensor(self.counts())[:, own].contiguous())

    def _constant(self, name: str, create: Callable[[], torch.Tensor]) -> torch.Tensor:
        key = name, *self.batch
        if key not in self._constants:
            with disable_dispatch_modes():  # a real run has no such ops
                self._constants[key] = create()
        return self._constants[key]


def dispatching(experts: Any, group: Any) -> Callable[..., torch.Tensor]:
    """Return the forward of a rank's experts for the tokens of all ranks of a group.

    It takes rows that are ordered by expert, and the number of rows of each of all experts; the forward of `experts`
    takes this rank's rows and numbers. Where a plan sends nothing, `experts.received` returns the numbers of tokens
    that each rank would send.
    """
    ranks, forward = dist.get_world_size(group), experts.forward

    def run(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        from fvflops.torch_internals import all_to_all_with_gradient

        exchanged = torch.empty_like(counts)
        dist.all_to_all_single(exchanged, counts, group=group)
        received = (experts.received() if hasattr(experts, "received") else exchanged).view(ranks, -1)
        sent, arriving = counts.view(ranks, -1).sum(1).tolist(), received.sum(1).tolist()
        x = all_to_all_with_gradient(x, arriving, sent, group)
        order = _order_by_expert(received, sum(arriving))
        results = forward(x[order], received.sum(0))
        x = torch.empty_like(results)
        x[order] = results
        combined: torch.Tensor = all_to_all_with_gradient(x, sent, arriving, group)
        return combined

    return run


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
