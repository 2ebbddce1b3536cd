"""Count the pairs of query and key that attention's masks leave: in matrix products of torch, and in flex attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fvflops.capture.instrument.patching import Patch, Wrapper, calling
from fvflops.capture.recorder.tensor_specs import ExplicitValue, nodes_between
from fvflops.capture.recorder.value_reader import ValueArgument, ValueReader
from fvflops.capture.restore import interrupts
from fvflops.torch_internals import disable_dispatch_modes
from fvflops.trace import Signature, tensors_in

SOFTMAX = "aten::_safe_softmax"
PRODUCTS = frozenset({"aten::bmm", "aten::mm", SOFTMAX})
# Position of the block mask's tuple among an op's arguments; query and key come first.
BLOCK_MASKS = {"flex_attention": 4, "flex_attention_backward": 9}
# F creates the attribute on access in some versions of torch; store it, so that the patch can restore it.
vars(F).setdefault("scaled_dot_product_attention", F.scaled_dot_product_attention)
_ATTENTION = Patch(F, "scaled_dot_product_attention")
_MASK = (ValueArgument(0, "attn_mask", True),)
_MARK = object()  # of autograd nodes


class Pairs(NamedTuple):
    """Numbers of (query, key) pairs of an attention: unmasked ones, None if unknown, and all."""

    unmasked: int | None
    all: int
    queries: int
    keys: int


def with_pairs(signature: Signature, pairs: Pairs) -> Signature:
    """Return the signature of a product or the softmax with the number of unmasked pairs as values of its matrix."""
    if pairs.unmasked == pairs.all and signature.op != SOFTMAX:
        return signature
    specs, sizes = tensors_in((*signature.outputs, *signature.inputs)), sorted((pairs.queries, pairs.keys))
    matrix = next((spec for spec in specs if sorted(spec.shape[-2:]) == sizes), None)
    if matrix is None:
        return signature
    values = () if pairs.unmasked is None else (matrix.numel * pairs.unmasked // max(1, pairs.all),)
    marked = replace(matrix, values=values)
    inputs, outputs = list(signature.inputs), list(signature.outputs)
    items = outputs if matrix in outputs else inputs
    items[items.index(matrix)] = marked
    return replace(signature, inputs=tuple(inputs), outputs=tuple(outputs))


def pairs_of_node(node: Any) -> Pairs | None:
    return node.metadata.get(_MARK)


def find_pairs(query: Tensor, key: Tensor, mask: Tensor | None, unmasked: int | None, *, is_causal: bool) -> Pairs:
    """Return the pairs of an attention with a mask of `unmasked` entries, a causal mask, or none.

    >>> find_pairs(torch.empty(1, 3, 8), torch.empty(1, 2, 8), None, None, is_causal=True)
    Pairs(unmasked=5, all=6, queries=3, keys=2)
    """
    queries, keys = query.shape[-2], key.shape[-2]
    if mask is not None:
        return Pairs(unmasked, mask.numel(), queries, keys)
    if not is_causal:
        return Pairs(queries * keys, queries * keys, queries, keys)
    below = min(queries, keys)
    return Pairs(below * (below + 1) // 2 + (queries - below) * keys, queries * keys, queries, keys)


def attention_pairs(recorder: Any, has_values: Callable[[list[Any]], bool]) -> Wrapper:
    """Return the wrapper that finds the unmasked pairs of each attention; `recorder` is the run's Recorder.

    With autograd, torch decomposes attention that its kernels on a device do not support: on the CPU and the meta
    device, attention whose value heads have another size than its query heads.
    """
    return _ATTENTION, calling(partial(call_with_pairs, recorder, ValueReader(has_values)))


def call_with_pairs(recorder: Any, reader: ValueReader, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call an attention; if it is masked, mark the matrix products in it and in its backward."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    values: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
    query, key, mask = values.get("query"), values.get("key"), values.get("attn_mask")
    are_matrices = all(isinstance(value, Tensor) and not value.is_nested and value.ndim > 1 for value in (query, key))
    if query is None or key is None or not (recorder.backward and recorder.is_recording_thread() and are_matrices):
        return call(*args, **kwargs)
    (unmasked,) = reader.read(_MASK, (mask,), {})
    is_causal = bool(values.get("is_causal"))
    pairs = find_pairs(query, key, mask, None if unmasked is None else unmasked[0], is_causal=is_causal)
    state = recorder.thread_state()
    outer, state.attention, recorder.has_attention = state.attention, pairs, True
    try:
        result = call(*args, **kwargs)
    finally:
        state.attention = outer
    if pairs.unmasked != pairs.all:
        for node in nodes_between(result, [values.get(name) for name in names[:4]]):
            node.metadata[_MARK] = pairs
    return result


def count_mask(args: Sequence[Any], position: int, has_values: Callable[[list[Any]], bool]) -> tuple[Any, ...]:
    """Return a call of flex attention with the pairs of its block mask counted, where `has_values` says they can be."""
    mask = args[position]
    start = next((index for index, item in enumerate(mask) if isinstance(item, Tensor)), len(mask))
    lists = [item for item in mask[start : start + 4] if item is not None]
    if isinstance(mask[-1], ExplicitValue) or not lists or not has_values(lists):
        return tuple(args)
    query, key = args[0].shape, args[1].shape
    with interrupts.deferred(), disable_dispatch_modes():
        # Partial blocks, in which the mask function is evaluated, and full blocks if these are listed separately.
        columns = zip(lists[::2], lists[1::2], strict=True)
        pairs = sum(count_pairs(*item, (query[-2], key[-2]), mask[-3:-1]) for item in columns)
        masks = lists[0].numel() // max(1, lists[0].shape[-1])
    repeats = query[0] * query[1] // max(1, masks)  # one mask may apply to all batches, or all heads
    counted_mask = (*mask[:-1], ExplicitValue(mask[-1], pairs * repeats))
    return (*args[:position], counted_mask, *args[position + 1 :])


def count_pairs(counts: Tensor, indices: Tensor, lengths: tuple[int, int], sizes: tuple[int, int]) -> int:
    """Return the pairs in the blocks of a block mask, with blocks clipped to the sequence lengths.

    `counts` [..., rows] is the number of blocks in a row, `indices` [..., rows, columns] starts with their columns.
    `lengths` are the numbers of queries and keys, `sizes` of queries and keys in a block.

    >>> count_pairs(torch.tensor([1, 2]), torch.tensor([[0, 1], [0, 1]]), (5, 5), (4, 4))
    21
    """
    rows = torch.arange(counts.shape[-1], dtype=torch.int64, device=counts.device)
    heights = (lengths[0] - rows * sizes[0]).clamp(0, sizes[0])
    is_listed = torch.arange(indices.shape[-1], device=counts.device) < counts.unsqueeze(-1)
    widths = (lengths[1] - indices.to(torch.int64) * sizes[1]).clamp(0, sizes[1])
    return int(((widths * is_listed).sum(-1) * heights).sum())
