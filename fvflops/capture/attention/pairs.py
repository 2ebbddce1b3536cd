"""Mark the matrix products of a masked attention that torch decomposes with the number of unmasked pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.trace import Signature, TensorSpec, tensors_in

SOFTMAX = "aten::_safe_softmax"
PRODUCTS = frozenset({"aten::bmm", "aten::mm", SOFTMAX})
_MARK = object()  # of autograd nodes


class Pairs(NamedTuple):
    """Of an attention's pairs of `queries` x `keys`, `unmasked` of `all` are not masked; None if that is unknown."""

    unmasked: int | None
    all: int
    queries: int
    keys: int


def with_pairs(signature: Signature, pairs: Pairs) -> Signature:
    """Return the signature of a product or the softmax with the number of unmasked pairs as values of its matrix."""
    if pairs.unmasked == pairs.all and signature.op != SOFTMAX:
        return signature
    matrix = next(
        (spec for spec in tensors_in((*signature.outputs, *signature.inputs)) if _is_matrix_of(spec, pairs)), None
    )
    if matrix is None:
        return signature
    values = () if pairs.unmasked is None else (matrix.numel * pairs.unmasked // max(1, pairs.all),)
    marked = replace(matrix, values=values)
    inputs, outputs = list(signature.inputs), list(signature.outputs)
    items = outputs if matrix in outputs else inputs
    items[items.index(matrix)] = marked
    return replace(signature, inputs=tuple(inputs), outputs=tuple(outputs))


def _is_matrix_of(spec: TensorSpec, pairs: Pairs) -> bool:
    return sorted(spec.shape[-2:]) == sorted((pairs.queries, pairs.keys))


def mark_nodes(results: Any, arguments: Sequence[Any], pairs: Pairs) -> None:
    """Mark the autograd nodes between an attention's arguments and its result."""
    seen = {tensor.grad_fn for tensor in tensors_of(arguments)}
    pending = [tensor.grad_fn for tensor in tensors_of(results)]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        metadata: Any = node.metadata
        metadata[_MARK] = pairs
        pending += [inner for inner, _ in node.next_functions]


def pairs_of_node(node: Any) -> Pairs | None:
    """Return the pairs of the attention that created an autograd node, or None."""
    pairs: Pairs | None = node.metadata.get(_MARK)
    return pairs


def find_pairs(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, unmasked: int | None, *, is_causal: bool
) -> Pairs:
    """Return the pairs of an attention with a mask of `unmasked` entries, a causal mask, or none.

    A causal mask starts at the first query and key.

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
