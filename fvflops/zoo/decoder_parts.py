"""Shared parts of the zoo's decoders: KV cache, cross entropy of a divided vocabulary, and initialisation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Parallelism(NamedTuple):
    """How plans divide a model among ranks, by patterns of module names.

    `tensor` has the styles of fvflops/plan/sharding/sharding_styles.py (Shoeybi et al., "Megatron-LM",
    arXiv:1909.08053), and `sequence` styles with the sequence sharded between attention and MLP (Korthikanti et al.,
    "Reducing activation recomputation in large transformer models", arXiv:2205.05198). `divided` are attributes with a
    number of heads, which is divided by the number of ranks. `stages` are the arguments of PipelineStages. `mixtures`
    have the submodules `router`, `order` (of pairs of tokens and experts) and `experts`.
    """

    tensor: Mapping[str, str]
    sequence: Mapping[str, str] | None = None
    divided: tuple[str, ...] = ()
    stages: tuple[Any, ...] | None = None
    mixtures: str = ""


# Style → its style where the sequence is sharded.
OVER_SEQUENCE: Mapping[str, str] = {
    "embedding_rowwise": "embedding_rowwise_to_sequence",
    "replicated_input": "sequence_input",
    "rowwise": "rowwise_to_sequence",
    "mixture": "mixture_of_sequence",
    "colwise_gather_output": "colwise_of_sequence_gather_output",
}


def change_styles(styles: Mapping[str, str], changes: Mapping[str, str], norms: Iterable[str]) -> dict[str, str]:
    """Return the styles with some replaced, and with norms of a part of the sequence."""
    changed = {pattern: changes.get(style, style) for pattern, style in styles.items()}
    return {**changed, **dict.fromkeys(norms, "sequence_parallel")}


class KVCache:
    """Keys and values of earlier tokens for each attention, each (b, kv_heads, n, head_size), as in transformers."""

    def __init__(self) -> None:
        self._pairs: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        """The number of tokens, n."""
        return next((keys.shape[2] for keys, _ in self._pairs.values()), 0)

    def extend(self, attention: nn.Module, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens; return all."""
        if attention in self._pairs:
            before = self._pairs[attention]
            keys, values = torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)
        self._pairs[attention] = keys, values
        return keys, values


class Decoded(NamedTuple):
    """Result of a decoder with `use_cache`."""

    logits: Tensor
    past_key_values: KVCache


class VocabularyCrossEntropy(torch.autograd.Function):
    """Cross entropy in float32 of logits (..., rows) that a process group shares by the vocabulary, as Megatron's.

    `first` is the vocabulary's index of the first row here, and the labels (...) are within the vocabulary. The losses
    (...) need three all-reduces of their shape, and the backward pass none; without a group all rows are here.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, labels: Tensor, first: int, group) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.dtype = logits.dtype
        logits = logits.to(torch.float32, copy=True)
        largest = logits.amax(-1)
        _all_reduce(largest, "MAX", group)
        logits -= largest.unsqueeze(-1)
        elsewhere = (labels < first) | (labels >= first + logits.shape[-1])
        rows = (labels - first).masked_fill_(elsewhere, 0).unsqueeze(-1)
        predicted = logits.gather(-1, rows).squeeze(-1).masked_fill_(elsewhere, 0)
        _all_reduce(predicted, "SUM", group)
        total = logits.exp_().sum(-1)
        _all_reduce(total, "SUM", group)
        ctx.save_for_backward(logits.div_(total.unsqueeze(-1)), rows, elsewhere)
        return total.log() - predicted

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[no-untyped-def]
        probabilities, rows, elsewhere = ctx.saved_tensors
        found = elsewhere.logical_not().to(probabilities.dtype).neg_().unsqueeze(-1)
        result = probabilities.scatter_add_(-1, rows, found).mul_(gradient.unsqueeze(-1))
        return result.to(ctx.dtype), None, None, None


def _all_reduce(tensor: Tensor, op: str, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group)


class DividedCrossEntropy(nn.Module):
    """Cross entropy in float32 of logits; processes of a `group` divide the vocabulary, of which `first` is here."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.group: dist.ProcessGroup | None = None
        self.first = 0


def check_positions(tokens: Tensor, positions: int, model: str) -> None:
    """Raise ValueError for more tokens than positions."""
    if tokens.ndim == 2 and tokens.shape[1] > positions:
        raise ValueError(
            f"tokens of shape {tuple(tokens.shape)} exceed this {model}'s context length, {positions}: "
            "build it with more positions"
        )


def initialise(module: nn.Module) -> None:
    """Initialise a layer as published: normal weights with standard deviation 0.02, biases zero."""
    if isinstance(module, nn.Linear | nn.Embedding) and not module.weight.is_meta:
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
