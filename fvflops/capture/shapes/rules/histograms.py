"""Shape rules of histograms, from the number of bins or their edges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def count(self: torch.Tensor, bins: int = 100, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the histogram with a number of bins, and the bin edges."""
    return self.new_empty(bins), self.new_empty(bins + 1)


def count_between(self: torch.Tensor, bins: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the histogram between given edges, and the edges."""
    return self.new_empty(bins.numel() - 1), torch.empty_like(bins)


def edges(self: torch.Tensor, bins: Sequence[int], **_: Any) -> list[torch.Tensor]:
    """Return the bin edges along each axis."""
    return [self.new_empty(number + 1) for number in bins]


def count_points(self: torch.Tensor, bins: Sequence[int], **_: Any) -> torch.Tensor:
    """Return the counts of points in a grid with a number of bins per axis."""
    return self.new_empty(list(bins))


def count_points_between(self: torch.Tensor, bins: Sequence[torch.Tensor], **_: Any) -> torch.Tensor:
    """Return the counts of points in a grid between given edges."""
    return self.new_empty([item.numel() - 1 for item in bins])


RULES: dict[str, Callable[..., Any]] = {
    "aten::_histogramdd_bin_edges": edges,
    "aten::_histogramdd_from_bin_cts": count_points,
    "aten::_histogramdd_from_bin_tensors": count_points_between,
    "aten::histogram.bin_ct": count,
    "aten::histogram.bins_tensor": count_between,
}
