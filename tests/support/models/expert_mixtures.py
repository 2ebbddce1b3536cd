"""Mixtures of experts as in published code: the same experts, each mixture with its own routing code.

Each has `EXPERTS` experts and routes a token to `TOPK` of them. Its docstring names the code that it follows.
"""

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.models.parts import Parts

# Widths whose bfloat16 rows are multiples of 16 bytes, as `torch._grouped_mm` requires.
WIDTH, INNER, EXPERTS, TOPK = 8, 16, 6, 2


class Expert(nn.Module):
    """A gated feed-forward with a norm, so that an expert has weights, biases and scales."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, INNER)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x):
        x = self.norm(x)
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Mixture(nn.Module):
    """A router, experts that are modules, and a shared expert for all tokens."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])
        self.shared = Expert()

    def route(self, x):
        return self.router(x).softmax(-1).topk(TOPK, -1)

    def forward(self, hidden):
        x = hidden.flatten(0, -2)
        weights, chosen = self.route(x)
        return (self.mix(x, weights, chosen) + self.shared(x)).view(hidden.shape)


class ExpertLoop(Mixture):
    """As Mixtral's first code in transformers: a one-hot mask, and each expert's rows by index."""

    def mix(self, x, weights, chosen):
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rank, token = torch.where(mask[number])
            out.index_add_(0, token, expert(x[None, token].reshape(-1, WIDTH)) * weights[token, rank, None])
        return out


