"""Cross entropy that computes the output projection in chunks of tokens, so that not all logits exist at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

CHUNKED = "chunked"
# Names of the module that computes a language model's logits, where the model does not name it.
_HEADS = ("lm_head", "output", "head", "embed_out")


def compute_loss_in_chunks(model: nn.Module) -> None:
    """Let a language model return its loss in place of its logits, from its output projection on, by `ChunkedLoss`.

    >>> model = nn.ModuleDict({"lm_head": nn.Linear(8, 100, bias=False)})
    >>> compute_loss_in_chunks(model)
    >>> model.lm_head(torch.zeros(1, 16, 8)).ndim
    0
    """
    head = find_head(model)
    if not isinstance(head, nn.Linear) or head.bias is not None:
        raise ValueError(
            f"--loss chunked: no output projection without a bias is known of {type(model).__name__}: pass a function"
        )
    # A copy of the model has the class too, unlike an attribute `forward`.
    head.__class__ = ChunkedLossHead


def find_head(model: nn.Module) -> nn.Module | None:
    """Return the module that computes a language model's logits, None where none is known."""
    find = getattr(model, "get_output_embeddings", None)
    return find() if callable(find) else next((getattr(model, name) for name in _HEADS if hasattr(model, name)), None)


class ChunkedLossHead(nn.Linear):
    """An output projection that returns the cross entropy of its logits; the labels are zeros."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        weight: torch.Tensor = self.weight
        if hasattr(weight, "device_mesh"):  # a DTensor
            raise ValueError("--loss chunked is not planned with tp, which divides the output projection")
        hidden, kind = input.flatten(0, -2), input.device.type
        if torch.is_autocast_enabled(kind):
            hidden, weight = (item.to(torch.get_autocast_dtype(kind)) for item in (hidden, weight))
        labels = torch.zeros(len(hidden), dtype=torch.int64, device=input.device)
        with torch.autocast(kind, enabled=False):
            loss: torch.Tensor = ChunkedLoss.apply(hidden, weight, labels)
        return loss


def size_of_chunk(tokens: int, width: int, vocabulary: int) -> int:
    """Return the tokens of a chunk, whose logits take about the memory of the hidden states.

    As in liger's fused linear cross entropy, and torch's `LinearCrossEntropyOptions("aspect_ratio")`.

    >>> size_of_chunk(8192, 4096, 128256)
    256
    """
    wanted = -(-tokens // -(-vocabulary // width))
    return min(1 << (wanted - 1).bit_length(), tokens)


class ChunkedLoss(torch.autograd.Function):
    """Mean cross entropy of hidden states times a weight; the forward pass computes the gradients, chunk by chunk.

    Source: Hsu et al., "Liger Kernel" (arXiv:2410.10989), section 3.2. The loss and its gradient are in the memory of
    the chunk's logits.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        of_hidden = torch.empty_like(hidden)
        of_weight = torch.zeros_like(weight) if weight.requires_grad else None
        losses = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        size = size_of_chunk(len(hidden), hidden.shape[1], len(weight))
        for begin in range(0, len(hidden), size):
            chunk = slice(begin, begin + size)
            logits = hidden[chunk] @ weight.t()
            logits.sub_(logits.amax(-1, keepdim=True))
            label = labels[chunk].unsqueeze(1)
            of_label = logits.gather(1, label)
            total = logits.exp_().sum(-1, keepdim=True)
            losses[chunk] = (total.log() - of_label).squeeze(1)
            logits.div_(total).scatter_add_(1, label, torch.full_like(of_label, -1.0)).div_(len(hidden))
            torch.mm(logits, weight, out=of_hidden[chunk])
            if of_weight is not None:
                of_weight.addmm_(logits.t(), hidden[chunk])
        ctx.gradients = of_hidden, of_weight
        return losses.mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        of_hidden, of_weight = ctx.gradients
        return of_hidden.mul_(gradients[0]), None if of_weight is None else of_weight.mul_(gradients[0]), None
