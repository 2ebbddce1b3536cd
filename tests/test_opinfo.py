"""Strides and storages of shape execution against real execution: rule by rule, and by torch's samples of its ops."""

from typing import Any

import pytest
import torch

from fvflops.capture.shapes.layouts import elementwise, memory_formats, spectra
from fvflops.capture.shapes.rules import CPU_RULES, RULES
from fvflops.capture.shapes.shape_cache import clear_cache
from fvflops.trace import StopsAt
from tests.opinfo import FORMATS, STOPS, check_op, difference, in_format, main_dtype, op_infos, run
from tests.test_examples import OLDER

OPS = torch.ops.aten
if OLDER:
    pytest.skip("the rules follow a newer torch", allow_module_level=True)

# What models use; "reversed" and "sliced" are stranger, and looked at in the long sweep.
THREE = ("contiguous", "transposed", "channels_last")


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


def ids(case: Any) -> str:
    return case if isinstance(case, str) else ""


@pytest.mark.parametrize("stops_at", [STOPS, StopsAt()], ids=["default", "none"])
@pytest.mark.parametrize(("name", "op", "args"), LAYOUTS, ids=ids)
def test_results_lie_in_memory_as_those_of_a_real_run(name: str, op: Any, args: tuple[Any, ...], stops_at: StopsAt):
    for memory_format in FORMATS:
        if op is OPS.native_channel_shuffle and stops_at is not STOPS and memory_format != "contiguous":
            continue  # looked into, it makes a view, which raises
        given = in_format(args, memory_format)
        real, shapes = (run(op, given, {}, execution, stops_at=stops_at) for execution in ("real", "shapes"))
        assert difference(real, shapes) == "", memory_format


def test_every_rule_about_layouts_is_tested():
    rules = {
        name
        for module in (elementwise, memory_formats, spectra)
        for name in (*getattr(module, "RULES", ()), *module.CPU_RULES)
    }
    assert rules - {name for name, _, _ in LAYOUTS} == set()


@pytest.mark.parametrize("table", ["rules", "quick"])
def test_the_comparison_sees_a_result_that_lies_elsewhere(table: str, monkeypatch):
    if table == "rules":
        op, args, name = OPS.max_pool1d, (numbers(2, 3, 8).mT.contiguous().mT, [2]), "aten::max_pool1d"
        monkeypatch.setitem(CPU_RULES, name, lambda self, *_: self[..., ::2].mT.contiguous().mT)
    else:
        op, args, name = OPS.mse_loss, (numbers(2, 3), numbers(2, 3)), "aten::mse_loss"
        monkeypatch.setitem(RULES, name, lambda self, *_: self.new_empty(()))
    clear_cache()
    try:
        assert difference(*(run(op, args, {}, execution) for execution in ("real", "shapes"))) != ""
    finally:
        clear_cache()


# Those whose results lay otherwise than a real run's, or took another number of bytes, and common ones.
QUICK = frozenset(
    """
    __rpow__ add as_strided_scatter bmm cat cdist clone copysign cumsum diag_embed div einsum expand fft.fft2 fft.hfft
    fft.hfft2 fft.irfft fft.irfftn fft.rfft2 floor_divide frexp heaviside index_select inner istft ldexp linalg.lstsq
    linalg.matrix_power linalg.norm linalg.qr linalg.svd logaddexp logical_and logical_xor masked_fill masked_select
    matmul mul mvlgamma native_batch_norm native_dropout_backward nn.functional.avg_pool2d nn.functional.batch_norm
    nn.functional.conv1d nn.functional.conv2d nn.functional.conv3d nn.functional.conv_transpose1d
    nn.functional.conv_transpose2d nn.functional.dropout nn.functional.embedding_bag nn.functional.glu
    nn.functional.group_norm nn.functional.hardtanh nn.functional.interpolate nn.functional.layer_norm
    nn.functional.linear nn.functional.logsigmoid nn.functional.max_pool1d nn.functional.max_pool2d
    nn.functional.max_unpool2d nn.functional.mse_loss nn.functional.multi_head_attention_forward
    nn.functional.nll_loss nn.functional.pad nn.functional.pixel_shuffle nn.functional.pixel_unshuffle
    nn.functional.prelu nn.functional.relu6 nn.functional.scaled_dot_product_attention nn.functional.silu
    nn.functional.softmax nn.functional.unfold nonzero normal permute pow repeat_interleave roll sort stft sum topk
    unique where
    """.split()  # noqa: SIM905
)
MOST = {"contiguous": 1, "transposed": 3, "channels_last": 3}


