"""GPT-2, a decoder-only transformer language model.

Published in Radford et al., "Language Models are Unsupervised Multitask Learners" (OpenAI, 2019; its table 2
states 117M for the smallest, which OpenAI's repository corrects to 124M). The `transformer_sizing` notebook of
nanoGPT gives the cost: 291,648,307,200 FLOPs for a forward pass over 1024 tokens, with two per multiply-add.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fvflops.zoo.decoder_parts import Decoded, KVCache, Parallelism, initialise


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config:
    """Sizes of a GPT-2; the defaults are the 124M model's."""

    vocab_size: int = 50257
    positions: int = 1024
    width: int = 768
    layers: int = 12
    heads: int = 12
    dropout: float = 0.1
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise ValueError(f"{self}: heads must divide width")


GPT2_124M = GPT2Config()


class Attention(nn.Module):
    """Causal self-attention: (b, n, width) to (b, n, width)."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.width, 3 * config.width)
        self.c_proj = nn.Linear(config.width, config.width)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, cache: KVCache | None = None) -> Tensor:
        q, k, v = self.c_attn(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if cache is not None:
            k, v = cache.extend(self, k, v)
        dropout = self.dropout if self.training else 0.0
        causal = cache is None or q.shape[2] > 1
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=causal)
        return self.resid_dropout(self.c_proj(out.transpose(1, 2).flatten(2)))


class MLP(nn.Module):
    """Two linears around a GELU, four times as wide inside: (b, n, width) to (b, n, width)."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.c_fc = nn.Linear(config.width, 4 * config.width)
        self.act = nn.GELU(approximate="tanh")
        self.c_proj = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.act(self.c_fc(x))))


class Block(nn.Module):
    """A pre-norm transformer layer: (b, n, width) to (b, n, width)."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, *cache: KVCache) -> Tensor:
        x = x + self.attn(self.ln_1(x), *cache)
        return x + self.mlp(self.ln_2(x))


class GPT2(nn.Module):
    """GPT-2 124M: 124,439,808 parameters, 145,824,153,600 multiply-adds on 1024 tokens.

    Of these 19,327,352,832 are the two products of attention, without a discount for the causal half.
    The head shares the embedding's weight. Parameters are named as in transformers, without the prefix `transformer.`.
    Takes token ids (b, n), returns logits (b, n, vocab_size); raises ValueError for more tokens than positions. With
    `use_cache` it returns Decoded, with the KV cache for `past_key_values` of the next call, which takes one token;
    `logits_to_keep` computes the logits of as many last positions.

    >>> with torch.device("meta"):
    ...     model = GPT2()
    >>> sum(p.numel() for p in model.parameters())
    124439808
    """

    zoo_parallelism = Parallelism(
        {
            # The first third of each rank's rows are queries, then keys, then values: the weight's rows are permuted.
            "h.*.attn.c_attn": "colwise",
            "h.*.attn.c_proj": "rowwise",
            "h.*.mlp.c_fc": "colwise",
            "h.*.mlp.c_proj": "rowwise",
        },
        divided=("h.*.attn.heads",),
    )

    def __init__(self, config: GPT2Config = GPT2_124M) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.width)
        self.wpe = nn.Embedding(config.positions, config.width)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.lm_head.weight = self.wte.weight
        self.apply(initialise)

    def forward(
        self, tokens: Tensor, past_key_values: KVCache | None = None, use_cache: bool = False, logits_to_keep: int = 0
    ) -> Tensor | Decoded:
        # torch.fx passes proxies for all arguments.
        cache = (past_key_values or KVCache(),) if use_cache is True else ()
        first = cache[0].length if cache else 0
        n = first + tokens.shape[1]
        if n > self.config.positions:
            raise ValueError(
                f"tokens of shape {tuple(tokens.shape)} exceed this GPT-2's context length, {self.config.positions}"
            )
        x = self.drop(self.wte(tokens) + self.wpe(torch.arange(first, n, device=tokens.device)))
        for block in self.h:
            x = block(x, *cache)
        x = self.ln_f(x)
        logits = self.lm_head(x[:, -logits_to_keep:] if cache and logits_to_keep else x)
        return Decoded(logits, *cache) if cache else logits
