"""Calls whose results torch's shape rules lay out in memory otherwise than its kernels do."""

from typing import Any

import torch

OPS = torch.ops.aten


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def places(*shape: int) -> torch.Tensor:
    """Return the places that max_pool2d_with_indices gives."""
    return torch.nn.functional.max_pool2d(numbers(*shape), 2, return_indices=True)[1]


# By name of the rule: calls whose results' strides or storage torch's own rules give otherwise.
LAYOUTS: list[tuple[str, Any, tuple[Any, ...]]] = [
    ("aten::floor_divide", OPS.floor_divide, (numbers(4, 1, 3), numbers(4, 3) + 1)),
    ("aten::glu", OPS.glu, (numbers(1, 2, 6, 4), 2)),
    ("aten::ldexp.Tensor", OPS.ldexp, (numbers(4, 1, 3), numbers(4, 3))),
    ("aten::mvlgamma", OPS.mvlgamma, (numbers(3, 4) + 2, 2)),
    ("aten::pow.Scalar", OPS.pow, (2.0, numbers(3, 4))),
    ("aten::log_sigmoid", OPS.log_sigmoid, (numbers(3, 4),)),
    ("aten::log_sigmoid_forward", OPS.log_sigmoid_forward, (numbers(3, 4),)),
    ("aten::log_sigmoid_backward", OPS.log_sigmoid_backward, (numbers(3, 4), numbers(3, 4), numbers(3, 4))),
    *(
        (f"aten::{name}", getattr(OPS, name), (numbers(3, 4), numbers(3, 4), *rest))
        for name, rest in (
            ("binary_cross_entropy", ()),
            ("mse_loss", ()),
            ("smooth_l1_loss", ()),
            ("soft_margin_loss", ()),
        )
    ),
    *(
        (f"aten::{name}", getattr(OPS, name), (numbers(3, 4), numbers(3, 4), numbers(3, 4), 0, *rest))
        for name, rest in (
            ("huber_loss_backward", (1.0,)),
            ("mse_loss_backward", ()),
            ("smooth_l1_loss_backward", (1.0,)),
        )
    ),
    *(
        (f"aten::{name}", getattr(OPS, name), (numbers(3, 4), numbers(3, 4), 1, torch.float32))
        for name in ("_log_softmax_backward_data", "_softmax_backward_data")
    ),
    ("aten::col2im", OPS.col2im, (numbers(2, 36, 16), [4, 4], [3, 3], [1, 1], [1, 1], [1, 1])),
    ("aten::im2col", OPS.im2col, (numbers(2, 3, 5, 5), [2, 2], [2, 2], [0, 0], [4, 4])),
    ("aten::normal.Tensor_Tensor", OPS.normal, (numbers(3, 4), numbers(3, 4))),
    ("aten::normal.Tensor_float", OPS.normal, (numbers(3, 4), 1.0)),
    ("aten::normal.float_Tensor", OPS.normal, (1.0, numbers(3, 4))),
    ("aten::_upsample_nearest_exact1d", OPS._upsample_nearest_exact1d, (numbers(2, 3, 4), [6])),
    ("aten::upsample_nearest1d", OPS.upsample_nearest1d, (numbers(2, 3, 4), [6])),
    *(
        (f"aten::{name}2d{more}", getattr(OPS, f"{name}2d{more}"), (numbers(*shape), [6, 7], *rest))
        for name, more, rest in (
            ("_upsample_nearest_exact", "", ()),
            ("upsample_bicubic", "", (False,)),
            ("upsample_bilinear", "", (False,)),
            ("upsample_nearest", "", ()),
            ("_upsample_bicubic", "_aa", (False,)),
            ("_upsample_bilinear", "_aa", (False,)),
        )
        for shape in ((2, 3, 4, 5), (2, 1, 4, 5))
    ),
    *(
        (f"aten::{name}3d", getattr(OPS, f"{name}3d"), (numbers(2, 3, 4, 5, 4), [6, 7, 5], *rest))
        for name, rest in (("_upsample_nearest_exact", ()), ("upsample_nearest", ()), ("upsample_trilinear", (False,)))
    ),
    ("aten::upsample_linear1d", OPS.upsample_linear1d, (numbers(2, 3, 4), [6], False)),
    ("aten::linalg_vector_norm", OPS.linalg_vector_norm, (numbers(2, 1, 4, 5), 2, [1], True)),
    ("aten::roll", OPS.roll, (numbers(2, 3, 4, 5), [1, 2], [2, 3])),
    ("aten::native_dropout", OPS.native_dropout, (numbers(2, 1, 4, 5), 0.5, True)),
    ("aten::replication_pad2d", OPS.replication_pad2d, (numbers(2, 3, 4, 5), [1, 2, 0, 1])),
    ("aten::replication_pad3d", OPS.replication_pad3d, (numbers(2, 3, 4, 5, 4), [1, 2, 0, 1, 1, 1])),
    ("aten::reflection_pad2d", OPS.reflection_pad2d, (numbers(2, 3, 4, 5), [1, 2, 0, 1])),
    ("aten::reflection_pad3d", OPS.reflection_pad3d, (numbers(2, 3, 4, 5, 4), [1, 2, 0, 1, 1, 1])),
    *(
        (
            f"aten::{name}_backward",
            getattr(OPS, f"{name}_backward"),
            (numbers(2, 3, 5, 8), numbers(2, 3, 4, 5), [1, 2, 0, 1]),
        )
        for name in ("reflection_pad2d", "replication_pad2d")
    ),
    ("aten::channel_shuffle", OPS.channel_shuffle, (numbers(2, 4, 3, 5), 2)),
    ("aten::native_channel_shuffle", OPS.native_channel_shuffle, (numbers(2, 4, 3, 5), 2)),
    ("aten::pixel_shuffle", OPS.pixel_shuffle, (numbers(2, 8, 3, 5), 2)),
    ("aten::pixel_unshuffle", OPS.pixel_unshuffle, (numbers(2, 3, 4, 6), 2)),
    ("aten::max_unpool2d", OPS.max_unpool2d, (numbers(2, 3, 2, 3), places(2, 3, 4, 6), [4, 6])),
    ("aten::max_pool1d", OPS.max_pool1d, (numbers(2, 3, 8), [2])),
    (
        "aten::nll_loss2d_forward",
        OPS.nll_loss2d_forward,
        (numbers(2, 3, 4, 5), torch.zeros(2, 4, 5, dtype=torch.int64), None, 0, -100),
    ),
    *(
        ("aten::_fft_c2c", OPS._fft_c2c, (numbers(3, 4, 5, dtype=torch.complex64), dims, 0, True))
        for dims in ([0], [1, 2], [0, 2])
    ),
    *(
        ("aten::_fft_c2r", OPS._fft_c2r, (numbers(3, 4, 5, dtype=torch.complex64), dims, 0, 2 * size - 2))
        for dims, size in (([0], 3), ([1, 2], 5), ([2, 0], 3))
    ),
    *(("aten::_fft_r2c", OPS._fft_r2c, (numbers(3, 4, 5), dims, 0, True)) for dims in ([0], [1, 2], [2, 0])),
    *(
        (
            "aten::convolution",
            getattr(torch.nn.functional, f"conv{transposed}{rank}d"),
            (numbers(2, *sides), numbers(*weight)),
        )
        for transposed in ("", "_transpose")
        for rank, sides, weight in (
            (1, (4, 6), (4, 4, 3)),
            (2, (4, 6, 5), (4, 4, 3, 3)),
            (2, (4, 6, 5), (4, 4, 1, 1)),
            (3, (4, 6, 5, 6), (4, 4, 3, 3, 3)),
        )
    ),
    ("aten::convolution", torch.nn.functional.conv2d, (numbers(2, 4, 6, 5), numbers(4, 1, 3, 3), None, 1, 0, 1, 4)),
    ("aten::convolution", torch.nn.functional.conv2d, (numbers(2, 4, 1, 1), numbers(4, 4, 1, 1))),
    *(
        (f"aten::{name}", getattr(OPS, name), (numbers(2, 3, 4, 5), numbers(2, 3, 4, 5), *rest))
        for name, rest in (
            ("native_batch_norm_backward", (*[numbers(3) for _ in range(5)], True, 1e-5, [True, True, True])),
            ("batch_norm_backward", (*[numbers(3) for _ in range(5)], True, 1e-5, [True] * 3, numbers(0))),
            (
                "native_layer_norm_backward",
                ([4, 5], *[numbers(2, 3, 1, 1)] * 2, *[numbers(4, 5)] * 2, [True, True, True]),
            ),
        )
    ),
    *(
        (
            "aten::convolution_backward",
            OPS.convolution_backward,
            (
                numbers(2, 4, *sides),
                numbers(2, 4, *sides),
                numbers(4, 4, *kernel),
                [4],
                *again,
                False,
                zeros,
                1,
                [True] * 3,
            ),
        )
        for sides, kernel in (((6,), (3,)), ((6, 5), (3, 3)), ((1, 1), (1, 1)), ((4, 4, 4), (3, 3, 3)))
        for again, zeros in ((([1] * len(sides), [kernel[0] // 2] * len(sides), [1] * len(sides)), [0] * len(sides)),)
    ),
    (
        "aten::_convolution",
        OPS._convolution,
        (numbers(2, 4, 6, 5), numbers(4, 4, 3, 3), None, *[[1, 1]] * 3, False, [0, 0], 1, False, False, True, True),
    ),
    ("aten::native_group_norm", OPS.group_norm, (numbers(2, 4, 3, 5), 4, numbers(4), numbers(4))),
    ("aten::group_norm", OPS.group_norm, (numbers(2, 4, 3, 5), 2)),
    *(
        ("aten::native_batch_norm", op, (numbers(*shape), *[numbers(shape[1]) for _ in range(4)], trains, 0.1, 1e-5))
        for op in (OPS.native_batch_norm, OPS._native_batch_norm_legit)
        for shape in ((2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (1, 3, 1, 1))
        for trains in (False, True)
    ),
    ("aten::native_batch_norm", OPS.native_batch_norm, (numbers(2, 3, 4), None, None, None, None, True, 0.1, 1e-5)),
    (
        "aten::_native_batch_norm_legit.no_stats",
        OPS._native_batch_norm_legit,
        (numbers(1, 2, 3), None, None, True, 0.1, 1e-5),
    ),
]
