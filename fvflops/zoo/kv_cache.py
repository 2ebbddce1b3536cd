"""The KV cache of the zoo's decoders, with the names that transformers gives it."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class KVCache:
    """Keys and values of earlier tokens for each attention, each (b, kv_heads, n, head_size)."""

    def __init__(self) -> None:
        self._pairs: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        """The number of tokens, n."""
        return next((keys.shape[2] for keys, _ in self._pairs.values()), 0)

    def extend(self, attention: nn.Module, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values of new tokens; return those of all."""
        if attention in self._pairs:
            before = self._pairs[attention]
            keys, values = torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)
        self._pairs[attention] = keys, values
        return keys, values


class Decoded(NamedTuple):
    """What a decoder returns with `use_cache`."""

    logits: Tensor
    past_key_values: KVCache
