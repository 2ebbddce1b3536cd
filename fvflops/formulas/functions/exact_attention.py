"""Exact cost of attention: products, scale, mask, softmax and dropout, alone and in fused layers."""

from __future__ import annotations

import math
from dataclasses import replace

from fvflops.formulas.cost import Cost
from fvflops.formulas.functions.attention import (
    MASKS,
    Heads,
    count_attention,
    count_attention_backward,
    count_attention_bshd,
    count_attention_bshd_backward,
    count_encoder_layer,
    count_multi_head_attention,
    find_heads,
    find_heads_bshd,
)
from fvflops.formulas.language.call import Call
from fvflops.trace import TensorSpec

# FLOPs per query and key: the maximum, the difference to it, the sum of the exponentials, the division by it.
_SOFTMAX = 4


def count_exact_attention(call: Call) -> Cost:
    """Return the cost of an attention: its products, and per query and key the scale, mask, softmax and dropout.

    The scale is one multiplication, a float mask one addition (a bool mask selects), softmax 4 and an exponential,
    dropout a multiplication by its mask and one by 1/(1 - p). Dense, for the tensors and ops of `count_attention`; the
    constant is `exp`.

    >>> spec = TensorSpec((1, 2, 3, 4))
    >>> arguments = {"query": spec, "key": spec, "value": spec}
    >>> count_exact_attention(Call("attention", arguments, (spec,), constants={"exp": 8})).flops
    234
    """
    return replace(count_attention(call), flops=_forward(call, find_heads(call)))


def count_exact_attention_bshd(call: Call) -> Cost:
    """Return the cost of an attention on [B, Q, H, D] or packed tensors, as `count_exact_attention`."""
    return replace(count_attention_bshd(call), flops=_forward(call, find_heads_bshd(call)))


def count_exact_attention_backward(call: Call) -> Cost:
    """Return the cost of a fused attention's backward: its five products, and the elementwise ops between them.

    Per query and key the scale and the mask of the score, its difference to the logsumexp and the exponential P;
    then dP - D, times P, times the scale; D is the sum of dO * O over a row. Dropout multiplies P and dP by mask and
    scale. Source: algorithm 4 of arXiv:2205.14135 (FlashAttention).
    """
    return replace(count_attention_backward(call), flops=_backward(call, find_heads(call)))


def count_exact_attention_bshd_backward(call: Call) -> Cost:
    """Return the cost of the backward of `count_exact_attention_bshd`, as `count_exact_attention_backward`."""
    return replace(count_attention_bshd_backward(call), flops=_backward(call, find_heads_bshd(call)))


def count_exact_multi_head_attention(call: Call) -> Cost:
    """Return the cost of a fused multi-head attention: projections with their biases, and the attention.

    With `need_weights`, the query is scaled instead of the scores, and the weights are averaged over the heads, as in
    `torch.nn.functional.multi_head_attention_forward`. For aten::_native_multi_head_attention.
    """
    query, key = call.shape("query"), call.shape("key")
    heads, returns_weights = call.integer("num_head"), bool(call.arguments.get("need_weights"))
    averaged = returns_weights and bool(call.arguments.get("average_attn_weights"))
    flops = _multi_head(call, query, key[1], heads, returns_weights, averaged)
    return replace(count_multi_head_attention(call), flops=flops)


def count_exact_encoder_layer(call: Call) -> Cost:
    """Return the cost of a fused encoder layer: attention, two linears with biases, activation, two sums, two norms.

    A norm of n elements is 5n + 5, and 2n for weight and bias. For aten::_transformer_encoder_layer_fwd.
    """
    source = call.shape("src")
    tokens, width = math.prod(source[:-1]), source[-1]
    hidden = call.shape("ffn_weight_1")[0]
    attention = _multi_head(call, source, source[1], call.integer("num_heads"), False, False)
    activation = 4 + call.constants["erf"] if call.arguments["use_gelu"] else 1
    norms, sums = 2 * tokens * (7 * width + 5), 2 * tokens * width
    linears = tokens * (hidden * (1 + activation) + width)
    return replace(count_encoder_layer(call), flops=attention + linears + norms + sums)


def _forward(call: Call, heads: Heads) -> int:
    return heads.pairs * (
        1 + _mask_additions(call) + _SOFTMAX + call.constants["exp"] + (2 if _has_dropout(call) else 0)
    )


def _backward(call: Call, heads: Heads) -> int:
    per_pair = 5 + _mask_additions(call) + call.constants["exp"] + (4 if _has_dropout(call) else 0)
    return heads.pairs * per_pair + 2 * heads.rows * heads.Dv


def _mask_additions(call: Call) -> int:
    """Return the number of mask additions per score; bool masks add nothing."""
    masks = (call.arguments.get(name) for name in MASKS)
    return sum(isinstance(mask, TensorSpec) and mask.is_floating_point for mask in masks)


def _has_dropout(call: Call) -> bool:
    return call.arguments.get("dropout_p") not in (None, 0, 0.0)


def _multi_head(
    call: Call, query: tuple[int, ...], keys: int, heads: int, returns_weights: bool, averaged: bool
) -> int:
    batch, queries, width = query
    biases = batch * width * (queries + 2 * keys + queries)
    pairs = batch * heads * queries * keys
    mask = call.arguments.get("mask")
    masked = isinstance(mask, TensorSpec) and mask.is_floating_point
    scales = batch * queries * width if returns_weights else pairs
    averages = pairs + pairs // max(1, heads) if averaged else 0
    return biases + scales + pairs * (masked + _SOFTMAX + call.constants["exp"]) + averages
