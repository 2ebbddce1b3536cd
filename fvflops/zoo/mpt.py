"""MPT, a decoder-only transformer language model of MosaicML, as its training throughput is published.

Sizes, parameters and throughput are from llm-foundry's tables of training under FSDP (scripts/train/benchmarking):
learned positions, fused projection of queries, keys and values, flash attention, LayerNorm in the low precision of
autocast, biases, tied embeddings, no dropout. The released MPT-7B and MPT-30B have no biases, and ALiBi instead of
learned positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fvflops.zoo.decoder_parts import (
    OVER_SEQUENCE,
    DividedCrossEntropy,
    Parallelism,
    VocabularyCrossEntropy,
    change_styles,
    check_positions,
    initialise,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MPTConfig:
    """Sizes of an MPT."""

    vocab_size: int = 50_368
    positions: int = 2048
    hidden_size: int
    layers: int
    heads: int
    bias: bool = True
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads:
            raise ValueError(f"{self}: heads must divide hidden_size")


CONFIGS = {
    "mpt_125m": MPTConfig(hidden_size=768, layers=12, heads=12),
    "mpt_350m": MPTConfig(hidden_size=1024, layers=24, heads=16),
    "mpt_760m": MPTConfig(hidden_size=1536, layers=24, heads=12),
    "mpt_1b": MPTConfig(hidden_size=2048, layers=24, heads=16),
    "mpt_3b": MPTConfig(hidden_size=2560, layers=32, heads=20),
    "mpt_7b": MPTConfig(hidden_size=4096, layers=32, heads=32),
    "mpt_13b": MPTConfig(hidden_size=5120, layers=40, heads=40),
    "mpt_30b": MPTConfig(hidden_size=7168, layers=48, heads=56),
    "mpt_70b": MPTConfig(hidden_size=8192, layers=80, heads=64),
    "mpt_tiny": MPTConfig(vocab_size=256, positions=16, hidden_size=64, layers=2, heads=4),
}


class LowPrecisionLayerNorm(nn.LayerNorm):
    """LayerNorm that stays in autocast's dtype, where autocast itself would choose float32."""

    def forward(self, x: Tensor) -> Tensor:
        device = x.device.type
        if device == "meta" or not torch.is_autocast_enabled(device):
            return super().forward(x)
        dtype = torch.get_autocast_dtype(device)
        weight, bias = (None if parameter is None else parameter.to(dtype) for parameter in (self.weight, self.bias))
        with torch.autocast(device, enabled=False):
            return F.layer_norm(x.to(dtype), self.normalized_shape, weight, bias, self.eps)


class Attention(nn.Module):
    """Causal self-attention: (b, n, hidden) to (b, n, hidden)."""

    def __init__(self, config: MPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.Wqkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=config.bias)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.Wqkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linears around a GELU, four times as wide inside: (b, n, hidden) to (b, n, hidden)."""

    def __init__(self, config: MPTConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, 4 * config.hidden_size, bias=config.bias)
        self.down_proj = nn.Linear(4 * config.hidden_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x)))


class Block(nn.Module):
    """A pre-norm transformer layer: (b, n, hidden) to (b, n, hidden)."""

    def __init__(self, config: MPTConfig) -> None:
        super().__init__()
        self.norm_1 = LowPrecisionLayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.bias)
        self.attn = Attention(config)
        self.norm_2 = LowPrecisionLayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.bias)
        self.ffn = MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm_1(x))
        return x + self.ffn(self.norm_2(x))


class Embedding(nn.Module):
    """Token and position embeddings: (b, n) to (b, n, hidden)."""

    def __init__(self, config: MPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.hidden_size)
        self.wpe = nn.Embedding(config.positions, config.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))


class CrossEntropy(DividedCrossEntropy):
    """Mean cross entropy in float32 of logits (b, n, vocabulary) and labels (b, n); labels of -100 are ignored."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.group is None:
            return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)
        ignored = labels == -100
        losses: Tensor = VocabularyCrossEntropy.apply(logits, labels.clamp(min=0), self.first, self.group)
        return losses.masked_fill(ignored, 0).sum() / ignored.logical_not().sum()


# Classes whose ops are one kernel in training, forward and backward each: flash-attention's cross entropy.
FUSED: tuple[type[nn.Module], ...] = (CrossEntropy,)


class Head(nn.Module):
    """The last norm, the output layer and the loss: (b, n, hidden) to logits (b, n, vocabulary), or to the loss."""

    def __init__(self, config: MPTConfig) -> None:
        super().__init__()
        self.norm_f = LowPrecisionLayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.bias)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.loss = CrossEntropy(config.vocab_size)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.lm_head(self.norm_f(x))
        return logits if labels is None else self.loss(logits, labels)


_STYLES = {
    "embedding.wte": "embedding_rowwise",
    # As in GPT-2, each rank's rows are its queries, then its keys, then its values.
    "blocks.*.attn.Wqkv": "colwise",
    "blocks.*.attn.out_proj": "rowwise",
    "blocks.*.ffn.up_proj": "colwise",
    "blocks.*.ffn.down_proj": "rowwise",
    "head.lm_head": "colwise",
    "head.loss": "colwise_loss",
}
_NORMS = ("blocks.*.norm_1", "blocks.*.norm_2", "head.norm_f")


class MPT(nn.Module):
    """An MPT of any size.

    Parameters, and multiply-adds per token in the linear layers, with a vocabulary of 50,368 and 2048 positions:
    12 layers * hidden^2 + 13 layers * hidden + (vocabulary + positions + 2) hidden, and
    12 layers * hidden^2 + vocabulary * hidden. Attention adds 2 * layers * hidden for each of the n positions, without
    a discount for the causal half.

        125M         125,311,488        123,617,280
        350M         355,985,408        353,566,720
        760M         760,470,528        756,842,496
        1B         1,315,950,592      1,311,113,216
        3B         2,651,837,440      2,645,524,480
        7B         6,658,859,008      6,648,758,272
        13B       12,853,954,560     12,840,796,160
        30B       29,975,214,080     29,956,046,848
        70B       64,862,437,376     64,837,124,096

    Takes token ids (b, n) and returns logits (b, n, vocabulary), or with `labels` (b, n), the token after each, the
    mean cross entropy in float32. Output layer and token embedding share their weight. Raises ValueError for more
    tokens than positions.

    >>> with torch.device("meta"):
    ...     model = MPT(CONFIGS["mpt_7b"])
    >>> sum(p.numel() for p in model.parameters())
    6658859008
    """

    zoo_parallelism = Parallelism(
        _STYLES,
        {
            **change_styles(_STYLES, {**OVER_SEQUENCE, "colwise": "colwise_of_sequence"}, _NORMS),
            "embedding.wpe": "replicated_to_first",
        },
        divided=("blocks.*.attn.heads",),
        stages=(("embedding",), "blocks", ("head",), "tokens", "tokens", "", ("labels",)),
    )

    def __init__(self, config: MPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = Head(config)
        self.head.lm_head.weight = self.embedding.wte.weight
        self.apply(initialise)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        check_positions(tokens, self.config.positions, "MPT")
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x) if labels is None else self.head(x, labels)
