"""GPT as Megatron-LM and Megatron-DeepSpeed train it, with attention that writes its scores to memory.

Published in Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM"
(arXiv:2104.04473: sizes in table 1, parameters in its equation 2); the split between ranks is from Shoeybi et al.,
"Megatron-LM" (arXiv:1909.08053), and Korthikanti et al., "Reducing Activation Recomputation in Large Transformer
Models" (arXiv:2205.05198). Hidden states have the sequence first, (n, b, hidden), as there.

Modules of the classes in `FUSED` are one kernel forward and one backward in Megatron; here they are ordinary torch ops.
Scores are not scaled by the layer's number, which Megatron does in float16 and undoes in the softmax: no cost depends
on it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fvflops.zoo.decoder_parts import (
    DividedCrossEntropy,
    Parallelism,
    VocabularyCrossEntropy,
    change_styles,
    check_positions,
    initialise,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronGPTConfig:
    """Sizes of a Megatron GPT.

    The vocabulary is padded to a multiple of `vocab_multiple`; Megatron's is 128 times the tensor-parallel size.
    """

    vocab_size: int = 51_200
    positions: int = 2048
    hidden_size: int
    layers: int
    heads: int
    vocab_multiple: int = 1
    hidden_dropout: float = 0.1
    attention_dropout: float = 0.1
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.hidden_size % self.heads:
            raise ValueError(f"{self}: heads must divide hidden_size")
        if self.vocab_multiple < 1:
            raise ValueError(f"{self}: vocab_multiple must be at least 1")

    @property
    def padded_vocab_size(self) -> int:
        """The number of rows of the embedding.

        >>> sizes = {"hidden_size": 64, "layers": 1, "heads": 4}
        >>> MegatronGPTConfig(vocab_size=50_257, vocab_multiple=1024, **sizes).padded_vocab_size
        51200
        """
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


CONFIGS = {
    "megatron_gpt_1_7b": MegatronGPTConfig(hidden_size=2304, layers=24, heads=24),
    "megatron_gpt_3_6b": MegatronGPTConfig(hidden_size=3072, layers=30, heads=32),
    "megatron_gpt_7_5b": MegatronGPTConfig(hidden_size=4096, layers=36, heads=32),
    "megatron_gpt_18b": MegatronGPTConfig(hidden_size=6144, layers=40, heads=48),
    "megatron_gpt_39b": MegatronGPTConfig(hidden_size=8192, layers=48, heads=64),
    "megatron_gpt_146b": MegatronGPTConfig(hidden_size=12_288, layers=80, heads=96),
    "megatron_gpt_175b": MegatronGPTConfig(hidden_size=12_288, layers=96, heads=96),
    "megatron_gpt_530b": MegatronGPTConfig(hidden_size=20_480, layers=105, heads=128),
    "megatron_gpt_tiny": MegatronGPTConfig(vocab_size=256, positions=16, hidden_size=64, layers=2, heads=4),
}


class MaskedSoftmax(nn.Module):
    """Causal softmax over the last dimension of scores (..., n, n), which it overwrites."""

    def forward(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        future = torch.ones(n, n, dtype=torch.bool, device=scores.device).triu_(1)
        # Detached: the gradient of softmax is zero where its result is, so autograd need not keep the mask.
        scores.detach().masked_fill_(future, float("-inf"))
        return scores.softmax(-1)


class UnfusedMaskedSoftmax(nn.Module):
    """The same in float32 by separate ops, for scores that Megatron's kernel does not support: `has_softmax_kernel`."""

    def forward(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        future = torch.ones(n, n, dtype=torch.bool, device=scores.device).triu_(1)
        return scores.float().masked_fill(future, -10_000.0).softmax(-1).to(scores.dtype)


def has_softmax_kernel(n: int, matrices: int) -> bool:
    """Return whether Megatron's fused softmax supports `matrices` causal score matrices of n rows.

    Source: FusedScaleMaskSoftmax.is_kernel_available in Megatron-LM's fused_softmax.py, for n above 128.

    >>> has_softmax_kernel(1024, 16), has_softmax_kernel(1024, 2), has_softmax_kernel(4096, 16)
    (True, False, False)
    """
    return 16 < n <= 2048 and n % 4 == 0 and matrices % 4 == 0


class BiasGelu(nn.Module):
    """A bias, then GELU in its tanh form: (..., size) to (..., size)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x + self.bias, approximate="tanh")


class BiasDropoutAdd(nn.Module):
    """A bias, then dropout, then the residual: (..., size) to (..., size)."""

    def __init__(self, size: int, dropout: float) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        return residual + self.dropout(x + self.bias)


# Classes whose ops are one kernel in Megatron, forward and backward each.
FUSED: tuple[type[nn.Module], ...] = (MaskedSoftmax, BiasGelu, BiasDropoutAdd)


class CoreAttention(nn.Module):
    """Attention of queries, keys and values, each (n, b, heads, head_size): (n, b, heads * head_size).

    Selective recomputation recomputes this module.
    """

    def __init__(self, config: MegatronGPTConfig) -> None:
        super().__init__()
        self.softmax = MaskedSoftmax()
        self.unfused_softmax = UnfusedMaskedSoftmax()
        self.dropout = nn.Dropout(config.attention_dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, b, heads, head_size = q.shape
        q, k, v = (x.reshape(n, b * heads, head_size).transpose(0, 1) for x in (q, k, v))
        scores = torch.empty(b * heads, n, n, dtype=q.dtype, device=q.device)
        scores = torch.baddbmm(scores, q, k.transpose(1, 2), beta=0, alpha=head_size**-0.5)
        softmax = self.softmax if has_softmax_kernel(n, b * heads) else self.unfused_softmax
        out = torch.bmm(self.dropout(softmax(scores)), v)
        return out.unflatten(0, (b, heads)).permute(2, 0, 1, 3).flatten(2)


class SelfAttention(nn.Module):
    """Causal self-attention without the last bias: (n, b, hidden) to (n, b, hidden).

    The rows of `query_key_value` are each head's queries, keys and values, head after head.
    """

    def __init__(self, config: MegatronGPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query_key_value = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.core_attention = CoreAttention(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.query_key_value(x).unflatten(-1, (self.heads, -1)).chunk(3, dim=-1)
        return self.dense(self.core_attention(q, k, v))


class MLP(nn.Module):
    """Two linears around a GELU, without the last bias, four times as wide: (n, b, hidden) to (n, b, hidden)."""

    def __init__(self, config: MegatronGPTConfig) -> None:
        super().__init__()
        self.dense_h_to_4h = nn.Linear(config.hidden_size, 4 * config.hidden_size, bias=False)
        self.bias_gelu = BiasGelu(4 * config.hidden_size)
        self.dense_4h_to_h = nn.Linear(4 * config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense_4h_to_h(self.bias_gelu(self.dense_h_to_4h(x)))


class Block(nn.Module):
    """A pre-norm transformer layer: (n, b, hidden) to (n, b, hidden)."""

    def __init__(self, config: MegatronGPTConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attention = SelfAttention(config)
        self.attention_residual = BiasDropoutAdd(config.hidden_size, config.hidden_dropout)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config)
        self.mlp_residual = BiasDropoutAdd(config.hidden_size, config.hidden_dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention_residual(self.self_attention(self.input_layernorm(x)), x)
        return self.mlp_residual(self.mlp(self.post_attention_layernorm(x)), x)


class Embedding(nn.Module):
    """Token and position embeddings: (b, n) to (n, b, hidden)."""

    def __init__(self, config: MegatronGPTConfig) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(config.padded_vocab_size, config.hidden_size)
        self.position_embeddings = nn.Embedding(config.positions, config.hidden_size)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.word_embeddings(tokens) + self.position_embeddings(positions)
        return x.transpose(0, 1).contiguous()


class CrossEntropy(DividedCrossEntropy):
    """Mean cross entropy in float32 of logits (n, b, vocabulary) and labels (b, n)."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        losses: Tensor = VocabularyCrossEntropy.apply(logits, labels.T.contiguous(), self.first, self.group)
        return losses.mean()


class Head(nn.Module):
    """The last norm, the output layer and the loss: (n, b, hidden) to logits (b, n, vocabulary), or to the loss."""

    def __init__(self, config: MegatronGPTConfig) -> None:
        super().__init__()
        self.final_layernorm = nn.LayerNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.padded_vocab_size, bias=False)
        self.loss = CrossEntropy(config.padded_vocab_size)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        logits = self.lm_head(self.final_layernorm(x))
        return logits.transpose(0, 1) if labels is None else self.loss(logits, labels)


