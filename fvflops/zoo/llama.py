"""Llama, a decoder-only transformer language model with rotary position embeddings and grouped-query attention.

Published in Touvron et al., "Llama 2" (arXiv:2307.09288), and Grattafiori et al., "The Llama 3 Herd of
Models" (arXiv:2407.21783: sizes in table 3; section 1 states 3.8e25 FLOPs for training the 405B on 15.6T
tokens, which is six times parameters times tokens). Llama 3.1 rescales the rotary frequencies for its 128K
context: that does not change the cost, and is not implemented.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fvflops.zoo.decoder_parts import OVER_SEQUENCE, Decoded, KVCache, Parallelism, change_styles, initialise


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes of a Llama; `heads` are the queries' heads, `kv_heads` the heads of keys and values."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.hidden_size % (2 * self.heads):
            raise ValueError(f"{self}: hidden_size must be an even multiple of heads")
        if self.heads % self.kv_heads:
            raise ValueError(f"{self}: kv_heads must divide heads")

    @property
    def head_size(self) -> int:
        """The width of one head."""
        return self.hidden_size // self.heads


_LLAMA3 = partial(LlamaConfig, vocab_size=128_256, kv_heads=8, rope_theta=500_000.0)
CONFIGS = {
    "llama2_7b": LlamaConfig(
        vocab_size=32_000, hidden_size=4096, intermediate_size=11_008, layers=32, heads=32, kv_heads=32
    ),
    "llama3_8b": _LLAMA3(hidden_size=4096, intermediate_size=14_336, layers=32, heads=32),
    "llama3_70b": _LLAMA3(hidden_size=8192, intermediate_size=28_672, layers=80, heads=64),
    "llama3_405b": _LLAMA3(hidden_size=16_384, intermediate_size=53_248, layers=126, heads=128),
    "llama_tiny": LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=176, layers=2, heads=4, kv_heads=2),
}


class Attention(nn.Module):
    """Causal grouped-query self-attention: (b, n, hidden) to (b, n, hidden)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.grouped = config.kv_heads != config.heads
        kv_size = config.kv_heads * config.head_size
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None = None) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)  # (b, heads, n, head_size)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if cache is not None:
            k, v = cache.extend(self, k, v)
        causal = cache is None or q.shape[2] > 1
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=self.grouped)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU, three linears and a gate: (b, n, hidden) to (b, n, hidden)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """A pre-norm transformer layer: (b, n, hidden) to (b, n, hidden)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, *cache: KVCache) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, *cache)
        return x + self.mlp(self.post_attention_layernorm(x))


ATTENTION_STYLES = {
    "embed_tokens": "embedding_rowwise",
    # One replicated input for all projections, so that their input gradients are reduced together.
    "layers.*.self_attn": "replicated_input",
    "layers.*.self_attn.q_proj": "colwise",
    "layers.*.self_attn.k_proj": "colwise",
    "layers.*.self_attn.v_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "lm_head": "colwise_gather_output",
}
_STYLES = {
    **ATTENTION_STYLES,
    "layers.*.mlp": "replicated_input",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
}
NORMS = ("layers.*.input_layernorm", "layers.*.post_attention_layernorm", "norm")


class Llama(nn.Module):
    """A Llama of any size.

    Parameters of the released checkpoints, and multiply-adds per token in the linear layers. Attention adds
    2 * layers * hidden_size for each of the n positions, without a discount for the causal half.

        Llama-2-7B          6,738,415,616      6,607,077,376
        Llama-3-8B          8,030,261,248      7,504,658,432
        Llama-3-70B        70,553,706,496     69,501,714,432
        Llama-3.1-405B    405,853,388,800    403,747,897,344

    Takes token ids (b, n), returns logits (b, n, vocab_size). Parameters are named as in transformers, without the
    prefix `model.`. A pipeline stage without the embedding takes a hidden state (b, n, hidden_size), and where that is
    a part of the sequence, the `length` of the whole. With `use_cache` it returns Decoded, with the KV cache for
    `past_key_values` of the next call, which takes one token; `logits_to_keep` computes the logits of as many last
    positions.

    >>> with torch.device("meta"):
    ...     model = Llama(CONFIGS["llama2_7b"])
    >>> sum(p.numel() for p in model.parameters())
    6738415616
    """

    block: Callable[[Any], nn.Module] = Block
    zoo_parallelism = Parallelism(
        _STYLES,
        change_styles(_STYLES, OVER_SEQUENCE, NORMS),
        stages=(("embed_tokens",), "layers", ("norm", "lm_head"), "tokens", "tokens", "length"),
    )

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(type(self).block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.apply(initialise)

    def forward(
        self,
        tokens: Tensor,
        length: int | None = None,
        past_key_values: KVCache | None = None,
        use_cache: bool = False,
        logits_to_keep: int = 0,
    ) -> Tensor | Decoded:
        # torch.fx passes proxies for all arguments.
        cache = (past_key_values or KVCache(),) if use_cache is True else ()
        first = cache[0].length if cache else 0
        x = self.embed_tokens(tokens)
        n = length if isinstance(length, int) else tokens.shape[1]
        cos, sin = compute_rotary(n, self.config, like=x, first=first)
        for block in self.layers:
            x = block(x, cos, sin, *cache)
        x = self.norm(x)
        logits = self.lm_head(x[:, -logits_to_keep:] if cache and logits_to_keep else x)
        return Decoded(logits, *cache) if cache else logits


def compute_rotary(n: int, config: LlamaConfig, *, like: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """Compute the cosines and sines of the angles of n positions from `first` on, each (n, head_size), as `like`.

    The angles are computed in float32: bfloat16 cannot distinguish position 257 from 256.
    """
    powers = torch.arange(0, config.head_size, 2, dtype=torch.float32, device=like.device) / config.head_size
    positions = torch.arange(first, n + first if first else n, dtype=torch.float32, device=like.device)
    angles = torch.outer(positions, config.rope_theta**-powers).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + head_size/2) of x (b, heads, n, head_size) by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
