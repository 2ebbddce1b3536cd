"""Count the (query, key) pairs that the block mask of flex attention computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fvflops.capture.recorder.tensor_specs import ExplicitValue
from fvflops.capture.restore import interrupts
from fvflops.torch_internals import disable_dispatch_modes

# Position of the block mask's tuple among an op's arguments; query and key come first.
BLOCK_MASKS = {"flex_attention": 4, "flex_attention_backward": 9}


class CountedMask(ExplicitValue):
    """The mask function of a block mask; in a signature it becomes the number of pairs computed."""

    def __init__(self, function: Callable[..., Any], pairs: int) -> None:
        super().__init__(pairs)
        self._function = function

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self._function(*args)


def count_mask(args: Sequence[Any], position: int, has_values: Callable[[list[Any]], bool]) -> tuple[Any, ...]:
    """Return the arguments of a call of flex attention with the pairs of its block mask counted.

    `has_values` returns whether tensors have values; if not, the arguments are returned unchanged.
    """
    mask = args[position]
    start = next((index for index, item in enumerate(mask) if isinstance(item, torch.Tensor)), len(mask))
    lists = [item for item in mask[start : start + 4] if item is not None]
    if isinstance(mask[-1], ExplicitValue) or not lists or not has_values(lists):
        return tuple(args)
    query, key = args[0].shape, args[1].shape
    with interrupts.deferred(), disable_dispatch_modes():
        # Partial blocks, in which the mask function is evaluated, and full blocks if these are listed separately.
        pairs = sum(
            count_pairs(counts, indices, (query[-2], key[-2]), mask[-3:-1])
            for counts, indices in zip(lists[::2], lists[1::2], strict=True)
        )
        masks = lists[0].numel() // max(1, lists[0].shape[-1])
    repeats = query[0] * query[1] // max(1, masks)  # one mask may apply to all batches, or all heads
    counted_mask = (*mask[:-1], CountedMask(mask[-1], pairs * repeats))
    return (*args[:position], counted_mask, *args[position + 1 :])


def count_pairs(counts: torch.Tensor, indices: torch.Tensor, lengths: tuple[int, int], sizes: tuple[int, int]) -> int:
    """Return the pairs in the blocks of a block mask, with blocks clipped to the sequence lengths.

    `counts` [..., rows] is the number of blocks in a row, `indices` [..., rows, columns] starts with their columns.
    `lengths` are the numbers of queries and keys, `sizes` those of a block.

    >>> count_pairs(torch.tensor([1, 2]), torch.tensor([[0, 1], [0, 1]]), (5, 5), (4, 4))
    21
    """
    rows = torch.arange(counts.shape[-1], dtype=torch.int64, device=counts.device)
    heights = (lengths[0] - rows * sizes[0]).clamp(0, sizes[0])
    is_listed = torch.arange(indices.shape[-1], device=counts.device) < counts.unsqueeze(-1)
    widths = (lengths[1] - indices.to(torch.int64) * sizes[1]).clamp(0, sizes[1])
    return int(((widths * is_listed).sum(-1) * heights).sum())
