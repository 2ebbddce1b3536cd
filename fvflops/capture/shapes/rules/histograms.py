"""Shape rules of histograms, by number of bins or by bin edges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def histogram_of_count(self: torch.Tensor, bins: int = 100, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the histogram with a number of bins, and the bin edges."""
    return self.new_empty(bins), self.new_empty(bins + 1)


def histogram_of_edges(self: torch.Tensor, bins: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the histogram for given bin edges, and the edges."""
    return self.new_empty(bins.numel() - 1), torch.empty_like(bins)


def histogramdd_bin_edges(self: torch.Tensor, bins: Sequence[int], **_: Any) -> list[torch.Tensor]:
    """Return the bin edges along each axis."""
    return [self.new_empty(number + 1) for number in bins]


def histogramdd_of_counts(self: torch.Tensor, bins: Sequence[int], **_: Any) -> torch.Tensor:
    """Return the counts of points in a grid with a number of bins per axis."""
    return self.new_empty(list(bins))


def histogramdd_of_edges(self: torch.Tensor, bins: Sequence[torch.Tensor], **_: Any) -> torch.Tensor:
    """Return the counts of points in a grid with given edges per axis."""
    return self.new_empty([item.numel() - 1 for item in bins])


RULES: dict[str, Callable[..., Any]] = {
    "aten::_histogramdd_bin_edges": histogramdd_bin_edges,
    "aten::_histogramdd_from_bin_cts": histogramdd_of_counts,
    "aten::_histogramdd_from_bin_tensors": histogramdd_of_edges,
    "aten::histogram.bin_ct": histogram_of_count,
    "aten::histogram.bins_tensor": histogram_of_edges,
}
