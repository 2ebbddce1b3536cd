"""The attention: its two products forward and five backward, and the fused layers that hold one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import zip_longest

from fvflops.formulas.call import Call
from fvflops.formulas.cost import Cost
from fvflops.trace import TensorSpec


@dataclass(frozen=True, slots=True)
class Heads:
    """The sizes of an attention: `pairs` are batch * query heads * queries * keys, D and Dv the sizes of a head.

    `rows` are batch * query heads * queries.
    """

    rows: int
    pairs: int
    D: int
    Dv: int


def count_attention(call: Call) -> Cost:
    """Return the cost of an attention: QK^T and the product with V, pairs * (D + Dv).

    Dense: a causal or other mask saves nothing here, and grouped keys (GQA) count for every query head. Query
    [..., Hq, Q, D], key [..., Hk, K, D], value [..., Hk, K, Dv]. Activations are those of the two products. Takes
    aten::scaled_dot_product_attention, its kernels, and flex_attention. Source: arXiv:1706.03762, section 3.2.1.

    >>> spec = TensorSpec((1, 2, 3, 4))
    >>> count_attention(Call("attention", {"query": spec, "key": spec, "value": spec}, (spec,))).macs
    144
    """
    return _forward(_heads_first(call))


def count_attention_backward(call: Call) -> Cost:
    """Return the cost of a fused attention's backward: pairs * (3 * D + 2 * Dv).

    Five products: the scores again (they were not kept), then the gradients of V, of the weights, of Q and of K.
    Source: algorithm 4 of arXiv:2205.14135 (FlashAttention), which torch's flash, efficient, cuDNN and CPU kernels
    follow.
    """
    return _backward(_heads_first(call))


def count_attention_bshd(call: Call) -> Cost:
    """Return the cost of an attention on [B, Q, H, D] tensors, or on packed [total, H, D] ones, as `count_attention`.

    A packed batch does not say its lengths here: each sequence counts as the longest, `max_q` by `max_k`. Takes
    aten::_flash_attention_forward and _efficient_attention_forward.
    """
    return _forward(_heads_third(call))


def count_attention_bshd_backward(call: Call) -> Cost:
    """Return the cost of the backward of `count_attention_bshd`, as `count_attention_backward`."""
    return _backward(_heads_third(call))


def count_multi_head_attention(call: Call) -> Cost:
    """Return the cost of a fused multi-head attention: four projections and the attention between them.

    Query [B, Q, E], key and value [B, K, E], weights [3E, E] and [E, E]. Takes aten::_native_multi_head_attention.
    """
    query, key = call.shape("query"), call.shape("key")
    return _multi_head(query, key, _number(call, "num_head"))


def count_encoder_layer(call: Call) -> Cost:
    """Return the cost of a fused encoder layer: its multi-head attention, two linears and two layer norms.

    The norms have 5 flops an element, as fvcore's layer_norm with weights. Source [B, Q, E], feed-forward weight
    [F, E]. Takes aten::_transformer_encoder_layer_fwd.
    """
    source = call.shape("src")
    attention = _multi_head(source, source, _number(call, "num_heads"))
    tokens, width = math.prod(source[:-1]), source[-1]
    hidden = call.shape("ffn_weight_1")[0]
    return Cost(
        macs=attention.macs + 2 * tokens * width * hidden,
        flops=2 * 5 * tokens * width,
        activations=(attention.activations or 0) + tokens * (hidden + width),
    )


def _forward(heads: Heads) -> Cost:
    return Cost(macs=heads.pairs * (heads.D + heads.Dv), activations=heads.pairs + heads.rows * heads.Dv)


def _backward(heads: Heads) -> Cost:
    return Cost(macs=heads.pairs * (3 * heads.D + 2 * heads.Dv))


def _multi_head(query: tuple[int, ...], key: tuple[int, ...], heads: int) -> Cost:
    B, Q, E = query
    K = key[1]
    projected = B * (2 * Q + 2 * K) * E
    pairs = B * heads * Q * K
    return Cost(macs=projected * E + 2 * B * Q * K * E, activations=projected + pairs + B * Q * E)


def _number(call: Call, name: str) -> int:
    return int(call.arguments[name])  # type: ignore[arg-type]


def _three(call: Call) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    names = [name for name in ("query", "key", "value") if name in call.arguments]
    if len(names) < 3:  # a higher-order op has no names: they come first
        names = [name for name, value in call.arguments.items() if isinstance(value, TensorSpec)][:3]
    query, key, value = (call.tensor(name) for name in names)
    return query, key, value


def _heads_first(call: Call) -> Heads:
    query, key, value = (spec.shape for spec in _three(call))
    # Batches broadcast, and a query head shares its key with others: the larger size counts, unless one is empty.
    axes = zip_longest(*(shape[-3::-1] for shape in (query, key, value)), fillvalue=1)
    batch = math.prod(0 if 0 in sizes else max(sizes) for sizes in axes)
    return Heads(batch * query[-2], batch * query[-2] * key[-2], query[-1], value[-1])


def _heads_third(call: Call) -> Heads:
    query, key, value = (spec.shape for spec in _three(call))
    heads, D, Dv = query[-2], query[-1], value[-1]
    starts = call.arguments.get("cum_seq_q") or call.arguments.get("cu_seqlens_q")
    if not isinstance(starts, TensorSpec) or starts.numel < 2:
        rows = query[0] * heads * query[1]
        return Heads(rows, rows * key[1], D, Dv)
    lengths = [call.arguments.get(f"max_{name}") or call.arguments.get(f"max_seqlen_{name}") for name in "qk"]
    longest_q, longest_k = (
        length if isinstance(length, int) else shape[-3] for length, shape in zip(lengths, (query, key), strict=True)
    )
    rows = (starts.numel - 1) * heads * longest_q
    return Heads(rows, rows * longest_k, D, Dv)
