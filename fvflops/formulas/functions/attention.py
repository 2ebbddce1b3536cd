"""Attention: two products forward, five backward, and the fused layers that contain it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from fvflops.formulas.cost import Cost, OpCost
from fvflops.formulas.language.call import Call
from fvflops.trace import Signature, TensorSpec, Value, tensors_in
from fvflops.trace.calls import packet_of

# Argument names of torch, flash-attn and xFormers: the three tensors, offsets of packed sequences, KV cache pages.
_QUERY_KEY_VALUE: tuple[Sequence[str], ...] = (("query", "key", "value"), ("q", "k", "v"))
_STARTS = ("cum_seq_q", "cu_seq_q", "cu_seqlens_q", "seqstart_q")
_PAGES = ("page_table", "block_table", "block_tables")
_KEY_STARTS = ("cum_seq_k", "cu_seq_k", "cu_seqlens_k", "seqstart_k")
_KEYS_USED = ("seqused_k", "seqlen_k")
_QUERIES_USED = ("seqused_q",)
# Arguments of `count_attention_bshd` of which it reads the values.
SEQUENCE_VALUES = (*_STARTS, *_KEY_STARTS, *_KEYS_USED, *_QUERIES_USED)
MASKS = ("attn_mask", "attn_bias", "bias")

# Matrix products that attention is decomposed into: the matrix of pairs has the number of unmasked ones as values.
PRODUCTS = frozenset({"aten::bmm", "aten::mm"})
SOFTMAX = "aten::_safe_softmax"

# If this constant of a table is 1, only unmasked pairs count, where the call's arguments determine them.
SKIPS = "attention_skips_masked"

# A causal mask aligns the first query with the first key (upper left), in these kernels the last query with the last
# key (lower right): flash-attn 2.1 and later, and libraries built on it.
_LOWER_RIGHT = frozenset({"flash_attn", "flash_attn_3", "xformers_flash", "xformers_flash3", "torch_attn"})
_LOWER_RIGHT_IN_ATEN = frozenset(
    f"aten::{name}"
    for name in (
        "_flash_attention_forward",
        "_flash_attention_forward_no_dropout_inplace",
        "_flash_attention_backward",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_backward",
    )
)
# Mask types of xFormers' kernels, which torch's memory-efficient attention has adopted.
_UPPER, _LOWER = 1, 2


@dataclass(frozen=True, slots=True)
class Heads:
    """Sizes of an attention: `pairs` are batch * query heads * queries * keys, D and Dv the head sizes.

    `rows` are batch * query heads * queries.
    """

    rows: int
    pairs: int
    D: int
    Dv: int


def count_attention(call: Call) -> Cost:
    """Return the cost of an attention: QK^T and the product with V, pairs * (D + Dv).

    Dense: masked pairs count too, unless the table's constant `attention_skips_masked` is 1. Then only the pairs within
    a causal mask, a window (`band_size`) or flex attention's block mask count, and the unmasked pairs of a mask tensor
    where the call's signature has their number; else all. Grouped keys (GQA) count for every query head. Query
    [..., Hq, Q, D], key [..., Hk, K, D], value [..., Hk, K, Dv]. Activations are the two products' results. For
    aten::scaled_dot_product_attention, its kernels, and flex_attention. Source: arXiv:1706.03762, section 3.2.1.

    >>> spec = TensorSpec((1, 2, 3, 4))
    >>> inputs = {"query": spec, "key": spec, "value": spec, "is_causal": True}
    >>> count_attention(Call("attention", inputs, (spec,))).macs
    144
    >>> count_attention(Call("attention", inputs, (spec,), constants={SKIPS: 1})).macs
    96
    """
    return _forward(find_heads(call))


def count_attention_backward(call: Call) -> Cost:
    """Return the cost of a fused attention's backward: pairs * (3 * D + 2 * Dv).

    Five products: the scores again, which are `recomputed`, then the gradients of V, of the weights, of Q and of K.
    Source: algorithm 4 of arXiv:2205.14135 (FlashAttention), which torch's flash, efficient, cuDNN and CPU kernels
    follow.
    """
    return _backward(find_heads(call))


def count_attention_bshd(call: Call) -> Cost:
    """Return the cost of an attention on [B, Q, H, D] tensors, or on packed [total, H, D] ones, as `count_attention`.

    Each sequence of a packed batch counts with its own lengths where the signature has their offsets, else with the
    longest, `max_q` by `max_k`; masks apply per sequence. Paged keys are [pages, size, H, D], and each sequence has as
    many as are in use, or as its row of the page table. A second query `q_v` for the values (multi-head latent
    attention) adds one product. For aten::_flash_attention_forward, _efficient_attention_forward, and the kernels of
    flash-attn and xFormers.

    >>> spec = TensorSpec((2, 6, 4, 8))
    >>> count_attention_bshd(Call("flash", {"q": spec, "k": spec, "v": spec}, (spec,))).macs
    4608
    """
    heads = find_heads_bshd(call)
    cost = _forward(heads)
    if isinstance(call.arguments.get("q_v"), TensorSpec):
        return Cost(macs=cost.macs + heads.pairs * heads.Dv, activations=cost.activations)
    return cost


def count_attention_bshd_backward(call: Call) -> Cost:
    """Return the cost of the backward of `count_attention_bshd`, as `count_attention_backward`."""
    return _backward(find_heads_bshd(call))


def count_multi_head_attention(call: Call) -> Cost:
    """Return the cost of a fused multi-head attention: four projections and the attention between them.

    Query [B, Q, E], key and value [B, K, E], weights [3E, E] and [E, E]. For aten::_native_multi_head_attention.
    """
    query, key = call.shape("query"), call.shape("key")
    return _multi_head(query, key, call.integer("num_head"))


def count_encoder_layer(call: Call) -> Cost:
    """Return the cost of a fused encoder layer: its multi-head attention, two linears and two layer norms.

    The norms have 5 FLOPs per element, as fvcore's layer_norm with weights. Source [B, Q, E], feed-forward weight
    [F, E]. For aten::_transformer_encoder_layer_fwd.
    """
    source = call.shape("src")
    attention = _multi_head(source, source, call.integer("num_heads"))
    tokens, width = math.prod(source[:-1]), source[-1]
    hidden = call.shape("ffn_weight_1")[0]
    return Cost(
        macs=attention.macs + 2 * tokens * width * hidden,
        flops=2 * 5 * tokens * width,
        activations=(attention.activations or 0) + tokens * (hidden + width),
    )


def band_size(queries: int, keys: int, left: int | None = None, right: int | None = None, shift: int = 0) -> int:
    """Return the pairs of a band mask: query i attends to keys i + shift - left to i + shift + right, both inclusive.

    None means no limit. A causal mask has `right` 0, and `shift` 0 (upper left) or keys - queries (lower right).

    >>> band_size(3, 5, right=0), band_size(3, 5, right=0, shift=2), band_size(3, 5, left=1, right=0)
    (6, 12, 5)
    """
    up_to_right = queries * keys if right is None else _sum_clamped(queries, keys, shift + right + 1)
    left_of_band = 0 if left is None else _sum_clamped(queries, keys, shift - left)
    return max(0, up_to_right - left_of_band)


def _sum_clamped(queries: int, keys: int, start: int) -> int:
    """Return the sum of min(max(i + start, 0), keys) over the queries i."""

    def sum_below(count: int) -> int:  # the sum of min(j, keys) over 0 <= j < count
        low = min(max(count, 0), keys)
        return low * (low - 1) // 2 + (max(count, 0) - low) * keys

    return sum_below(queries + start) - sum_below(start)


def _forward(heads: Heads) -> Cost:
    return Cost(macs=heads.pairs * (heads.D + heads.Dv), activations=heads.pairs + heads.rows * heads.Dv)


def _backward(heads: Heads) -> Cost:
    return Cost(macs=heads.pairs * (3 * heads.D + 2 * heads.Dv), recomputed=heads.pairs * heads.D)


def _multi_head(query: tuple[int, ...], key: tuple[int, ...], heads: int) -> Cost:
    B, Q, E = query
    K = key[1]
    projected = B * (2 * Q + 2 * K) * E
    pairs = B * heads * Q * K
    return Cost(macs=projected * E + 2 * B * Q * K * E, activations=projected + pairs + B * Q * E)


def _query_key_value(call: Call) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    tensors = [name for name, value in call.arguments.items() if isinstance(value, TensorSpec)]
    # A higher-order op has no argument names: its first three tensors are these.
    names = next((names for names in _QUERY_KEY_VALUE if call.arguments.keys() >= set(names)), tensors[:3])
    query, key, value = (call.tensor(name) for name in names)
    return query, key, value


def find_heads(call: Call) -> Heads:
    """Return the sizes of an attention on [..., H, Q, D] tensors."""
    query, key, value = (spec.shape for spec in _query_key_value(call))
    # Batches broadcast, and several query heads may share a key: the larger size counts, unless one is 0.
    axes = zip_longest(*(shape[-3::-1] for shape in (query, key, value)), fillvalue=1)
    batch = math.prod(0 if 0 in sizes else max(sizes) for sizes in axes)
    pairs = _block_pairs(call)
    if pairs is None:
        pairs = _unmasked_pairs(call, batch * _counted_pairs(call, query[-2], key[-2]), batch * query[-2] * key[-2])
    return Heads(batch * query[-2], pairs, query[-1], value[-1])


def find_heads_bshd(call: Call) -> Heads:
    """Return the sizes of an attention on [B, Q, H, D] tensors, or on packed ones."""
    query, key, value = (spec.shape for spec in _query_key_value(call))
    starts = _first_tensor(call, _STARTS)
    packed = starts is not None and starts.numel > 1
    # [B, Q, H, D], [B, Q, G, H, D] or [B, Q, D]; packed [total, H, D] or [1, total, H, D].
    axis = 0 if packed and len(query) == 3 else 1
    heads = math.prod(query[axis + 1 : -1])
    sequences = starts.numel - 1 if starts is not None and packed else query[0]
    keys = key[0 if packed and len(key) == 3 else 1]
    longest_q, longest_k = _longest(call, query[axis], keys, packed)
    lengths = _known_lengths(call, sequences, None if packed else longest_q, None if packed else longest_k)
    if lengths is not None:
        queries = sum(length for length, _ in lengths)
        pairs = sum(_counted_pairs(call, *length) for length in lengths)
    else:
        queries, pairs = sequences * longest_q, sequences * _counted_pairs(call, longest_q, longest_k)
    all_pairs = heads * sequences * longest_q * longest_k
    return Heads(heads * queries, _unmasked_pairs(call, heads * pairs, all_pairs), query[-1], value[-1])


def _block_pairs(call: Call) -> int | None:
    """Return the pairs in the blocks that flex attention computes, None unless masks count and the blocks are known."""
    mask = call.arguments.get("block_mask")
    pairs = mask[-1] if isinstance(mask, tuple) and mask and call.constants.get(SKIPS, 0) else None
    return pairs if isinstance(pairs, int) else None


def _unmasked_pairs(call: Call, pairs: int, all_pairs: int) -> int:
    """Return the number of `pairs` that a mask tensor does not mask, if the signature has it, else `pairs`.

    `all_pairs` is the number of pairs to which the mask broadcasts. With a band mask and a mask tensor, the smaller
    number counts, since their intersection is unknown.
    """
    mask = _first_tensor(call, MASKS)
    if mask is None or mask.values is None or not mask.numel or not call.constants.get(SKIPS, 0):
        return pairs
    return min(pairs, all_pairs * mask.values[0] // mask.numel)


def skip_masked(cost: OpCost, signature: Signature, multiply_add: int) -> OpCost:
    """Return the cost of the unmasked pairs of a product of a decomposed attention; other costs are returned unchanged.

    >>> from fvflops.formulas.cost import Status
    >>> weights, values = TensorSpec((4, 4), values=(10,)), TensorSpec((4, 8))
    >>> product = Signature("aten::mm", (), (weights, values), (values,))
    >>> skip_masked(OpCost("mm", Status.COUNTED, 128, 128), product, 1).macs
    80
    """
    if signature.op not in PRODUCTS:
        return cost
    for spec in tensors_in((*signature.outputs, *signature.inputs)):
        if spec.values and spec.numel:
            pairs, activations = spec.values[0], cost.activations
            if activations is not None and spec in signature.outputs:
                activations = activations * pairs // spec.numel
            macs, recomputed = cost.macs * pairs // spec.numel, cost.recomputed * pairs // spec.numel
            return OpCost.in_flops(cost.label, cost.status, multiply_add, macs, cost.flops, activations, recomputed)
    return cost


def has_unknown_mask(signature: Signature) -> bool:
    """Return whether a call is an attention whose unmasked pairs are not known, so that it counts as dense.

    >>> has_unknown_mask(Signature("aten::scaled_dot_product_attention", ("attn_mask",), (TensorSpec((4, 4)),), ()))
    True
    """
    if signature.op in PRODUCTS:
        return any(spec.values == () for spec in tensors_in((*signature.outputs, *signature.inputs)))
    if signature.op == SOFTMAX:
        # torch decomposed an attention that was called by another name than F.scaled_dot_product_attention.
        return all(spec.values is None for spec in tensors_in(signature.outputs))
    if not any(name in signature.op for name in ("attention", "attn")):
        return False
    arguments = dict(zip(signature.names, signature.inputs, strict=False))
    masks = (arguments.get(name) for name in MASKS)
    blocks = arguments.get("block_mask")
    if isinstance(blocks, tuple) and any(isinstance(item, TensorSpec) for item in blocks):
        return not isinstance(blocks[-1], int)
    return any(isinstance(mask, TensorSpec) and mask.values is None and mask.numel > 0 for mask in masks)


def _known_lengths(call: Call, sequences: int, queries: int | None, keys: int | None) -> list[tuple[int, int]] | None:
    """Return the numbers of queries and keys of each sequence, None where they are not known for all.

    `queries` and `keys` are numbers for each sequence in a padded batch.
    """
    if queries is None:
        query_lengths = _lengths(call, _QUERIES_USED, _STARTS)
    else:
        query_lengths = [queries] * sequences
    key_lengths = _lengths(call, _KEYS_USED, () if _first_tensor(call, _PAGES) else _KEY_STARTS)
    if key_lengths is None and keys is not None:
        key_lengths = [keys] * sequences
    if query_lengths is None or key_lengths is None or not len(query_lengths) == len(key_lengths) == sequences:
        return None
    if min((*query_lengths, *key_lengths), default=0) < 0:
        return None
    return list(zip(query_lengths, key_lengths, strict=True))


def _lengths(call: Call, used: Sequence[str], starts: Sequence[str]) -> list[int] | None:
    """Return the lengths of sequences, from an argument or as differences of their offsets."""
    lengths, offsets = _first_tensor(call, used), _first_tensor(call, starts)
    if lengths is not None:
        return None if lengths.values is None else list(lengths.values)
    if offsets is None or offsets.values is None:
        return None
    return [after - before for before, after in pairwise(offsets.values)]


def _counted_pairs(call: Call, queries: int, keys: int) -> int:
    """Return the number of pairs counted for one head: all, or the unmasked ones."""
    if not call.constants.get(SKIPS, 0):
        return queries * keys
    arguments = call.arguments
    kind = arguments.get("custom_mask_type")
    lower = kind == _LOWER or call.op.partition("::")[0] in _LOWER_RIGHT or packet_of(call.op) in _LOWER_RIGHT_IN_ATEN
    left, right = _window(arguments)
    if arguments.get("is_causal") or arguments.get("causal") or kind in (_UPPER, _LOWER):
        right = 0
    return band_size(queries, keys, left, right, keys - queries if lower else 0)


def _window(arguments: Mapping[str, Value]) -> tuple[int | None, int | None]:
    """Return the window to the left and right of a query; xFormers has a single size, which includes the query."""
    size = arguments.get("window_size")
    if isinstance(size, int):
        return (size - 1 if size > 0 else None), None
    sides = (
        size
        if isinstance(size, tuple) and len(size) == 2
        else (
            next((arguments[name] for name in ("window_size_left", "window_left") if name in arguments), None),
            next((arguments[name] for name in ("window_size_right", "window_right") if name in arguments), None),
        )
    )
    left, right = (side if isinstance(side, int) and side >= 0 else None for side in sides)
    return left, right


def _longest(call: Call, queries: int, keys: int, packed: bool) -> tuple[int, int]:
    """Return the maximum queries and keys of a sequence; `queries` and `keys` are the tensors' sizes."""
    pages = _first_tensor(call, _PAGES)
    if pages is not None and pages.ndim == 2:
        keys *= pages.shape[1]
    if not packed:
        return queries, keys
    longest_q = _first_number(call, ("max_q", "max_seqlen_q"))
    longest_k = _first_number(call, ("max_k", "max_seqlen_k"))
    if longest_k is None and longest_q is not None and queries == keys:  # self-attention
        longest_k = longest_q
    return queries if longest_q is None else longest_q, keys if longest_k is None else longest_k


def _first_tensor(call: Call, names: Sequence[str]) -> TensorSpec | None:
    values = (call.arguments.get(name) for name in names)
    return next((value for value in values if isinstance(value, TensorSpec)), None)


def _first_number(call: Call, names: Sequence[str]) -> int | None:
    values = (call.arguments.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and value), None)
