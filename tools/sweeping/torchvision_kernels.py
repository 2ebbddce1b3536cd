"""Kernels in Python for the two operators of torchvision that detection models run, where its own cannot be loaded.

A CPU build of torch cannot load the library of torchvision's wheel, which is linked against CUDA. Schemas alone let
the models be built; a detection model that is run for real needs `nms` and `roi_align` too.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

_ROIS_AT_ONCE = 64  # the Python roi_align holds every sample of every bin

_libraries: list[torch.library.Library] = []


def define_torchvision_kernels() -> None:
    """Define both on the CPU, once, unless torchvision's own are there."""
    import torchvision

    if _libraries or torchvision.extension._has_ops():
        return
    library = torch.library.Library("torchvision", "IMPL", "CPU")
    library.impl("nms", suppress)
    library.impl("roi_align", align)
    _libraries.append(library)
    # torchvision asks this before it calls an operator; `torchvision.ops.roi_align` is the function, not the module.
    torchvision.extension._has_ops = lambda: True
    sys.modules["torchvision.ops.roi_align"]._has_ops = lambda: True  # type: ignore[attr-defined]


def suppress(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Return the indices of the boxes that are kept, best first: none overlaps a better one by more than the threshold.

    >>> suppress(torch.tensor([[0.0, 0, 2, 2], [0, 0, 2, 1.9], [5, 5, 6, 6]]), torch.tensor([0.5, 0.9, 0.1]), 0.5)
    tensor([1, 2])
    """
    order = scores.sort(descending=True, stable=True).indices
    boxes = boxes[order]
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    alive = torch.ones(len(boxes), dtype=torch.bool)
    kept = []
    for index in range(len(boxes)):
        if not alive[index]:
            continue
        kept.append(index)
        corner = torch.maximum(boxes[index, :2], boxes[index + 1 :, :2])
        opposite = torch.minimum(boxes[index, 2:], boxes[index + 1 :, 2:])
        shared = (opposite - corner).clamp(min=0).prod(dim=1)
        alive[index + 1 :] &= shared <= iou_threshold * (areas[index] + areas[index + 1 :] - shared)
    return order[torch.tensor(kept, dtype=torch.int64)]


def align(features: torch.Tensor, rois: torch.Tensor, *options: Any) -> torch.Tensor:
    """Return torchvision's own Python version of roi_align, without the compiler that it asks for."""
    plain = sys.modules["torchvision.ops.roi_align"]._roi_align.__wrapped__
    parts = [plain(features, part, *options) for part in rois.split(_ROIS_AT_ONCE)]
    return torch.cat(parts)
