"""Deformable convolution in torch, made of grid_sample: the values that the programs must compute."""

import torch
import torch.nn.functional as F

from tests.support.oracle.number import indexes


def deform(image, weight, offset, mask, bias, window, groups, masked):
    """Return a deformable convolution by grid_sample, one place of the kernel after another, then one product."""
    batch, channels, height, width = image.shape
    rows, columns = offset.shape[2:]
    shares = image.reshape(batch * groups, channels // groups, height, width)
    parts = []
    for i, (y, x) in enumerate(indexes(weight.shape[2:])):
        moved = offset.reshape(batch * groups, -1, 2, rows, columns)[:, i]
        start = torch.arange(rows)[:, None] * window.stride[0] - window.padding[0] + y * window.dilation[0]
        other = torch.arange(columns)[None] * window.stride[1] - window.padding[1] + x * window.dilation[1]
        # A zero border of two keeps grid_sample from dividing by a size of 1 - 1.
        bordered = F.pad(shares, (2, 2, 2, 2))
        places = torch.stack([(moved[:, 1] + other + 2) / (width + 3), (moved[:, 0] + start + 2) / (height + 3)], -1)
        sampled = F.grid_sample(bordered, places * 2 - 1, align_corners=True)
        if masked:
            sampled = sampled * mask.reshape(batch * groups, -1, 1, rows, columns)[:, i]
        parts.append(sampled.reshape(batch, channels, rows, columns))
    taken = torch.stack(parts, 2).reshape(batch, window.groups, -1, rows * columns)
    kernels = weight.reshape(window.groups, -1, weight[0].numel())
    product = torch.einsum("gok,bgkp->bgop", kernels, taken)
    return product.reshape(batch, -1, rows, columns) + bias[:, None, None]
