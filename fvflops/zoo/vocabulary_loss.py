"""Cross entropy of logits whose vocabulary is divided among processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


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