class TokensRepeated(Mixture):
    """As DeepSeek's training code: each token once for each of its experts, whose rows a mask selects."""

    def mix(self, x, weights, chosen):
        repeated = x.repeat_interleave(TOPK, dim=0)
        flat = chosen.view(-1)
        out = torch.empty_like(repeated)
        for number, expert in enumerate(self.experts):
            out[flat == number] = expert(repeated[flat == number])
        return (out.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


class TokensSorted(Mixture):
    """As DeepSeek's inference code: rows sorted by expert, and each expert's slice of them."""

    def mix(self, x, weights, chosen):
        counts = torch.zeros(len(x), EXPERTS, dtype=torch.long).scatter_(1, chosen, 1).sum(0)
        order = chosen.view(-1).argsort()
        pieces = x[order // TOPK].split(counts.tolist())
        done = torch.cat([expert(piece) for expert, piece in zip(self.experts, pieces, strict=True) if len(piece)])
        out = torch.empty_like(done)
        out[order] = done
        return (out.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)


class Capacity(Mixture):
    """As GShard: a product with a one-hot tensor puts rows into the slots of each expert, its capacity."""

    def mix(self, x, weights, chosen):
        capacity = capacity_of(len(x))
        hot = F.one_hot(chosen.view(-1), EXPERTS)
        slot = ((hot.cumsum(0) - 1) * hot).sum(-1).view(len(x), TOPK).clamp(max=capacity - 1)
        at = (F.one_hot(chosen, EXPERTS).unsqueeze(-1) * F.one_hot(slot, capacity).unsqueeze(2)).sum(1).to(x.dtype)
        rows = torch.einsum("sec,sm->ecm", at, x)
        done = torch.stack([expert(piece) for expert, piece in zip(self.experts, rows, strict=True)])
        return torch.einsum("sec,ecm->sm", at, done)


def capacity_of(tokens):
    """Return the capacity of each expert, in rows."""
    return TOPK * tokens // EXPERTS + 1


class CapacityByIndex(Mixture):
    """As `Capacity`, but rows are written into the slots by index."""

    def mix(self, x, weights, chosen):
        capacity = capacity_of(len(x))
        flat = chosen.view(-1)
        hot = F.one_hot(flat, EXPERTS)
        slot = ((hot.cumsum(0) - 1) * hot).sum(-1).clamp(max=capacity - 1)
        token = flat.argsort(stable=True) // TOPK
        rows = torch.zeros(EXPERTS, capacity, WIDTH)
        rows[flat[flat.argsort(stable=True)], slot[flat.argsort(stable=True)]] = x[token]
        done = torch.stack([expert(piece) for expert, piece in zip(self.experts, rows, strict=True)])
        return (done[flat, slot].view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)


class AllExpertsOnAllTokens(Mixture):
    """Each expert computes every token, and most results are weighted by zero."""

    def mix(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            out = out + expert(x) * (weights * (chosen == number)).sum(-1, keepdim=True)
        return out


class Stacked(Mixture):
    """Experts whose weights are slices of one parameter, and whose biases are rows of one."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ParameterDict(
            {
                "up": torch.randn(EXPERTS, WIDTH, INNER),
                "down": torch.randn(EXPERTS, INNER, WIDTH),
                "bias": torch.randn(EXPERTS, INNER),
            }
        )


class SliceLoop(Stacked):
    """As the eager experts of transformers 5: slice by slice."""

    def mix(self, x, weights, chosen):
        params = self.experts
        out = torch.zeros_like(x)
        for number in range(EXPERTS):
            token, rank = torch.where(chosen == number)
            inner = torch.addmm(params["bias"][number], x[token], params["up"][number])
            out.index_add_(0, token, F.gelu(inner) @ params["down"][number] * weights[token, rank, None])
        return out


class WeightsGathered(Stacked):
    """As the batched experts of transformers 5: a copy of an expert's weights for each of its rows."""

    def mix(self, x, weights, chosen):
        params, flat = self.experts, chosen.view(-1)
        rows = x.repeat_interleave(TOPK, dim=0).unsqueeze(1)
        inner = torch.bmm(rows, params["up"][flat]).squeeze(1) + params["bias"][flat]
        done = torch.bmm(F.gelu(inner).unsqueeze(1), params["down"][flat]).squeeze(1)
        return (done.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)


class SelectingExperts(nn.ModuleList):
    """Experts that get sorted rows, and select among these again."""

    def forward(self, rows, numbers):
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self):
            out[numbers == number] = expert(rows[numbers == number])
        return out


class SelectedTwice(Mixture):
    """Rows sorted by expert, from which the module of the experts selects once more."""

    def __init__(self):
        super().__init__()
        self.experts = SelectingExperts(self.experts)

    def mix(self, x, weights, chosen):
        numbers, order = chosen.view(-1).sort()
        done = self.experts(x[order // TOPK], numbers)
        return torch.zeros_like(x).index_add(0, order // TOPK, done * weights.view(-1)[order][:, None])


def multiply_groups(rows, weights, numbers):
    """Return sorted rows times the weights of their experts."""
    ends = torch.histc(numbers.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).to(torch.int32)
    return torch._grouped_mm(rows.to(torch.bfloat16), weights.to(torch.bfloat16), ends).to(rows.dtype)


class WeightsStacked(Mixture):
    """Experts that are modules, whose weights are stacked to be multiplied at once."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS)])

    def mix(self, x, weights, chosen):
        numbers, order = chosen.view(-1).sort()
        stack = torch.stack([expert.weight for expert in self.experts]).transpose(1, 2)
        done = multiply_groups(x[order // TOPK], stack, numbers)
        return torch.zeros_like(x).index_add(0, order // TOPK, done * weights.view(-1)[order][:, None])


class GroupedExperts(Parts):
    """Experts that get rows sorted by expert."""

    def forward(self, rows, counts):
        ends = counts.cumsum(0).to(torch.int32)
        inner = torch._grouped_mm(rows, self.up.to(torch.bfloat16), ends)
        return torch._grouped_mm(F.silu(inner), self.down.to(torch.bfloat16), ends)


class SelectedRows(Mixture):
    """As torchtitan: the module of the experts gets selected rows only, and casts its weights first."""

    def __init__(self):
        super().__init__()
        self.experts = GroupedExperts(
            up=nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER)), down=nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))
        )

    def mix(self, x, weights, chosen):
        counts = torch.histc(chosen.float(), EXPERTS, 0, EXPERTS - 1)
        order = chosen.view(-1).argsort(stable=True)
        token = (order // TOPK)[:, None].expand(-1, WIDTH)
        done = self.experts(torch.gather(x, 0, token).to(torch.bfloat16), counts).to(x.dtype)
        return torch.zeros_like(x).scatter_add(0, token, done * weights.view(-1)[order][:, None])


# Each routes a token to TOPK of EXPERTS experts.
MIXTURES = (
    *(ExpertLoop, TokensRepeated, TokensSorted, SelectedTwice),
    *(SliceLoop, WeightsGathered, WeightsStacked, SelectedRows),
)
