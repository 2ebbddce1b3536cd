"""The cache of a language model: kinds and bytes of each layer's cached tensors, read from the cache object."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

# Kinds of layers by their cache of each sequence.
KINDS = ("full", "sliding window", "latent", "cross attention", "state")


class CacheLayer(NamedTuple):
    """The cache of one sequence in each of some layers.

    `token` are elements that each token adds, in `heads` heads, up to `window` tokens, 0 without a limit (engines keep
    `window`; transformers one less after a step). A "latent" layer keeps one compressed vector of a token for all
    heads; "cross attention" keeps tokens of the encoder. `state` are bytes that do not depend on the length, and
    `shape` is the largest state's: heads, keys, values.
    """

    kind: str
    token: int = 0
    heads: int = 0
    window: int = 0
    state: int = 0
    shape: tuple[int, ...] = ()

    def kept(self, tokens: int) -> int:
        """Return how many of a sequence's tokens are kept."""
        return min(tokens, self.window) if self.window else tokens

    def nbytes(self, tokens: int, element: float = 2.0, *, ranks: int = 1) -> float:
        """Return the bytes for a sequence of `tokens` tokens, on one of `ranks` that divide the heads."""
        share = 1.0 if self.kind == "latent" else max(1.0 / ranks, 1.0 / self.heads) if self.heads else 1.0 / ranks
        return share * self.kept(tokens) * self.token * element + self.state / ranks


class LayerSnapshot(NamedTuple):
    """A layer of a cache object at one length: name of a tensor → its shape and the bytes of an element."""

    tensors: Mapping[str, tuple[tuple[int, ...], int]]
    window: int
    is_crossing: bool


def take_snapshot(cache: Any) -> list[LayerSnapshot]:
    """Return the layers of a cache object: of transformers, or any nesting of objects, lists and dicts with tensors.

    >>> import torch
    >>> take_snapshot([(torch.zeros(1, 2, 8, 4), torch.zeros(1, 2, 8, 4))])[0].tensors
    {'0': ((1, 2, 8, 4), 4), '1': ((1, 2, 8, 4), 4)}
    """
    return list(_walk(cache, set(), "cross" in type(cache).__name__.lower()))


def _walk(value: Any, seen: set[int], crossing: bool) -> Iterator[LayerSnapshot]:
    """Yield a layer for each object that holds tensors of two or more dimensions; `crossing`: of cross attention."""
    if id(value) in seen or isinstance(value, (torch.Tensor, torch.nn.Module, str, bytes, type)):
        return
    seen.add(id(value))
    items = dict(_items(value))
    held = {name: item for name, item in items.items() if isinstance(item, torch.Tensor) and item.dim() > 1}
    if held:
        tensors = {name: (tuple(item.shape), item.element_size()) for name, item in held.items()}
        yield LayerSnapshot(tensors, int(getattr(value, "sliding_window", 0) or 0), crossing)
    for name, item in items.items():
        if name not in held:
            yield from _walk(item, seen, crossing or "cross" in name)


def _items(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, (Mapping, list, tuple)):
        items = value.values() if isinstance(value, Mapping) else value
        return ((f"{index}", item) for index, item in enumerate(items))
    return _attributes(vars(value)) if hasattr(value, "__dict__") else ()


def _attributes(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield attributes: each tensor of a dict, such as a layer's states, and of a list, on its own.

    A list of tensors has one for each layer, and other items for layers without it.
    """
    for name, value in attributes.items():
        if isinstance(value, Mapping) and value and all(isinstance(item, torch.Tensor) for item in value.values()):
            yield from ((f"{name}[{key}]", item) for key, item in value.items())
        elif isinstance(value, list) and any(isinstance(item, torch.Tensor) for item in value):
            yield from ((f"{name}[{index}]", [item]) for index, item in enumerate(value))
        else:
            yield name, value


def read_cache(before: Sequence[LayerSnapshot], after: Sequence[LayerSnapshot]) -> tuple[CacheLayer, ...]:
    """Return the cache of each layer, from its tensors before and after one more token of one sequence.

    A tensor that grows by one in one dimension, or is as long as the layer's window, holds tokens; others are states.
    Caches with other layers after the token than before, and that grow otherwise, raise ValueError.
    """
    if [list(layer.tensors) for layer in before] != [list(layer.tensors) for layer in after]:
        raise ValueError("the cache has other tensors after one more token than before it")
    return tuple(map(_read_layer, before, after))


def _read_layer(before: LayerSnapshot, after: LayerSnapshot) -> CacheLayer:
    token = heads = state = 0
    shape: tuple[int, ...] = ()
    tensors, window, crossing = after
    for name, (sizes, element) in tensors.items():
        old = before.tensors[name][0]
        grown = [axis for axis, (first, second) in enumerate(zip(old, sizes, strict=True)) if first != second]
        numel = torch.Size(sizes).numel()
        if grown or crossing or (window and len(sizes) == 4 and sizes[-2] in (window - 1, window)):
            axis = grown[0] if grown else -2
            if grown and (len(grown) > 1 or sizes[axis] != old[axis] + 1):
                raise ValueError(f"a tensor {name} of the cache grew from {old} to {sizes} by one token")
            token += numel // sizes[axis]
            heads = sizes[1] if len(sizes) == 4 else 1
        else:
            state += numel * element
            if len(sizes) == 4:
                shape = sizes[1:]
    kind = "cross attention" if crossing else "sliding window" if window else "full" if token else "state"
    return CacheLayer(kind, token, heads, window, state, shape)


def sequence_bytes(
    layers: Sequence[CacheLayer], tokens: int, element: float = 2.0, *, ranks: int = 1, encoded: int = 0
) -> float:
    """Return the bytes of the cache of one sequence of `tokens` tokens, on one of `ranks` that divide the heads.

    `encoded` of the tokens are an encoder's, which layers of cross attention keep, and others the rest.

    >>> sequence_bytes([CacheLayer("full", 2048, 8), CacheLayer("sliding window", 2048, 8, 128)], 1000)
    4620288.0
    """
    own = tokens - encoded
    return sum(
        layer.nbytes(encoded if layer.kind == "cross attention" else own, element, ranks=ranks) for layer in layers
    )
