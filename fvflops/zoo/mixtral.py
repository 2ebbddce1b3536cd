"""Mixtral, a Llama whose MLPs are mixtures of experts: a router sends each token to a few of them.

Published in Jiang et al., "Mixtral of Experts" (arXiv:2401.04088: sizes in table 1; 47B parameters, of which a token
uses 13B).
"""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fvflops.torch_internals import too_old_message
from fvflops.zoo.decoder_parts import OVER_SEQUENCE, KVCache, change_styles
from fvflops.zoo.llama import ATTENTION_STYLES, NORMS, Attention, Llama, LlamaConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtralConfig(LlamaConfig):
    """Sizes of a Mixtral; `intermediate_size` is one expert's, and a token is sent to `experts_per_token`."""

    experts: int
    experts_per_token: int

    def __post_init__(self) -> None:
        LlamaConfig.__post_init__(self)
        if not 1 <= self.experts_per_token <= self.experts:
            raise ValueError(f"{self}: experts_per_token must be from 1 to experts")


_TOP2 = partial(MixtralConfig, experts_per_token=2, kv_heads=8, experts=8)
CONFIGS = {
    "mixtral_8x7b": _TOP2(
        vocab_size=32_000, hidden_size=4096, intermediate_size=14_336, layers=32, heads=32, rope_theta=1_000_000.0
    ),
    "mixtral_tiny": _TOP2(
        vocab_size=256, hidden_size=64, intermediate_size=96, layers=2, heads=4, kv_heads=2, experts=4
    ),
}


class Router(nn.Module):
    """Choose the experts of each token: (t, hidden) to their weights and numbers, both (t, experts_per_token)."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.gate = nn.Linear(config.hidden_size, config.experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = torch.topk(F.softmax(self.gate(x).float(), dim=-1), self.experts_per_token, dim=-1)
        return (weights / weights.sum(-1, keepdim=True)).to(x.dtype), chosen


class TokenOrder(nn.Module):
    """Order pairs of a token and an expert by expert: weights and numbers of the experts, both (t, experts_per_token).

    Returns for each pair its weight and the row of its token, and for each expert its number of tokens.
    """

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.experts = config.experts

    def forward(self, weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pairs = chosen.flatten()
        order = torch.argsort(pairs, stable=True)
        counts = torch.zeros(self.experts, dtype=torch.int64, device=pairs.device)
        counts = counts.scatter_add(0, pairs, torch.ones_like(pairs))
        return weights.flatten()[order], order // chosen.shape[-1], counts


class Experts(nn.Module):
    """SwiGLU MLPs side by side, each for its rows of x (rows, hidden), which are ordered by expert."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        if message := too_old_message("Mixtral of the zoo"):
            raise ValueError(message)
        experts, inner, outer = config.experts, config.intermediate_size, config.hidden_size
        self.gate_proj = nn.Parameter(torch.empty(experts, inner, outer))
        self.up_proj = nn.Parameter(torch.empty(experts, inner, outer))
        self.down_proj = nn.Parameter(torch.empty(experts, outer, inner))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        ends = counts.cumsum(0, dtype=torch.int32)
        gate = F.grouped_mm(x, self.gate_proj.transpose(-2, -1), offs=ends)
        up = F.grouped_mm(x, self.up_proj.transpose(-2, -1), offs=ends)
        return F.grouped_mm(F.silu(gate) * up, self.down_proj.transpose(-2, -1), offs=ends)


class Mixture(nn.Module):
    """A mixture of experts: (b, n, hidden) to (b, n, hidden)."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.router = Router(config)
        self.order = TokenOrder(config)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, rows, counts = self.order(*self.router(tokens))
        results = self.experts(tokens[rows], counts) * weights.unsqueeze(-1)
        return torch.zeros_like(tokens).index_add(0, rows, results).view_as(x)


class Block(nn.Module):
    """A pre-norm transformer layer: (b, n, hidden) to (b, n, hidden)."""

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = Mixture(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, *cache: KVCache) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, *cache)
        return x + self.mlp(self.post_attention_layernorm(x))


# As in torchtitan: all ranks route all tokens, and their parts of the experts' results are summed at the mixture's end.
_STYLES = {
    **ATTENTION_STYLES,
    "layers.*.mlp": "mixture",
    "layers.*.mlp.router.gate": "partial_gradient",
    "layers.*.mlp.experts": "grouped_experts",
}


class Mixtral(Llama):
    """A Mixtral of any size.

    Parameters of the released checkpoint and parameters that a token uses, which are its multiply-adds in linear layers
    besides the embedding and the norms. Attention adds 2 * layers * hidden_size for each of the n positions, without a
    discount for the causal half.

        Mixtral-8x7B     46,702,792,704    used by a token 12,879,925,248    multiply-adds 12,748,587,008

    of which one layer has 41,943,040 in attention (4096 * (2 * 4096 + 2 * 1024)), 32,768 in the router (8 * 4096),
    176,160,768 in each expert (3 * 4096 * 14336), and 8,192 in norms; the embedding and the head have 131,072,000 each
    (32000 * 4096), and the last norm 4,096.

    Arguments and result are as for Llama; only the layers differ.

    >>> with torch.device("meta"):
    ...     model = Mixtral(CONFIGS["mixtral_8x7b"])
    >>> sum(p.numel() for p in model.parameters())
    46702792704
    """

    block = Block
    zoo_parallelism = Llama.zoo_parallelism._replace(
        tensor=_STYLES, sequence=change_styles(_STYLES, OVER_SEQUENCE, NORMS), mixtures="layers.*.mlp"
    )