_STYLES = {
    "embedding.word_embeddings": "embedding_rowwise",
    "layers.*.self_attention.query_key_value": "colwise",
    "layers.*.self_attention.dense": "rowwise",
    "layers.*.mlp.dense_h_to_4h": "colwise",
    "layers.*.mlp.bias_gelu": "colwise_bias",
    "layers.*.mlp.dense_4h_to_h": "rowwise",
    # The logits stay divided by the vocabulary, also where they are the model's result.
    "head.lm_head": "colwise",
    "head.loss": "colwise_loss",
}


class MegatronGPT(nn.Module):
    """A Megatron GPT of any size.

    Parameters, and multiply-adds per token in the linear layers, with a vocabulary of 51,200 and 2048 positions:
    12 layers * hidden^2 + 13 layers * hidden + (vocabulary + positions + 2) hidden, and
    12 layers * hidden^2 + vocabulary * hidden. Attention adds 2 * layers * hidden for each of the n positions.

        1.7B          1,652,230,656      1,646,788,608
        3.6B          3,562,168,320      3,554,672,640
        7.5B          7,467,786,240      7,457,472,512
        18.4B        18,449,756,160     18,433,966,080
        39.1B        39,096,041,472     39,074,136,064
        145.6B      145,622,261,760    145,584,291,840
        175B        174,615,846,912    174,575,321,088
        530B        529,600,819,200    529,530,880,000

    Takes token ids (b, n) and returns logits (b, n, vocabulary), or with `labels` (b, n), the token after each, the
    mean cross entropy in float32. Output layer and token embedding share their weight. Raises ValueError for more
    tokens than positions.

    >>> with torch.device("meta"):
    ...     model = MegatronGPT(CONFIGS["megatron_gpt_1_7b"])
    >>> sum(p.numel() for p in model.parameters())
    1652230656
    """

    zoo_parallelism = Parallelism(
        _STYLES,
        {
            **change_styles(_STYLES, {"colwise": "colwise_of_first", "rowwise": "rowwise_to_first"}, ()),
            "embedding": "replicated_to_first",
            "layers.*.input_layernorm": "first_parallel",
            "layers.*.attention_residual": "first_parallel_bias",
            "layers.*.attention_residual.dropout": "local_input",
            "layers.*.post_attention_layernorm": "first_parallel",
            "layers.*.mlp_residual": "first_parallel_bias",
            "layers.*.mlp_residual.dropout": "local_input",
            "head.final_layernorm": "first_parallel",
        },
        divided=("layers.*.self_attention.heads",),
        stages=(("embedding", "embedding_dropout"), "layers", ("head",), "tokens", "tokens", "", ("labels",)),
    )

    def __init__(self, config: MegatronGPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config)
        self.embedding_dropout = nn.Dropout(config.hidden_dropout)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = Head(config)
        self.head.lm_head.weight = self.embedding.word_embeddings.weight
        self.apply(initialise)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        check_positions(tokens, self.config.positions, "GPT")
        x = self.embedding_dropout(self.embedding(tokens))
        for block in self.layers:
            x = block(x)
        return self.head(x) if labels is None else self.head(x, labels)
