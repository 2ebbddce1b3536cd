"""Compare strides and storages of shape execution with real execution, by rule and by torch's samples of its ops."""

from collections import Counter

import pytest
import torch

from fvflops.capture.shapes.rules.shape_rules import CPU_RULES, RULES
from fvflops.capture.shapes.shape_cache import clear_cache
from fvflops.trace import StopsAt
from tests.support.old_torch import OLDER
from tests.support.opinfo import FORMATS, LAYOUTS, STOPS, check_op, compare, in_format, main_dtype, numbers, op_infos

OPS = torch.ops.aten
if OLDER:
    pytest.skip("the rules follow a newer torch", allow_module_level=True)

# Formats that models use; "reversed" and "sliced" are rare, and are tested in the long sweep.
COMMON_FORMATS = ("contiguous", "transposed", "channels_last")


# By default every fourth op is compared without composite ops too: most are not composite.
@pytest.mark.parametrize(
    ("name", "op", "args", "stops_at"),
    [
        pytest.param(*case, stops, id=f"{case[0]}-{kind}", marks=pytest.mark.long if kind and place % 4 else ())
        for place, case in enumerate(LAYOUTS)
        for kind, stops in (("", STOPS), ("none", StopsAt()))
    ],
)
def test_results_have_the_layouts_of_real_execution(name, op, args, stops_at):
    for memory_format in FORMATS:
        if op is OPS.native_channel_shuffle and stops_at is not STOPS and memory_format != "contiguous":
            continue  # its decomposition creates a view, which raises
        formatted = in_format(args, memory_format)
        assert compare(op, formatted, stops_at=stops_at) == "", memory_format


@pytest.mark.parametrize("table", ["rules", "quick"])
def test_comparison_detects_a_result_with_another_layout(table, monkeypatch):
    if table == "rules":
        op, args, name = OPS.max_pool1d, (numbers(2, 3, 8).mT.contiguous().mT, [2]), "aten::max_pool1d"
        monkeypatch.setitem(CPU_RULES, name, lambda self, *_: self[..., ::2].mT.contiguous().mT)
    else:
        op, args, name = OPS.mse_loss, (numbers(2, 3), numbers(2, 3)), "aten::mse_loss"
        monkeypatch.setitem(RULES, name, lambda self, *_: self.new_empty(()))
    clear_cache()
    try:
        assert compare(op, args) != ""
    finally:
        clear_cache()


# Ops whose layouts or bytes once differed from real execution, and common ones.
QUICK_OPS = frozenset(
    """
    __rpow__ add addmm as_strided_scatter bmm cat cdist clone copysign cumsum diag_embed div einsum expand fft.fft2
    fft.hfft fft.hfft2 fft.irfft fft.irfftn fft.rfft2 floor_divide frexp gather heaviside index_select inner istft ldexp
    linalg.lstsq linalg.matrix_power linalg.norm linalg.qr linalg.svd logaddexp logical_and logical_xor masked_fill
    masked_select matmul max mean mul mvlgamma narrow native_batch_norm native_dropout_backward
    nn.functional.avg_pool2d nn.functional.batch_norm nn.functional.conv1d nn.functional.conv2d nn.functional.conv3d
    nn.functional.conv_transpose1d nn.functional.conv_transpose2d nn.functional.dropout nn.functional.embedding
    nn.functional.embedding_bag nn.functional.glu nn.functional.group_norm nn.functional.hardtanh
    nn.functional.interpolate nn.functional.layer_norm nn.functional.linear nn.functional.logsigmoid
    nn.functional.max_pool1d nn.functional.max_pool2d nn.functional.max_unpool2d nn.functional.mse_loss
    nn.functional.multi_head_attention_forward nn.functional.nll_loss nn.functional.pad nn.functional.pixel_shuffle
    nn.functional.pixel_unshuffle nn.functional.prelu nn.functional.relu6
    nn.functional.scaled_dot_product_attention nn.functional.silu nn.functional.softmax nn.functional.unfold nonzero
    normal permute pow repeat_interleave reshape roll scatter softmax sort split stack stft sum to topk transpose unbind
    unfold unique view where
    """.split()  # noqa: SIM905
)
# Each op is compared in the next of these that it has samples of; the long sweep compares all ops in all.
VARIANTS = [*((memory_format, torch.float32) for memory_format in COMMON_FORMATS), ("contiguous", torch.int64)]
MAX_SAMPLES = {"contiguous": 1, "transposed": 3, "channels_last": 3}


