"""Bounds checks of embeddings, which shape execution would not make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from fvflops.torch_internals import disable_dispatch_modes


class BoundsCheckedEmbedding(TorchFunctionMode):
    """Raise IndexError where an embedding is indexed beyond its last row, as real execution does; a context manager.

    Only indices with values are checked, such as token and position ids in shape execution.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is F.embedding and len(args) > 1:
            _check(indices=args[0], weight=args[1])
        return func(*args, **(kwargs or {}))


def _check(weight: torch.Tensor, indices: torch.Tensor) -> None:
    if type(indices) is not torch.Tensor or indices.device.type == "meta" or not indices.numel():
        return
    with disable_dispatch_modes():
        highest = int(indices.max())
    if highest >= weight.shape[0]:
        raise IndexError(f"an embedding of {weight.shape[0]:,} rows has no row {highest:,} (counted from 0)")
