"""The transformer layer of "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et al., 2022).

Post-attention and post-MLP dropout and dropout of the attention probabilities keep masks of one byte an element; there
is no attention mask. With a process group it is tensor parallel as in Megatron-LM, and with `sequence` also sequence
parallel: then a linear layer keeps its shard of the sequence and gathers the whole again in the backward pass.
"""

import torch
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.utils.checkpoint import checkpoint

DROPOUT = 0.1


def drop(x):
    return torch.native_dropout(x, DROPOUT, True)[0]


class Copy(torch.autograd.Function):
    """Return the input as it is; the gradient is reduced over the group (f in figure 4 of the paper)."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return functional.wait_tensor(functional.all_reduce(gradient, "sum", ctx.group)), None


class Reduce(torch.autograd.Function):
    """Return the sum over the group (f-bar in figure 4); with `scatter` this rank's part of it (g-bar in figure 5)."""

    @staticmethod
    def forward(ctx, x, group, scatter):
        ctx.group, ctx.scatter = group, scatter
        if scatter:
            return functional.wait_tensor(functional.reduce_scatter_tensor(x, "sum", 0, group))
        return functional.wait_tensor(functional.all_reduce(x, "sum", group))

    @staticmethod
    def backward(ctx, gradient):
        if ctx.scatter:
            gradient = functional.wait_tensor(functional.all_gather_tensor(gradient, 0, ctx.group))
        return gradient, None, None


class GatheredLinear(torch.autograd.Function):
    """Apply a linear layer to the sequence of all ranks (g in figure 5), of which only this rank's part is kept."""

    @staticmethod
    def forward(ctx, x, weight, group):
        ctx.group = group
        ctx.save_for_backward(x, weight)
        return functional.wait_tensor(functional.all_gather_tensor(x, 0, group)) @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        x = functional.wait_tensor(functional.all_gather_tensor(x, 0, ctx.group))
        of_input = functional.wait_tensor(functional.reduce_scatter_tensor(gradient @ weight, "sum", 0, ctx.group))
        return of_input, gradient.flatten(0, 1).t() @ x.flatten(0, 1), None


class TransformerLayer(nn.Module):
    """A layer on [sequence, batch, hidden]; `selective` recomputes the attention core in the backward pass."""

    def __init__(self, hidden, heads, *, ranks=1, group=None, sequence=False, selective=False):
        super().__init__()
        self.head_size, self.group, self.sequence, self.selective = hidden // heads, group, sequence, selective
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden // ranks, bias=False)
        self.projection = nn.Linear(hidden // ranks, hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden // ranks, bias=False)
        self.down = nn.Linear(4 * hidden // ranks, hidden, bias=False)

    def forward(self, x):
        x = x + drop(self.leave(self.projection(self.attend(self.enter(self.norm_1(x), self.qkv)))))
        hidden = nn.functional.gelu(self.enter(self.norm_2(x), self.up))
        return x + drop(self.leave(self.down(hidden)))

    def enter(self, x, linear):
        if self.group is None:
            return linear(x)
        return (
            GatheredLinear.apply(x, linear.weight, self.group) if self.sequence else linear(Copy.apply(x, self.group))
        )

    def leave(self, x):
        return x if self.group is None else Reduce.apply(x, self.group, self.sequence)

    def attend(self, qkv):
        length, batch = qkv.shape[:2]
        heads = qkv.view(length, -1, 3 * self.head_size)  # [sequence, batch * heads, 3 * head size]
        parts = [part.transpose(0, 1) for part in heads.split(self.head_size, dim=2)]
        context = checkpoint(attention, *parts, use_reentrant=False) if self.selective else attention(*parts)
        return context.transpose(0, 1).reshape(length, batch, -1)


def attention(query, key, value):
    scores = torch.bmm(query, key.transpose(1, 2)) * query.shape[-1] ** -0.5
    return torch.bmm(drop(scores.softmax(-1)), value)


def make_layers(count, hidden, heads, **options):
    return nn.Sequential(*(TransformerLayer(hidden, heads, **options) for _ in range(count))).bfloat16()
