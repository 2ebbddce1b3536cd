"""Strides and storages of shape execution against real execution: rule by rule, and by torch's samples of its ops."""

from typing import Any

import pytest
import torch

from fvflops.capture.shapes.layouts import elementwise, memory_formats, spectra
from fvflops.capture.shapes.rules import CPU_RULES, RULES
from fvflops.capture.shapes.shape_cache import clear_cache
from fvflops.trace import StopsAt
from tests.support.layout_cases import LAYOUTS, numbers
from tests.support.old_torch import OLDER
from tests.support.opinfo import FORMATS, STOPS, check_op, difference, in_format, main_dtype, op_infos, run

OPS = torch.ops.aten
if OLDER:
    pytest.skip("the rules follow a newer torch", allow_module_level=True)

# What models use; "reversed" and "sliced" are stranger, and looked at in the long sweep.
THREE = ("contiguous", "transposed", "channels_last")


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