def test_samples_of_common_ops_have_the_layouts_of_real_execution():
    compared, problems = Counter(), []
    for index, info in enumerate(info for info in op_infos() if info.name in QUICK_OPS):
        for memory_format, dtype in (*VARIANTS[index % 4 :], *VARIANTS[: index % 4]):
            checks = []
            if info.supports_dtype(dtype, "cpu"):
                checks = list(check_op(info, dtype, memory_format, MAX_SAMPLES[memory_format]))
            if checks:
                compared[memory_format, dtype] += len(checks)
                problems += [item for item in checks if item.problem or item.refused]
                break
    assert problems == []
    assert min(compared[variant] for variant in VARIANTS) > 10, compared


# Ops that shape execution does not support in any format; it raises, and execution="auto" uses real execution.
UNSUPPORTED = {
    "corrcoef": "it checks whether its weights are positive",
    "cov": "it checks whether its weights are positive",
    "linalg.lstsq": "gelsd and gelss return residuals if the rank is full",
    "linalg.lstsq.grad_oriented": "gelsd and gelss return residuals if the rank is full",
    "nn.functional.gaussian_nll_loss": "it checks whether the variances are positive",
    "sparse.mm.reduce": "sparse tensors have no shape rules",
    "sparse.sampled_addmm": "sparse tensors have no shape rules",
    "to_sparse": "sparse tensors have no shape rules",
    "view_copy": "torch has no shape rule for its overload with a dtype",
}
# For slices the kernel copies its argument's full storage, which may end after the last element.
COPIES_FULL_STORAGE = frozenset({"as_strided_scatter", "diagonal_scatter", "select_scatter", "slice_scatter"})


def sweep(info, memory_format, **options):
    dtype = main_dtype(info)
    checks = [] if dtype is None else list(check_op(info, dtype, memory_format, **options))
    assert all(item.op in UNSUPPORTED for item in checks if item.refused), [item for item in checks if item.refused]
    return [item for item in checks if item.problem]


def name_of(info):
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


def pytest_generate_tests(metafunc):
    """Create a test for each op if long tests are selected; importing torch's samples takes a second."""
    if "info" in metafunc.fixturenames:
        long_selected = metafunc.config.getoption("markexpr") != "not long"
        infos = [info for info in op_infos() if not info.name.startswith("jiterator")] if long_selected else []
        metafunc.parametrize("info", infos, ids=name_of)


@pytest.mark.long
def test_every_sample_has_the_layout_of_real_execution(info):
    for memory_format in COMMON_FORMATS:
        assert sweep(info, memory_format) == []


@pytest.mark.long
def test_samples_with_unusual_strides_have_the_layouts_of_real_execution(info):
    for memory_format in set(FORMATS) - set(COMMON_FORMATS):
        assert [item for item in sweep(info, memory_format) if item.op not in COPIES_FULL_STORAGE] == []


@pytest.mark.long
def test_decomposed_samples_have_the_layouts_of_real_execution(info):
    for memory_format in COMMON_FORMATS:
        assert sweep(info, memory_format, most=12, stops_at=StopsAt()) == []


@pytest.mark.long
def test_samples_with_unknown_values_have_the_layouts_of_real_execution(info, monkeypatch):
    monkeypatch.setattr("fvflops.capture.shapes.concrete_tensors.CONCRETE_LIMIT", -1)
    clear_cache()
    for memory_format in COMMON_FORMATS:
        assert sweep(info, memory_format, most=6) == []
