"""Llama as training runs have it: with its loss, and kernels that are not fused or flash attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fvflops.zoo import llama, mpt
from fvflops.zoo.decoder_parts import OVER_SEQUENCE, change_styles
from fvflops.zoo.megatron_gpt import MaskedSoftmax

ATTENTIONS = ("flash", "fused_softmax", "separate_ops")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLlamaConfig(llama.LlamaConfig):
    """Sizes of a Llama, its kernels of attention (of `ATTENTIONS`) and norms, and the kind of its MLP.

    With `gated` false the MLP has two linears around a squared ReLU, as Nemotron's. With `gathers_logits` the ranks of
    tp gather the logits, and each computes the whole loss.
    """

    attention: str = "flash"
    fused_norms: bool = True
    gated: bool = True
    gathers_logits: bool = False

    def __post_init__(self) -> None:
        llama.LlamaConfig.__post_init__(self)
        if self.attention not in ATTENTIONS:
            raise ValueError(f"attention {self.attention!r} is none of {', '.join(ATTENTIONS)}")


class SeparateRMSNorm(nn.RMSNorm):
    """RMSNorm in float32 by separate ops."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normalised = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + (self.eps or 0.0))
        return self.weight * normalised.to(x.dtype)


class SeparateMaskedSoftmax(nn.Module):
    """A causal softmax in the dtype of the scores by separate ops, as MaskedSoftmaxTorch of Aleph-Alpha/scaling."""

    def forward(self, scores: Tensor) -> Tensor:
        n = scores.shape[-1]
        future = torch.ones(n, n, dtype=torch.bool, device=scores.device).triu_(1)
        return scores.clone().masked_fill_(future, -10_000.0).softmax(-1)


class ScoredAttention(llama.Attention):
    """Attention that writes its scores to memory; as many heads of keys as of queries."""

    def __init__(self, config: MeasuredLlamaConfig) -> None:
        super().__init__(config)
        self.softmax = MaskedSoftmax() if config.attention == "fused_softmax" else SeparateMaskedSoftmax()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Any = None) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = llama.rotate(q, cos, sin), llama.rotate(k, cos, sin)
        b, heads, n, _ = q.shape
        q, k, v = (part.flatten(0, 1) for part in (q, k, v))
        scores = torch.empty(b * heads, n, n, dtype=q.dtype, device=q.device)
        scores = torch.baddbmm(scores, q, k.transpose(1, 2), beta=0, alpha=self.head_size**-0.5)
        out = torch.bmm(self.softmax(scores), v).unflatten(0, (b, heads))
        return self.o_proj(out.transpose(1, 2).flatten(2))


class SquaredReLU(nn.Module):
    """The square of ReLU."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


class PlainMLP(nn.Module):
    """Two linears around a squared ReLU: (b, n, hidden) to (b, n, hidden)."""

    def __init__(self, config: MeasuredLlamaConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.activation = SquaredReLU()
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.activation(self.up_proj(x)))


class MeasuredBlock(llama.Block):
    """A layer with the modules that its config names."""

    def __init__(self, config: MeasuredLlamaConfig) -> None:
        super().__init__(config)
        if config.attention != "flash":
            self.self_attn = ScoredAttention(config)
        if not config.fused_norms:
            self.input_layernorm = SeparateRMSNorm(config.hidden_size, eps=config.norm_eps)
            self.post_attention_layernorm = SeparateRMSNorm(config.hidden_size, eps=config.norm_eps)
        if not config.gated:
            self.mlp = PlainMLP(config)  # type: ignore[assignment]


# Classes whose ops are one kernel, forward and backward each, in all runs that have them.
FUSED: tuple[type[nn.Module], ...] = (MaskedSoftmax, SquaredReLU)
_STYLES = {
    **{name: style for name, style in llama._STYLES.items() if name != "lm_head"},
    "lm_head": "colwise",
    "loss": "colwise_loss",
}
_PLAIN = {name: style for name, style in _STYLES.items() if not name.endswith("gate_proj")}
_OVER_SEQUENCE = {**OVER_SEQUENCE, "colwise": "colwise"}


class MeasuredLlama(llama.Llama):
    """A Llama that returns the mean cross entropy with `labels`, over a vocabulary that tensor parallelism divides."""

    block: Callable[[Any], nn.Module] = MeasuredBlock
    zoo_parallelism = llama.Llama.zoo_parallelism._replace(
        tensor=_STYLES,
        sequence={**change_styles(_STYLES, _OVER_SEQUENCE, llama.NORMS), "lm_head": "colwise_of_sequence"},
        stages=(("embed_tokens",), "layers", ("norm", "lm_head", "loss"), "tokens", "tokens", "length", ("labels",)),
    )

    def __init__(self, config: MeasuredLlamaConfig) -> None:
        super().__init__(config)
        self.loss = mpt.CrossEntropy(config.vocab_size)

    def forward(  # type: ignore[override]
        self, tokens: Tensor, labels: Tensor | None = None, length: int | None = None
    ) -> Tensor:
        logits: Tensor = super().forward(tokens, length)  # type: ignore[assignment]
        return logits if labels is None else self.loss(logits, labels)


class PlainLlama(MeasuredLlama):
    """A MeasuredLlama without gates."""

    zoo_parallelism = MeasuredLlama.zoo_parallelism._replace(
        tensor=_PLAIN,
        sequence={
            name: style
            for name, style in (MeasuredLlama.zoo_parallelism.sequence or {}).items()
            if not name.endswith("gate_proj")
        },
    )


class GatheringLlama(MeasuredLlama):
    """A MeasuredLlama whose ranks of tp have all logits."""

    zoo_parallelism = MeasuredLlama.zoo_parallelism._replace(
        tensor=llama.Llama.zoo_parallelism.tensor, sequence=llama.Llama.zoo_parallelism.sequence
    )


def build_llama(config: MeasuredLlamaConfig) -> MeasuredLlama:
    if config.gathers_logits:
        return GatheringLlama(config)
    return (MeasuredLlama if config.gated else PlainLlama)(config)
