"""The attention programs: forward, backward, and the layers that hold one, as loops over counting numbers."""

import math
from collections.abc import Sequence
from typing import Any

from tests.support.oracle.number import Number, Tally
from tests.support.oracle.products import linear, transpose
from tests.support.oracle.reductions import softmax, softmax_backward

# Which weights dropout kept, 1 or 0 for each of [batch, heads, queries, keys], and what it multiplies them by.
Dropped = tuple[Any, float]


def _visible(score: Number, visible: bool) -> Number:
    # Dense: a hidden score is computed, then replaced; a selection is no operation.
    return score if visible else Number(-math.inf, score.tally)


def _shown(i: int, j: int, mask: Any, causal: bool) -> bool:
    return not (causal and j > i) and not (mask is not None and isinstance(mask[i][j], bool) and not mask[i][j])


def _score(tally: Tally, q: Any, k: Any, place: tuple[int, int], mask: Any, causal: bool, factor: float) -> Number:
    i, j = place
    score = tally.dot(q[i], k[j]) * factor
    if mask is not None and isinstance(mask[i][j], Number):
        score = score + mask[i][j]
    return _visible(score, _shown(i, j, mask, causal))


def attend(
    tally: Tally,
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    causal: bool = False,
    scale: float | None = None,
    *,
    skip: bool = False,
) -> Any:
    """Return the attention of one head: softmax(q k^T * scale + mask) v; with `skip` hidden pairs cost nothing."""
    factor = 1 / math.sqrt(len(q[0])) if scale is None else scale
    result = []
    for i in range(len(q)):
        seen = [j for j in range(len(k)) if not skip or _shown(i, j, mask, causal)]
        weights = softmax(tally, [_score(tally, q, k, (i, j), mask, causal, factor) for j in seen])
        result.append([tally.dot(weights, [column[j] for j in seen]) for column in transpose(v)])
    return result


