"""The attention programs: forward, backward, and the layers that hold one, on arrays of counting numbers."""

import math
from typing import Any

import numpy as np

from tests.support.oracle.norms import normalise, scale_and_shift
from tests.support.oracle.number import Number, Tally, each, linear, matmul
from tests.support.oracle.reductions import softmax, softmax_backward

# Which weights dropout kept, 1 or 0 for each of [batch, heads, queries, keys], and what it multiplies them by.
Dropped = tuple[Any, float]


def transpose(array: Any) -> Any:
    return np.swapaxes(array, -1, -2)


def scores_of(tally: Tally, q: Any, k: Any, mask: Any, causal: bool, scale: float | None) -> Any:
    """Return scores of [..., queries, keys]; hidden ones are computed, then replaced: selecting is not an operation."""
    scores = matmul(tally, q, transpose(k)) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if mask is not None and mask.dtype != bool:
        scores = scores + mask
    shown = shown_pairs(scores.shape[-2:], mask, causal)
    return np.where(shown, scores, tally.number(-math.inf))


def shown_pairs(shape: tuple[int, ...], mask: Any, causal: bool) -> Any:
    shown = np.tri(*shape, dtype=bool) if causal else np.ones(shape, dtype=bool)
    return shown & mask if mask is not None and mask.dtype == bool else shown


def attend(tally, q, k, v, mask=None, causal=False, scale=None):
    """Return the attention of one head or of several: softmax(q k^T * scale + mask) v."""
    return matmul(tally, softmax(tally, scores_of(tally, q, k, mask, causal, scale)), v)


def attention(tally, query, key, value, mask=None, causal=False, scale=None, *, skip=False):
    """Return scaled dot product attention of [batch, heads, tokens, size]; query heads share key heads evenly.

    With `skip` hidden pairs cost nothing.
    """
    key, value = (np.repeat(x, query.shape[1] // key.shape[1], 1) for x in (key, value))
    if not skip:
        return attend(tally, query, key, value, mask, causal, scale)
    shown = shown_pairs((query.shape[2], key.shape[2]), mask, causal)
    rows = [
        attend(tally, query[:, :, i : i + 1], key[:, :, seen], value[:, :, seen], None, False, scale)
        for i, seen in enumerate(shown)
    ]
    return np.concatenate(rows, 2)


def attention_backward(
    tally: Tally,
    grad: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    logsumexp: Any,
    mask: Any = None,
    causal: bool = False,
    scale: float | None = None,
    dropped: Dropped | None = None,
) -> tuple[Any, Any, Any]:
    """Return the gradients of query, key and value, as FlashAttention computes them: the scores are computed again.

    Query heads share key heads evenly: the gradient of a shared one is one sum over all their queries.
    """
    share = query.shape[1] // key.shape[1]
    k, v = (np.repeat(x, share, 1) for x in (key, value))
    weights = np.exp(scores_of(tally, query, k, mask, causal, scale) - logsumexp[..., None])
    # The row sum of grad * out is not a matrix product: multiplications and additions.
    delta = tally.sum(grad * out, -1)[..., None]
    met, towards = weights, matmul(tally, grad, transpose(v))
    if dropped is not None:
        # Both what met the values and its gradient, by the mask and by 1/(1 - p).
        met, towards = (x * dropped[0] * dropped[1] for x in (weights, towards))
    slopes = weights * (towards - delta) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    return (
        matmul(tally, slopes, k),
        matmul(tally, transpose(_joined(slopes, share)), _joined(query, share)),
        matmul(tally, transpose(_joined(met, share)), _joined(grad, share)),
    )


def _joined(heads: Any, share: int) -> Any:
    """Return the rows of the heads that share one key head, one after another."""
    batch, count, rows, size = heads.shape
    return heads.reshape(batch, count // share, share * rows, size)


def math_attention_backward(tally, grad, query, key, value, weights, scale=None):
    """Return the gradients of query, key and value where single ops run: the softmax's weights were kept.

    Query and key were both multiplied by the root of the scale, and so their gradients are.
    """
    root = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    slopes = softmax_backward(tally, matmul(tally, grad, transpose(value)), weights)
    # What the slopes meet was multiplied by the root forward; the gradient is multiplied by it here.
    met = [each(lambda number: Number(number.value * root, tally), tensor) for tensor in (query, key)]
    return (
        matmul(tally, slopes, met[1]) * root,
        matmul(tally, transpose(slopes), met[0]) * root,
        matmul(tally, transpose(weights), grad),
    )


def multi_head_attention(
    tally: Tally,
    query: Any,
    key: Any,
    value: Any,
    in_weight: Any,
    in_bias: Any,
    out_weight: Any,
    out_bias: Any,
    heads: int,
    *,
    mask: Any = None,
    asks_weights: bool = True,
) -> tuple[Any, Any]:
    """Return the output of nn.MultiheadAttention of [batch, tokens, width], and the weights' average over the heads.

    Where the weights are asked for, the query is scaled and not the scores.
    """
    batch, tokens, width = query.shape
    biases = [None] * 3 if in_bias is None else np.split(in_bias, 3)
    parts = zip((query, key, value), np.split(in_weight, 3), biases, strict=True)
    q, k, v = (np.swapaxes(linear(tally, *part).reshape(batch, -1, heads, width // heads), 1, 2) for part in parts)
    average = None
    if asks_weights:
        scores = matmul(tally, q * math.sqrt(heads / width), transpose(k))
        weights = softmax(tally, scores if mask is None else scores + mask)
        result, average = matmul(tally, weights, v), tally.sum(weights, 1) / heads
    else:
        result = attend(tally, q, k, v, mask)
    joined = np.swapaxes(result, 1, 2).reshape(batch, tokens, width)
    return linear(tally, joined, out_weight, out_bias), average


def encoder_layer(tally, source, parameters, heads, norm_first, eps):
    """Return the output of nn.TransformerEncoderLayer in evaluation: attention, two linears, and sums and norms."""

    def of(name: str) -> tuple[Any, Any]:
        return parameters[f"{name}.weight"], parameters[f"{name}.bias"]

    def norm(x: Any, name: str) -> Any:
        return scale_and_shift(normalise(tally, x, eps), *of(name))

    def attended(x):
        projections = (parameters[f"self_attn.in_proj_{name}"] for name in ("weight", "bias"))
        weights = (*projections, *of("self_attn.out_proj"))
        return multi_head_attention(tally, x, x, x, *weights, heads, asks_weights=False)[0]

    def fed(x):
        active = each(lambda number: number.max(0.0), linear(tally, x, *of("linear1")))
        return linear(tally, active, *of("linear2"))

    if norm_first:
        source = source + attended(norm(source, "norm1"))
        return source + fed(norm(source, "norm2"))
    source = norm(source + attended(source), "norm1")
    return norm(source + fed(source), "norm2")
