"""Multiply-adds of Mamba's fused functions, whose kernels bypass the dispatcher.

A selective scan has a state of size N per channel. Each step updates each state element, a multiply-add
h = a * h + b, and reads it, a multiply-add into y: 2 * N multiply-adds per input element. The discretisation (a and
b), the gate and the skip connection are elementwise and not counted, as in a recurrent layer. A chunked scan (Mamba-2)
is counted as the same recurrence: the chunk size is an implementation detail of the kernel.
"""

from __future__ import annotations

import math

from fvflops.formulas.cost import Cost
from fvflops.formulas.language.call import Call
from fvflops.trace import tensors_in


def count_mamba_inner(call: Call) -> Cost:
    """Return the cost of Mamba's inner function: its convolution, three projections and the scan.

    The tensors are xz [B, 2D, L], the convolution's weight [D, 1, W], the projections' [R + 2N, D], [D, R] and [E, D],
    and A [D, N], in this order; biases may be between them. Source: arXiv:2312.00752, and `MambaInnerFn` of mamba_ssm.

    >>> from fvflops.trace import TensorSpec
    >>> sizes = (2, 8, 5), (4, 1, 3), (7, 4), (4, 1), (6, 4), (4, 3)
    >>> tensors = {f"input_{index}": TensorSpec(shape) for index, shape in enumerate(sizes)}
    >>> count_mamba_inner(Call("mamba", tensors, (TensorSpec((2, 5, 6)),))).macs
    920
    """
    tensors = list(tensors_in(tuple(call.arguments.values())))
    projected, convolved = tensors[:2]
    into_parts, into_steps, projection, decay = [spec for spec in tensors if spec.ndim == 2][:4]
    tokens = projected.shape[0] * projected.shape[2]
    matrices = (convolved, into_parts, into_steps, projection)
    channels = decay.shape[0]
    widths = (
        projected.shape[1] // 2,
        convolved.shape[0],
        into_parts.shape[1],
        into_steps.shape[0],
        projection.shape[1],
    )
    _check(projected.ndim == convolved.ndim == 3 and {*widths} == {channels}, f"{channels} channels", call)
    return Cost(
        macs=tokens * (sum(spec.numel for spec in matrices) + 2 * decay.numel),
        activations=tokens * (3 * channels + into_parts.shape[0] + projection.shape[0]),
    )


def count_mamba_split_scan(call: Call) -> Cost:
    """Return the cost of Mamba-2's fused function: its convolution, the scan, and a projection if there is one.

    The tensors are zxbcdt [B, L, 2 * M + 2 * D + 2 * G * N + H], the convolution's weight [D + 2 * G * N, W] and
    optionally its bias, the bias of the steps [H], A [H], and the skip [H] or [H, P]. Optionally an initial state
    [B, H, P, N], the sequence indices, the norm's weight, and the projection's weight [E, M + D] follow. The number of
    groups G is not an argument: 1 is assumed, unless an initial state determines N. Source: arXiv:2405.21060, and
    `MambaSplitConv1dScanCombinedFn` of mamba_ssm.

    >>> from fvflops.trace import TensorSpec
    >>> sizes = (2, 5, 16), (10, 3), (10,), (2,), (2,), (2,)
    >>> tensors = {f"input_{index}": TensorSpec(shape) for index, shape in enumerate(sizes)}
    >>> count_mamba_split_scan(Call("mamba2", tensors, (TensorSpec((2, 5, 4)),))).macs
    540
    """
    projected, convolved, *rest = tensors_in(tuple(call.arguments.values()))
    channels, window = convolved.shape
    if rest[0].shape == (channels,):  # the convolution's bias
        rest = rest[1:]
    heads = rest[0].shape[0]
    optional = rest[3:]
    projection = next((spec for spec in reversed(optional) if spec.ndim == 2 and spec.is_floating_point), None)
    width = call.out.shape[-1] if projection is None else projection.shape[1]
    mlp_width = projected.shape[-1] - heads - channels - width
    scanned = width - mlp_width
    states = next((spec.shape[-1] for spec in optional if spec.ndim == 4), (channels - scanned) // 2)
    _check(projected.ndim == 3 and min(mlp_width, scanned, states) >= 0 and rest[1].shape == (heads,), "Mamba-2", call)
    tokens = math.prod(projected.shape[:-1])
    return Cost(
        macs=tokens * (channels * window + 2 * scanned * states + (0 if projection is None else projection.numel)),
        activations=tokens * (channels + scanned + (0 if projection is None else projection.shape[0])),
    )


def _check(is_valid: bool, expected: str, call: Call) -> None:
    """Raise ValueError for unexpected tensors: another class may have the same name."""
    if not is_valid:
        raise ValueError(f"the tensors of {call.op} do not match {expected}")