@pytest.mark.parametrize("memory_format", THREE)
def test_samples_of_common_ops_lie_in_memory_as_those_of_a_real_run(memory_format: str):
    compared, problems = 0, []
    for info in op_infos():
        if info.name in QUICK:
            for checked in check_op(info, torch.float32, memory_format, MOST[memory_format]):
                compared += 1
                if checked.problem or checked.refused:
                    problems.append(checked)
    assert problems == []
    assert compared > {"contiguous": 80, "transposed": 100, "channels_last": 20}[memory_format]


# --- the long sweep ----------------------------------------------------------------------------------------------

# What shape execution cannot run, in any format: it says so, and such a model is run for real.
REFUSED = {
    "corrcoef": "it looks whether its weights are positive",
    "cov": "it looks whether its weights are positive",
    "linalg.lstsq": "gelsd and gelss give residuals where the rank is full",
    "linalg.lstsq.grad_oriented": "gelsd and gelss give residuals where the rank is full",
    "nn.functional.gaussian_nll_loss": "it looks whether the variances are positive",
    "sparse.mm.reduce": "sparse tensors have no shape rules",
    "sparse.sampled_addmm": "sparse tensors have no shape rules",
    "to_sparse": "sparse tensors have no shape rules",
    "view_copy": "torch has no shape rule for its overload with a dtype",
}
# Of slices: the kernel copies the whole storage of its argument, also where that ends after the last element.
WHOLE_STORAGE = frozenset({"as_strided_scatter", "diagonal_scatter", "select_scatter", "slice_scatter"})


def sweep(info: Any, memory_format: str, **options: Any) -> list[Any]:
    dtype = main_dtype(info)
    found = [] if dtype is None else list(check_op(info, dtype, memory_format, **options))
    assert all(item.op in REFUSED for item in found if item.refused), [item for item in found if item.refused]
    return [item for item in found if item.problem]


def named(info: Any) -> str:
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test of each op, where the long tests are asked for: torch's samples take a second to import."""
    if "info" in metafunc.fixturenames:
        asked = metafunc.config.getoption("markexpr") != "not long"
        infos = [info for info in op_infos() if not info.name.startswith("jiterator")] if asked else []
        metafunc.parametrize("info", infos, ids=named)


@pytest.mark.long
def test_every_sample_lies_in_memory_as_that_of_a_real_run(info: Any):
    for memory_format in THREE:
        assert sweep(info, memory_format) == []


@pytest.mark.long
def test_samples_in_strange_strides_lie_in_memory_as_those_of_a_real_run(info: Any):
    for memory_format in set(FORMATS) - set(THREE):
        assert [item for item in sweep(info, memory_format) if item.op not in WHOLE_STORAGE] == []


@pytest.mark.long
def test_samples_looked_into_lie_in_memory_as_those_of_a_real_run(info: Any):
    for memory_format in THREE:
        assert sweep(info, memory_format, most=12, stops_at=StopsAt()) == []


@pytest.mark.long
def test_samples_without_numbers_lie_in_memory_as_those_of_a_real_run(info: Any, monkeypatch):
    monkeypatch.setattr("fvflops.capture.shapes.concrete_tensors.CONCRETE_LIMIT", -1)
    clear_cache()
    for memory_format in THREE:
        assert sweep(info, memory_format, most=6) == []
