"""Mixtures of experts as people write them: the same experts, routed in one way after the other.

Each has `EXPERTS` experts, of whom a token meets `MET`. The forward of each is from the code named beside it.
"""

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.models.parts import Parts

# Widths of which bfloat16 rows are multiples of 16 bytes, as grouped products want.
WIDTH, INNER, EXPERTS, MET = 8, 16, 6, 2


class Expert(nn.Module):
    """A gated feed-forward with a norm, so that an expert holds weights, biases and scales."""

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
    """A router, experts that are modules, and an expert that every token meets."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])
        self.shared = Expert()

    def route(self, x):
        return self.router(x).softmax(-1).topk(MET, -1)

    def forward(self, hidden):
        x = hidden.flatten(0, -2)
        weights, chosen = self.route(x)
        return (self.mix(x, weights, chosen) + self.shared(x)).view(hidden.shape)


class EachExpertInTurn(Mixture):
    """As Mixtral's first code in transformers: a one-hot mask, and each expert's rows by index."""

    def mix(self, x, weights, chosen):
        mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rank, token = torch.where(mask[number])
            out.index_add_(0, token, expert(x[None, token].reshape(-1, WIDTH)) * weights[token, rank, None])
        return out


class TokensRepeated(Mixture):
    """As DeepSeek's training code: each token once for each expert that it meets, and those picked by a mask."""

    def mix(self, x, weights, chosen):
        repeated = x.repeat_interleave(MET, dim=0)
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
        pieces = x[order // MET].split(counts.tolist())
        done = torch.cat([expert(piece) for expert, piece in zip(self.experts, pieces, strict=True) if len(piece)])
        out = torch.empty_like(done)
        out[order] = done
        return (out.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)


class Capacity(Mixture):
    """As GShard: a one-hot tensor multiplies the rows into as many places for each expert."""

    def mix(self, x, weights, chosen):
        places = places_for(len(x))
        hot = F.one_hot(chosen.view(-1), EXPERTS)
        place = ((hot.cumsum(0) - 1) * hot).sum(-1).view(len(x), MET).clamp(max=places - 1)
        at = (F.one_hot(chosen, EXPERTS).unsqueeze(-1) * F.one_hot(place, places).unsqueeze(2)).sum(1).to(x.dtype)
        rows = torch.einsum("sec,sm->ecm", at, x)
        done = torch.stack([expert(piece) for expert, piece in zip(self.experts, rows, strict=True)])
        return torch.einsum("sec,ecm->sm", at, done)


def places_for(tokens):
    """Return how many rows each expert of `Capacity` has room for."""
    return MET * tokens // EXPERTS + 1


class PlacesFilled(Mixture):
    """As `Capacity`, but rows are laid into the places."""

    def mix(self, x, weights, chosen):
        places = places_for(len(x))
        flat = chosen.view(-1)
        hot = F.one_hot(flat, EXPERTS)
        place = ((hot.cumsum(0) - 1) * hot).sum(-1).clamp(max=places - 1)
        token = flat.argsort(stable=True) // MET
        rows = torch.zeros(EXPERTS, places, WIDTH)
        rows[flat[flat.argsort(stable=True)], place[flat.argsort(stable=True)]] = x[token]
        done = torch.stack([expert(piece) for expert, piece in zip(self.experts, rows, strict=True)])
        return (done[flat, place].view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)


class AllExpertsOnAll(Mixture):
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


class SliceInTurn(Stacked):
    """As the eager experts of transformers 5: slice by slice."""

    def mix(self, x, weights, chosen):
        held = self.experts
        out = torch.zeros_like(x)
        for number in range(EXPERTS):
            token, rank = torch.where(chosen == number)
            inner = torch.addmm(held["bias"][number], x[token], held["up"][number])
            out.index_add_(0, token, F.gelu(inner) @ held["down"][number] * weights[token, rank, None])
        return out


class WeightsGathered(Stacked):
    """As the batched experts of transformers 5: a copy of an expert's weights for each of its rows."""

    def mix(self, x, weights, chosen):
        held, flat = self.experts, chosen.view(-1)
        rows = x.repeat_interleave(MET, dim=0).unsqueeze(1)
        inner = torch.bmm(rows, held["up"][flat]).squeeze(1) + held["bias"][flat]
        done = torch.bmm(F.gelu(inner).unsqueeze(1), held["down"][flat]).squeeze(1)
        return (done.view(*chosen.shape, -1) * weights.unsqueeze(-1)).sum(1)


class Bench(nn.ModuleList):
    """Experts that are handed sorted rows, and pick among these again."""

    def forward(self, rows, numbers):
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self):
            out[numbers == number] = expert(rows[numbers == number])
        return out


class PickedTwice(Mixture):
    """Rows sorted by expert, of which the module of the experts picks once more."""

    def __init__(self):
        super().__init__()
        self.experts = Bench(self.experts)

    def mix(self, x, weights, chosen):
        numbers, order = chosen.view(-1).sort()
        done = self.experts(x[order // MET], numbers)
        return torch.zeros_like(x).index_add(0, order // MET, done * weights.view(-1)[order][:, None])


def multiply_groups(rows, weights, numbers):
    """Return sorted rows times the weights of the experts that they meet."""
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
        done = multiply_groups(x[order // MET], stack, numbers)
        return torch.zeros_like(x).index_add(0, order // MET, done * weights.view(-1)[order][:, None])


class Groups(Parts):
    """Experts that are handed rows sorted by expert."""

    def forward(self, rows, counts):
        ends = counts.cumsum(0).to(torch.int32)
        inner = torch._grouped_mm(rows, self.up.to(torch.bfloat16), ends)
        return torch._grouped_mm(F.silu(inner), self.down.to(torch.bfloat16), ends)


class RowsHandedOver(Mixture):
    """As torchtitan: the module of the experts sees picked rows only, and weights that are cast first."""

    def __init__(self):
        super().__init__()
        self.experts = Groups(
            up=nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER)), down=nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH))
        )

    def mix(self, x, weights, chosen):
        counts = torch.histc(chosen.float(), EXPERTS, 0, EXPERTS - 1)
        order = chosen.view(-1).argsort(stable=True)
        token = (order // MET)[:, None].expand(-1, WIDTH)
        done = self.experts(torch.gather(x, 0, token).to(torch.bfloat16), counts).to(x.dtype)
        return torch.zeros_like(x).scatter_add(0, token, done * weights.view(-1)[order][:, None])


# Written in several ways, all of which let a token meet MET of EXPERTS.
WAYS = (
    *(EachExpertInTurn, TokensRepeated, TokensSorted, PickedTwice),
    *(SliceInTurn, WeightsGathered, WeightsStacked, RowsHandedOver),
)
