"""Triton kernels that are launched as libraries do: directly, and as an op of torch.library."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def add_kernel(left, right, out, length, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < length
    tl.store(out + offsets, tl.load(left + offsets, mask=mask) + tl.load(right + offsets, mask=mask), mask=mask)


def add(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return a sum, by a kernel that no dispatcher sees."""
    out = torch.empty_like(left)
    add_kernel[(triton.cdiv(out.numel(), 1024),)](left, right, out, out.numel(), BLOCK=1024)
    return out


@torch.library.triton_op("gpu_checks::add", mutates_args={})
def add_as_op(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return a sum, by an op of torch.library."""
    out = torch.empty_like(left)
    grid = (triton.cdiv(out.numel(), 1024),)
    torch.library.wrap_triton(add_kernel)[grid](left, right, out, out.numel(), BLOCK=1024)
    return out