def attention(
    tally: Tally,
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    causal: bool = False,
    scale: float | None = None,
    *,
    skip: bool = False,
) -> Any:
    """Return scaled dot product attention of [batch, heads, tokens, size]; query heads share key heads evenly."""
    results = []
    for b, heads in enumerate(query):
        share = len(heads) // len(key[b])
        results.append(
            [
                attend(tally, q, key[b][h // share], value[b][h // share], mask, causal, scale, skip=skip)
                for h, q in enumerate(heads)
            ]
        )
    return results


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
    gradients = ([], [], [])
    for b, heads in enumerate(query):
        share = len(heads) // len(key[b])
        slopes, kept = [], []
        for h in range(len(heads)):
            tensors = (grad[b][h], heads[h], key[b][h // share], value[b][h // share], out[b][h], logsumexp[b][h])
            own = None if dropped is None else (dropped[0][b][h], dropped[1])
            for target, part in zip((slopes, kept), _slopes(tally, *tensors, mask, causal, scale, own), strict=True):
                target.append(part)
        _collect(tally, gradients, b, slopes, kept, grad, query, key)
    return gradients


def math_attention_backward(
    tally: Tally, grad: Any, query: Any, key: Any, value: Any, weights: Any, scale: float | None = None
) -> tuple[Any, Any, Any]:
    """Return the gradients of query, key and value where single ops run: the softmax's weights were kept.

    Query and key were both multiplied by the root of the scale, and so their gradients are.
    """
    root = math.sqrt(1 / math.sqrt(len(query[0][0][0])) if scale is None else scale)
    gradients = ([], [], [])
    for b in range(len(query)):
        slopes = []
        for h, rows in enumerate(weights[b]):
            towards = [[tally.dot(entry, v) for v in value[b][h]] for entry in grad[b][h]]
            slopes.append([softmax_backward(tally, *pair) for pair in zip(towards, rows, strict=True)])
        # What the slopes meet was multiplied by the root forward; the gradient is multiplied by it here.
        met_query, met_key = (
            [[[Number(number.value * root, tally) for number in row] for row in head] for head in tensor[b]]
            for tensor in (query, key)
        )
        own = ([], [], [])
        _collect(tally, own, 0, slopes, weights[b], [grad[b]], [met_query], [met_key])
        for target, (part,), scaled in zip(gradients, own, (True, True, False), strict=True):
            target.append([[[x * root for x in row] for row in head] for head in part] if scaled else part)
    return gradients


def _collect(
    tally: Tally,
    gradients: tuple[list[Any], list[Any], list[Any]],
    b: int,
    slopes: list[Any],
    kept: list[Any],
    grad: Any,
    query: Any,
    key: Any,
) -> None:
    """Append a sample's gradients of query, key and value, made of the slopes of its scores and of its weights."""
    share = len(query[b]) // len(key[b])
    towards_q = [
        [[tally.dot(row, entry) for entry in transpose(key[b][h // share])] for row in slope]
        for h, slope in enumerate(slopes)
    ]
    towards_k, towards_v = (
        [
            [
                [tally.dot(column, entry) for entry in transpose(_joined(own[b], first, share))]
                for column in transpose(_joined(parts, first, share))
            ]
            for first in range(0, len(parts), share)
        ]
        for parts, own in ((slopes, query), (kept, grad))
    )
    for target, part in zip(gradients, (towards_q, towards_k, towards_v), strict=True):
        target.append(part)


def _joined(heads: list[Any], first: int, share: int) -> list[Any]:
    """Return the rows of the heads that share one key head, one after another."""
    return [row for head in heads[first : first + share] for row in head]


def _slopes(
    tally: Tally,
    grad: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    logsumexp: Any,
    mask: Any,
    causal: bool,
    scale: float | None,
    dropped: tuple[Any, float] | None,
) -> tuple[Any, Any]:
    """Return the gradients of the scores of one head, and the weights as they met the values."""
    factor = 1 / math.sqrt(len(q[0])) if scale is None else scale
    slopes, kept = [], []
    for i in range(len(q)):
        scores = [_score(tally, q, k, (i, j), mask, causal, factor) for j in range(len(k))]
        row = [(score - logsumexp[i]).call("exp", math.exp) for score in scores]
        # The row sum of grad * out is no matrix product: multiplications and additions.
        delta = tally.sum(one * other for one, other in zip(grad[i], out[i], strict=True))
        towards = [tally.dot(grad[i], v[j]) for j in range(len(k))]
        met = row
        if dropped is not None:
            # Both what met the values and its gradient, by the mask and by 1/(1 - p).
            places, more = dropped
            met, towards = ([x * places[i][j] * more for j, x in enumerate(numbers)] for numbers in (row, towards))
        kept.append(met)
        slopes.append([weight * (towards[j] - delta) * factor for j, weight in enumerate(row)])
    return slopes, kept


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
    scale_query: bool = True,
    average: bool = True,
) -> tuple[Any, Any]:
    """Return the output of nn.MultiheadAttention of [batch, tokens, width], and the weights' average over the heads.

    `scale_query` says that the query is scaled and not the scores, as where the weights are asked for.
    """
    width = len(query[0][0])
    size = width // heads
    q, k, v = (
        linear(
            tally, tensor, in_weight[first : first + width], None if in_bias is None else in_bias[first : first + width]
        )
        for tensor, first in zip((query, key, value), (0, width, 2 * width), strict=True)
    )
    results, averages = [], []
    for b in range(len(query)):
        rows = [[] for _ in query[b]]
        all_weights = []
        for h in range(heads):
            own = slice(h * size, (h + 1) * size)
            qh, kh, vh = ([row[own] for row in tensor[b]] for tensor in (q, k, v))
            if scale_query:
                qh = [[number * math.sqrt(1 / size) for number in row] for row in qh]
                weights = [_weights(tally, qh, kh, i, mask) for i in range(len(qh))]
                head = [[tally.dot(row, column) for column in transpose(vh)] for row in weights]
                all_weights.append(weights)
            else:
                head = attend(tally, qh, kh, vh, mask)
            for row, part in zip(rows, head, strict=True):
                row.extend(part)
        results.append(linear(tally, rows, out_weight, out_bias))
        if average:
            averages.append(
                [
                    [tally.sum(weights[i][j] for weights in all_weights) / heads for j in range(len(key[b]))]
                    for i in range(len(query[b]))
                ]
            )
    return results, averages if average else None


def _weights(tally: Tally, q: Any, k: Any, i: int, mask: Any) -> list[Number]:
    scores = [tally.dot(q[i], row) for row in k]
    if mask is not None:
        scores = [score + one for score, one in zip(scores, mask[i], strict=True)]
    return softmax(tally, scores)


def layer_norm(tally: Tally, row: Sequence[Number], weight: Any, bias: Any, eps: float) -> list[Number]:
    """Return a row of mean 0 and variance 1, times a weight, plus a bias."""
    count = len(row)
    mean = tally.sum(row) / count
    centred = [number - mean for number in row]
    variance = tally.sum(number * number for number in centred) / count
    factor = 1.0 / (variance + eps).sqrt()
    return [number * factor * w + b for number, w, b in zip(centred, weight, bias, strict=True)]


def encoder_layer(
    tally: Tally, source: Any, parameters: dict[str, Any], heads: int, norm_first: bool, eps: float
) -> Any:
    """Return the output of nn.TransformerEncoderLayer in evaluation: attention, two linears, and sums and norms."""

    def norm(x: Any, name: str) -> Any:
        return [
            [layer_norm(tally, row, parameters[f"{name}.weight"], parameters[f"{name}.bias"], eps) for row in rows]
            for rows in x
        ]

    def attended(x):
        names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
        weights = [parameters[f"self_attn.{name}"] for name in names]
        return multi_head_attention(tally, x, x, x, *weights, heads, scale_query=False, average=False)[0]

    def fed(x):
        hidden = linear(tally, x, parameters["linear1.weight"], parameters["linear1.bias"])
        active = [[[number.max(0.0) for number in row] for row in rows] for rows in hidden]
        return linear(tally, active, parameters["linear2.weight"], parameters["linear2.bias"])

    def plus(x, y):
        return [
            [[a + b for a, b in zip(one, other, strict=True)] for one, other in zip(left, right, strict=True)]
            for left, right in zip(x, y, strict=True)
        ]

    if norm_first:
        source = plus(source, attended(norm(source, "norm1")))
        return plus(source, fed(norm(source, "norm2")))
    source = norm(plus(source, attended(source)), "norm1")
    return norm(plus(source, fed(source)), "norm2")
