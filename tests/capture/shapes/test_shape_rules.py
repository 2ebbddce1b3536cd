"""Shape rules: each compared with its op, assumed sizes, and shape execution compared with real execution by op."""

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from fvflops import FlopCountAnalysis, load_table
from fvflops.analysis.table_examples import NotRunnable, bind_example, overloads_of
from fvflops.capture.run import ExecutionError
from fvflops.capture.shapes import concrete_tensors
from fvflops.capture.shapes.metadata import metadata_of
from fvflops.capture.shapes.rules import data_dependent
from fvflops.capture.shapes.rules.assumptions import can_be_assumed
from fvflops.capture.shapes.rules.data_dependent import depends_on_values
from fvflops.capture.shapes.rules.shape_rules import CPU_RULES, RULES, ShapeRules
from fvflops.capture.shapes.shape_cache import clear_cache
from fvflops.capture.shapes.shape_tensor import DataDependentError
from fvflops.formulas.language.example import Example
from tests.support.models.parts import Applied
from tests.support.old_torch import OLDER
from tests.support.opinfo import LAYOUTS, check_op, compare, op_infos, run

OPS = torch.ops.aten
META = torch.device("meta")
STOPS = load_table("default").stops_at
if OLDER:
    pytest.skip("the rules follow a newer torch, which has all their ops", allow_module_level=True)


def floats(*shape, dtype=torch.float32):
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def to_meta(values):
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(META), values)


def described(values):
    """Return shape, strides and dtype of every tensor, ignoring strides of dimensions of size 0 or 1."""
    return [describe(item) for item in pytree.tree_leaves(values)]


def describe(value):
    if not isinstance(value, torch.Tensor):
        return value
    strides = [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1]
    return tuple(value.shape), () if 0 in value.shape else tuple(strides), value.dtype


def grouped(dtype, left, right, *group_ends):
    offsets = torch.tensor(group_ends, dtype=torch.int32) if group_ends else None
    return floats(*left, dtype=dtype), floats(*right, dtype=dtype).mT.contiguous().mT, offsets


def recurrent(kind, layers, bidirectional, batch_first, proj_size=0):
    options = {"proj_size": proj_size} if proj_size else {}
    module = getattr(nn, kind)(4, 6, layers, bidirectional=bidirectional, batch_first=batch_first, **options)
    states = layers * (1 + bidirectional)
    hidden = torch.zeros(states, 3, proj_size or 6)
    state = [hidden, torch.zeros(states, 3, 6)] if kind == "LSTM" else hidden
    data = floats(3, 5, 4) if batch_first else floats(5, 3, 4)
    weights = [weight.detach() for weight in module._flat_weights]
    return data, state, weights, True, layers, 0.0, False, bidirectional, batch_first


def packed(kind, layers, bidirectional):
    _, state, weights, *rest = recurrent(kind, layers, bidirectional, False)
    return floats(10, 4), torch.tensor([3, 3, 2, 1, 1]), state, weights, *rest[:-1]


def bag(mode, include_last=False, dtype=torch.float32, weights=None, padding_idx=-1):
    offsets = torch.tensor([0, 3, 6]) if include_last else torch.tensor([0, 3])
    weight, indices = floats(10, 5, dtype=dtype), torch.arange(6)
    return weight, indices, offsets, False, mode, False, weights, include_last, padding_idx


def normalised(*rest, dtype, mixed):
    ones = torch.ones(3, dtype=torch.float32 if mixed else dtype)
    return floats(2, 3, 4, dtype=dtype), *(ones.clone() for _ in range(4)), *rest


CTC = (floats(7, 2, 5).log_softmax(2), torch.tensor([[1, 2, 3], [2, 1, 0]]))

LIKE_OPS = [
    *(OPS.empty_like.default, OPS.zeros_like.default, OPS.ones_like.default),
    *(OPS.rand_like.default, OPS.randn_like.default),
]
# Slices of wider tensors, dense ones and ones with gaps.
SLICED = [floats(4, 9)[:1, :3], floats(3, 7, 2)[:, :1].transpose(0, 1), floats(2)[::2], floats(4, 9)[:2, :3]]


def case(op, *args, **kwargs):
    """Return an op of aten, given or named without its overload "default", and what it is called with."""
    if isinstance(op, str):
        packet, _, overload = op.partition(".")
        op = getattr(getattr(OPS, packet), overload or "default")
    return op, args, kwargs


CASES = [
    case("embedding", torch.ones(10, 4), torch.tensor([[1, 2, 9]])),
    *(
        case("_weight_norm_interface_backward", torch.ones(3, 4, 5), torch.rand(3, 4, 5), g, norms, dim=dim)
        for dim, g, norms in (
            (0, torch.ones(3, 1, 1), torch.ones(3, 1, 1)),
            (2, torch.ones(1, 1, 5), torch.ones(1, 1, 5)),
        )
    ),
    *(
        case("_grouped_mm", *grouped(dtype, *shapes))
        for dtype in (torch.float32, torch.bfloat16)
        for shapes in (
            ((6, 8), (2, 8, 7), 3, 6),
            ((2, 6, 8), (8, 7), 3, 7),
            ((6, 8), (8, 7), 3, 8),
            ((2, 6, 8), (2, 8, 16)),
        )
    ),
    *(
        case(getattr(OPS, kind.lower() if kind != "RNN" else "rnn_tanh").input, *recurrent(kind, *options))
        for kind in ("LSTM", "GRU", "RNN")
        for options in ((1, False, False), (2, True, False), (2, True, True), (1, False, True))
    ),
    case("lstm.input", *recurrent("LSTM", 2, True, True, 2)),
    case("lstm.data", *packed("LSTM", 2, True)),
    case("gru.data", *packed("GRU", 1, True)),
    case("rnn_tanh.data", *packed("RNN", 2, False)),
    case("rnn_relu.input", *recurrent("RNN", 1, False, False)),
    case("rnn_relu.data", *packed("RNN", 1, False)),
    *(
        case(op, *bag(mode, include_last))
        for op in (OPS._embedding_bag.default, OPS._embedding_bag_forward_only.default)
        for mode in (0, 1, 2)
        for include_last in (False, True)
    ),
    case("_embedding_bag", *bag(0, padding_idx=1)),
    case("_embedding_bag", *bag(0, dtype=torch.float64)),
    case("_embedding_bag", *bag(0, weights=floats(6))),
    case("embedding_bag", *bag(0)[:-1]),
    case("embedding_bag.padding_idx", *bag(0)),
    case("embedding_bag.padding_idx", *bag(0, padding_idx=None)),
    *(
        case(op, *normalised(*rest, dtype=dtype, mixed=mixed))
        for dtype in (torch.float32, torch.bfloat16)
        for mixed in (False, True)
        for op, rest in (
            (OPS.native_batch_norm.default, (False, 0.1, 0.1)),
            (OPS.native_batch_norm.default, (True, 0.1, 0.1)),
            (OPS._native_batch_norm_legit.default, (False, 0.1, 0.1)),
            (OPS._native_batch_norm_legit_functional.default, (False, 0.1, 0.1)),
            (OPS._native_batch_norm_legit_functional.default, (True, 0.1, 0.1)),
            (OPS._native_batch_norm_legit_no_training.default, (0.1, 0.1)),
            (OPS._batch_norm_no_update.default, (0.1, 0.1)),
        )
    ),
    case("native_batch_norm", floats(2, 3, dtype=torch.half), *[None] * 4, True, 0.1, 0.1),
    *(
        case("native_layer_norm", floats(2, 3, 4, dtype=dtype), [4], weight, weight, 0.1)
        for dtype in (torch.float32, torch.bfloat16, torch.float64)
        for weight in (None, torch.ones(4, dtype=dtype), *([torch.ones(4)] if dtype is torch.bfloat16 else []))
    ),
    case("batch_norm_update_stats", floats(2, 3, 4), torch.ones(3), torch.ones(3), 0.1),
    *(case("ctc_loss.IntList", *CTC, [7, 6], [3, 2], 0, reduction) for reduction in (0, 1, 2)),
    case("ctc_loss.Tensor", CTC[0][:, 0], CTC[1][0], torch.tensor([7]), torch.tensor([3]), 4, 0),
    case("_ctc_loss", *CTC, [7, 6], [3, 2]),
    case("_ctc_loss_backward", floats(2), *CTC, [7, 6], [3, 2], floats(2), floats(2, 7, 7), 0),
    *(
        case("geqrf", floats(*shape, dtype=dtype))
        for shape in ((4, 3), (2, 3, 5))
        for dtype in (torch.float32, torch.complex64)
    ),
    *(
        case("linalg_lstsq", floats(*a), floats(*b), driver=driver)
        for a, b, driver in (
            ((4, 3), (4, 2), None),
            ((3, 4), (3, 2), "gelsd"),
            ((4, 3), (4,), "gels"),
            ((2, 4, 3), (2, 4, 2), "gels"),
            ((2, 4, 3), (2, 4), "gelsy"),
            ((2, 3, 3), (2, 3, 1), "gelss"),
        )
    ),
    *(
        case("_linalg_svd", floats(*shape), full, vectors)
        for shape in ((4, 3), (2, 3, 5))
        for full in (False, True)
        for vectors in (False, True)
    ),
    case("linalg_eig", floats(2, 4, 4)),
    case("histogram.bin_ct", floats(9), 5),
    case("histogram.bin_ct", floats(9), 5, range=[0.0, 1.0], weight=floats(9)),
    case("histogram.bins_tensor", floats(3, 3), torch.linspace(0, 1, 6)),
    case("_histogramdd_bin_edges", floats(9, 2), [3, 4]),
    case("_histogramdd_from_bin_cts", floats(9, 2), [3, 4]),
    case("_histogramdd_from_bin_tensors", floats(9, 2), [torch.linspace(0, 1, n) for n in (4, 5)]),
    case("_aminmax", floats(3, 4)),
    case("_aminmax.dim", floats(3, 4), 1),
    case("_aminmax.dim", floats(3, 4), 0, True),
    case("_add_relu.Scalar", floats(3, 4), 2),
    case("_compute_linear_combination", floats(3, 4, 5), floats(2, 3)),
    case("_dirichlet_grad", floats(3, 4), floats(3, 4), floats(3, 4)),
    case("_sample_dirichlet", floats(3, 4)),
    case("_standard_gamma_grad", floats(3, 4), floats(3, 4)),
    case("binomial", torch.full((3, 4), 5.0), floats(3, 4)),
    case("_logcumsumexp", floats(3, 4), 1),
    case("_masked_softmax", floats(2, 3, 4, 4), torch.zeros(2, 3, 4, 4, dtype=torch.bool), 3, 2),
    case("_masked_softmax_backward", floats(2, 4), floats(2, 4), torch.zeros(2, 4, dtype=torch.bool), 1),
    case("_transform_bias_rescale_qkv", floats(2, 5, 24), floats(24), 4),
    case("glu_jvp", floats(3, 2), floats(3, 4), floats(3, 4), 1),
    case("glu_backward_jvp", floats(3, 4), floats(3, 2), floats(3, 4), floats(3, 2), floats(3, 4), 1),
    case("fake_quantize_per_tensor_affine_cachemask", floats(3, 4), 0.1, 0, 0, 255),
    case(
        "fake_quantize_per_channel_affine_cachemask",
        floats(3, 4),
        floats(3),
        torch.zeros(3, dtype=torch.int32),
        0,
        0,
        255,
    ),
    case("_fake_quantize_learnable_per_tensor_affine", floats(3, 4), floats(1), torch.zeros(1), 0, 255),
    case(
        "_fake_quantize_learnable_per_tensor_affine_backward",
        floats(3, 4),
        floats(3, 4),
        floats(1),
        torch.zeros(1),
        0,
        255,
    ),
    case("_fake_quantize_learnable_per_channel_affine", floats(3, 4), floats(3), torch.zeros(3), 0, 0, 255),
    case(
        "_fake_quantize_per_tensor_affine_cachemask_tensor_qparams",
        floats(3, 4),
        floats(1),
        torch.zeros(1, dtype=torch.int32),
        torch.ones(1, dtype=torch.int64),
        0,
        255,
    ),
    case("multi_margin_loss_backward", floats(3), floats(3, 4), torch.tensor([1, 0, 3]), 1, 1, None, 0),
    case(
        "multilabel_margin_loss_backward",
        torch.ones(()),
        floats(3, 4),
        torch.zeros(3, 4, dtype=torch.int64),
        1,
        floats(3, 4),
    ),
    case(
        "fractional_max_pool3d_backward",
        floats(1, 2, 2, 2, 2),
        floats(1, 2, 4, 4, 4),
        [2, 2, 2],
        [2, 2, 2],
        torch.zeros(1, 2, 2, 2, 2).long(),
    ),
    case(
        "_fused_sgd_",
        [floats(3)],
        [floats(3)],
        [],
        lr=0.1,
        momentum=0.0,
        dampening=0.0,
        nesterov=False,
        is_first_step=True,
        weight_decay=0.0,
        maximize=False,
    ),
    case("_slow_conv2d_forward", floats(1, 4, 8, 8), floats(6, 4, 3, 3), [3, 3], None, [1, 1], [0, 0]),
    case("slow_conv3d_forward", floats(1, 4, 3, 8, 8), floats(6, 4, 1, 3, 3), [1, 3, 3], None, [1, 1, 1], [0, 1, 0]),
    case("slow_conv_dilated2d", floats(1, 4, 8, 8), floats(6, 4, 3, 3), [3, 3], None, [1, 1], [0, 0], [2, 2]),
    case(
        "slow_conv_dilated3d",
        floats(1, 4, 3, 8, 8),
        floats(6, 4, 1, 3, 3),
        [1, 3, 3],
        None,
        [1, 2, 1],
        [0, 0, 0],
        [1, 2, 2],
    ),
    case(
        "slow_conv_transpose3d",
        floats(1, 4, 3, 8, 8),
        floats(4, 6, 1, 3, 3),
        [1, 3, 3],
        None,
        [1, 2, 2],
        [0, 0, 0],
        [0, 1, 1],
    ),
    *(case(op, row) for op in LIKE_OPS for row in SLICED),
    *(case("zeros_like", row, memory_format=torch.contiguous_format) for row in SLICED),
    case("zeros_like", SLICED[0], dtype=torch.int64),
    *(case("full_like", row, 2.0) for row in SLICED),
    *(case("randint_like", row, 5) for row in SLICED),
    *(case("randint_like.low_dtype", row, 2, 5) for row in SLICED),
    case("combinations", floats(5), 3),
    case("combinations", floats(4), 2, True),
    case("nonzero_static", floats(3, 4), size=5),
    case("narrow.Tensor", floats(3, 4), 1, torch.tensor(0), 2),
    case(
        "max_unpool2d",
        floats(1, 2, 3, 3).to(memory_format=torch.channels_last),
        torch.arange(18).view(1, 2, 3, 3) % 9,
        [6, 6],
    ),
]


@pytest.mark.parametrize(("op", "args", "kwargs"), CASES, ids=lambda value: str(value) if callable(value) else "")
def test_rule_returns_the_layouts_of_the_op(op, args, kwargs):
    rule = ShapeRules().replacement_for(op.name())
    assert rule is not None
    torch.default_generator.manual_seed(0)
    with torch.no_grad():
        real = op(*pytree.tree_map_only(torch.Tensor, torch.clone, args), **kwargs)
    assert described(rule(*to_meta(args), **to_meta(kwargs))) == described(real)


@pytest.mark.parametrize("op", LIKE_OPS, ids=str)
def test_tensor_like_a_dense_one_has_its_strides_for_dimensions_of_size_1_too(op):
    rule = ShapeRules().replacement_for(op.name())
    assert rule is not None
    for row in SLICED:
        assert rule(torch.empty_strided(row.shape, row.stride(), device=META)).stride() == op(row).stride()


def meta(*shape):
    return torch.empty(shape, device=META)


def boxes(count):
    return meta(count, 5)


IMAGE = meta(2, 8, 16, 16)
DEFORMED = meta(2, 4, 9, 8), meta(6, 4, 3, 3), meta(2, 18, 5, 4), meta(2, 9, 5, 4), meta(6)
GATES, STATE = meta(5, 9), meta(5, 3)

# For ops that no CPU build of torch can run: the shapes according to their sources.
SHAPES_FROM_SOURCE = [
    ("torchvision::roi_align", (IMAGE, boxes(3), 0.5, 7, 6, 2, True), [(3, 8, 7, 6)]),
    ("torchvision::roi_pool", (IMAGE, boxes(3), 0.5, 7, 6), [(3, 8, 7, 6), (3, 8, 7, 6)]),
    ("torchvision::ps_roi_align", (IMAGE, boxes(3), 0.5, 2, 2, 2), [(3, 2, 2, 2), (3, 2, 2, 2)]),
    ("torchvision::ps_roi_pool", (IMAGE, boxes(3), 0.5, 2, 2), [(3, 2, 2, 2), (3, 2, 2, 2)]),
    (
        "torchvision::_roi_align_backward",
        (meta(3, 8, 7, 6), boxes(3), 0.5, 7, 6, 2, 8, 16, 16, 2, True),
        [(2, 8, 16, 16)],
    ),
    ("torchvision::_roi_pool_backward", (meta(3, 8, 7, 6), boxes(3), None, 0.5, 7, 6, 2, 8, 16, 16), [(2, 8, 16, 16)]),
    (
        "torchvision::_ps_roi_align_backward",
        (meta(3, 2, 2, 2), boxes(3), None, 0.5, 2, 2, 2, 2, 8, 16, 16),
        [(2, 8, 16, 16)],
    ),
    (
        "torchvision::_ps_roi_pool_backward",
        (meta(3, 2, 2, 2), boxes(3), None, 0.5, 2, 2, 2, 8, 16, 16),
        [(2, 8, 16, 16)],
    ),
    ("torchvision::deform_conv2d", (*DEFORMED, 2, 2, 1, 1, 1, 1, 1, 1, True), [(2, 6, 5, 4)]),
    (
        "torchvision::_deform_conv2d_backward",
        (meta(2, 6, 5, 4), *DEFORMED, 2, 2, 1, 1, 1, 1, 1, 1, True),
        [tuple(tensor.shape) for tensor in DEFORMED],
    ),
    ("_thnn_fused_gru_cell", (GATES, GATES, STATE, None, None), [(5, 3), (5, 15)]),
    ("_thnn_fused_gru_cell_backward", (STATE, meta(5, 15), True), [(5, 9), (5, 9), (5, 3), (9,), (9,)]),
    (
        "_cudnn_rnn_backward",
        (
            floats(7, 5, 2),
            [floats(9, 2), floats(9, 3)],
            2,
            None,
            floats(1, 5, 3),
            None,
            *(None,) * 14,
            [True, True, False, True],
        ),
        [(7, 5, 2), (1, 5, 3), None, (9, 2), (9, 3)],
    ),
    ("_scaled_grouped_mm", (meta(16, 8), meta(2, 8, 24), boxes(16), boxes(2), meta(2)), [(16, 24)]),
    ("_scaled_grouped_mm_v2", (meta(16, 8), meta(2, 8, 24), [], [], [], [], [], [], meta(2)), [(16, 24)]),
    ("_mixed_dtypes_linear", (meta(4, 64), meta(64, 16), meta(16)), [(4, 16)]),
    ("_weight_int4pack_mm", (meta(4, 64), meta(2, 4, 32, 4), 32, None), [(4, 16)]),
    ("batch_norm_stats", (IMAGE.half(), 0.1), [(8,), (8,)]),
    ("batch_norm_elemt", (IMAGE, None, None, None, None, 0.1), [(2, 8, 16, 16)]),
    ("batch_norm_gather_stats_with_counts", (IMAGE, *(None,) * 7), [(8,), (8,)]),
    (
        "batch_norm_backward_reduce",
        (IMAGE, IMAGE, meta(8), meta(8), meta(8), True, True, False),
        [(8,), (8,), (8,), None],
    ),
    ("cudnn_convolution", (IMAGE, meta(6, 4, 3, 3), [1, 1], [2, 2], [1, 1], 2, True), [(2, 6, 8, 8)]),
    (
        "cudnn_convolution_transpose",
        (IMAGE, meta(8, 6, 3, 3), [1, 1], [1, 1], [2, 2], [1, 1], 1, True, True, True),
        [(2, 6, 32, 32)],
    ),
    ("cudnn_convolution_relu", (IMAGE, meta(6, 8, 3, 3), None, [2, 2], [1, 1], [1, 1], 1), [(2, 6, 8, 8)]),
    (
        "cudnn_convolution_add_relu",
        (IMAGE, meta(6, 8, 3, 3), meta(2, 6, 8, 8), None, None, [2, 2], [1, 1], [1, 1], 1),
        [(2, 6, 8, 8)],
    ),
    ("miopen_convolution", (IMAGE, meta(6, 8, 3, 3), None, [1, 1], [2, 2], [1, 1], 1, True), [(2, 6, 8, 8)]),
    (
        "miopen_convolution_transpose",
        (IMAGE, meta(8, 6, 3, 3), None, [1, 1], [1, 1], [2, 2], [1, 1], 1, True, True),
        [(2, 6, 32, 32)],
    ),
    (
        "conv_depthwise3d",
        (meta(1, 4, 3, 8, 8), meta(4, 1, 1, 3, 3), [1, 3, 3], None, [1, 1, 1], [0, 1, 1], [1, 1, 1]),
        [(1, 4, 3, 8, 8)],
    ),
    ("cudnn_affine_grid_generator", (meta(2, 2, 3), 2, 5, 6, 7), [(2, 6, 7, 2)]),
    ("cudnn_affine_grid_generator_backward", (meta(2, 6, 7, 2), 2, 5, 6, 7), [(2, 2, 3)]),
    ("cudnn_grid_sampler", (IMAGE, meta(2, 5, 5, 2)), [(2, 8, 5, 5)]),
    ("cudnn_grid_sampler_backward", (IMAGE, meta(2, 5, 5, 2), None), [(2, 8, 16, 16), (2, 5, 5, 2)]),
    ("_cudnn_ctc_loss", to_meta(CTC), [(2,), (7, 2, 5)]),
    ("_padded_dense_to_jagged_forward", (meta(2, 5, 3), [None], 7), [(7, 3)]),
]


def full_name(name):
    return name if "::" in name else f"aten::{name}"


@pytest.mark.parametrize(
    ("name", "args", "shapes"), SHAPES_FROM_SOURCE, ids=lambda value: value if isinstance(value, str) else ""
)
def test_rule_returns_the_shapes_according_to_the_source(name, args, shapes):
    rule = ShapeRules(device="cuda").replacement_for(full_name(name))
    leaves = pytree.tree_leaves(rule(*args), is_leaf=lambda item: item is None)
    assert [None if item is None else tuple(item.shape) for item in leaves] == shapes


def test_comparison_detects_a_different_shape_dtype_and_layout():
    expected = described(torch.empty(3, 4))
    wrong = [torch.empty(4, 3), torch.empty(3, 4, dtype=torch.float64), torch.empty(4, 3).T, [torch.empty(3, 4)] * 2]
    assert all(described(value) != expected for value in wrong)
    assert described(torch.empty(1, 0)) == described(torch.empty(0, 1).T)


# Rules neither in CASES nor in SHAPES_FROM_SOURCE: unsupported, bounded, tested in a model below, or like another rule.
TESTED_ELSEWHERE = {
    "_c10d_functional::_wrap_tensor_autograd",
    # In tests/capture/shapes/test_gradient_layouts.py.
    *("aten::binary_cross_entropy_backward", "aten::elu_backward", "aten::hardtanh_backward", "aten::rrelu"),
    *("aten::rrelu_with_noise", "aten::rrelu_with_noise_backward", "aten::softplus_backward"),
    "aten::threshold_backward",
    *("aten::_conv_depthwise2d", "aten::_mps_convolution", "aten::miopen_convolution_add_relu"),
    *("aten::miopen_convolution_relu", "aten::miopen_depthwise_convolution"),
    *("aten::_ctc_loss.Tensor", "aten::_ctc_loss_backward.Tensor", "aten::_cudnn_ctc_loss.Tensor"),
    "aten::_fake_quantize_learnable_per_channel_affine_backward",
    *("aten::_fused_adagrad_", "aten::_fused_adagrad_.tensor_lr", "aten::_fused_adam_.tensor_lr"),
    *("aten::_fused_adamw_.tensor_lr", "aten::_fused_sgd_.tensor_lr"),
    *("aten::_nested_tensor_from_mask_left_aligned", "aten::_pack_padded_sequence"),
    *("aten::_pack_padded_sequence_backward", "aten::_pad_packed_sequence"),
    *("aten::batch_norm_backward_elemt", "aten::batch_norm_gather_stats"),
    *("aten::bincount", "aten::masked_select", "aten::one_hot"),
    *("aten::dequantize.self", "aten::dequantize.tensors", "aten::quantize_per_channel"),
    *("aten::quantize_per_tensor", "aten::quantize_per_tensor.tensor_qparams", "aten::quantize_per_tensor.tensors"),
    "aten::quantize_per_tensor_dynamic",
    *("higher_order::flex_attention", "higher_order::flex_attention_backward"),
}


def test_every_rule_is_tested():
    tested = (
        {op.name() for op, _, _ in CASES}
        | {full_name(name) for name, _, _ in SHAPES_FROM_SOURCE}
        | {name for name, _, _ in LAYOUTS}
    )
    rules = {name for name in (*RULES, *CPU_RULES) if not name.startswith("c10d::")}  # in tests/plan/test_ranks.py
    assert rules - tested == TESTED_ELSEWHERE


def assert_same_calls(model, args):
    """Compare op calls and results without the bytes of storages and the ops inside of composite ones."""
    real, shapes = (run(model, args, {}, execution) for execution in ("real", "shapes"))
    assert [call[:4] for call in real.storages] == [call[:4] for call in shapes.storages]
    assert real.results == shapes.results


def test_grouped_matmul_in_single_precision_runs_in_shape_execution():
    args = grouped(torch.float32, (6, 8), (2, 8, 7), 3, 6)
    assert compare(lambda a, b, offsets: OPS._grouped_mm(a * 2, b, offsets), args) == ""


def test_recurrent_layer_is_one_call_for_any_number_of_steps():
    layer = nn.LSTM(4, 6, 2, batch_first=True, bidirectional=True)
    assert compare(layer, (floats(3, 5, 4),)) == ""
    shapes = run(layer, (torch.empty(3, 10**7, 4, device=META),), {}, "shapes")
    assert [call[0] for call in shapes.storages].count("aten::lstm.input") == 1
    assert shapes.results[0][0] == (3, 10**7, 12)


def test_sequences_of_known_lengths_are_packed():
    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x * 2, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0]

    model = Applied(forward, layer=nn.LSTM(4, 6, batch_first=True))
    assert_same_calls(model, (floats(3, 5, 4), torch.tensor([5, 2, 3])))


@pytest.mark.parametrize(
    ("call", "needed"),
    [
        (lambda meta: data_dependent.pack_padded_sequence(torch.ones(2, 3), meta, True), "sequence lengths"),
        (lambda meta: data_dependent.pad_packed_sequence(torch.ones(2, 3), meta, True, 0.0, 3), "batch sizes"),
        (lambda meta: data_dependent.is_left_aligned(torch.ones(2, 3, 1), meta), "the mask's values"),
    ],
)
def test_error_for_unknown_sequences_names_what_is_needed(call, needed):
    with pytest.raises(DataDependentError, match=f"data-dependent: it needs {needed}, which"):
        call(torch.ones(2, 3, device="meta"))


def test_quantized_tensors_are_rejected():
    def model(x):
        return torch.quantize_per_tensor(x * 2, 0.1, 0, torch.quint8).dequantize()

    with pytest.raises(ExecutionError, match="quantized"):
        run(model, (floats(3),), {}, "shapes")


def test_flex_attention_does_not_call_the_score_and_mask_functions():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    bias = nn.Parameter(floats(4))

    def score(value, batch, head, query, key):
        return value + bias[head]

    blocks = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, 16, 16, device="cpu", BLOCK_SIZE=8)

    def model(q, k, v):
        return flex.flex_attention(q, k, v, score_mod=score, block_mask=blocks, enable_gqa=True, return_lse=True)

    args = floats(2, 4, 16, 8).transpose(1, 2).contiguous().transpose(1, 2), floats(2, 2, 16, 8), floats(2, 2, 16, 6)
    assert_same_calls(model, args)
    backward = ShapeRules().replacement_for("higher_order::flex_attention_backward")
    grads = backward(*to_meta(args), *(None,) * 9, (floats(3), 2), ())
    assert [tuple(grad.shape) for grad in grads[:3]] == [tuple(item.shape) for item in args]
    assert grads[3][0].shape == (3,) and grads[3][1] == 2


SIZE_CASES = (
    (lambda x: (x > 0).nonzero(), "aten::nonzero", 3, (3, 2)),
    (lambda x: (x > 0).nonzero(), "aten::nonzero", 300, (20, 2)),
    (lambda x: (x > 0).nonzero(), "aten::nonzero", 0.33, (7, 2)),
    (lambda x: (x > 0).nonzero(), "aten::nonzero", 0, (0, 2)),
    (lambda x: torch.nonzero(x, as_tuple=True)[1], "aten::nonzero_numpy", 3, (3,)),
    (lambda x: torch.nonzero(x, as_tuple=True)[1], "aten::nonzero", 3, (3,)),
    (lambda x: torch.where(x > 0)[1], "aten::nonzero", 3, (3,)),
    *(
        (lambda x: torch.where(x > 0, x, -x)[torch.where(x > 0)], "aten::where", *item)
        for item in ((3, (3,)), (50, (20,)))
    ),
    (lambda x: torch.argwhere(x), "aten::nonzero", 3, (3, 2)),
    (lambda x: torch.argwhere(x), "aten::argwhere", 3, (3, 2)),
    (lambda x: x[x > 0], "aten::index", 0.5, (10,)),
    (lambda x: x[x > 0], "aten::index.Tensor", 4, (4,)),
    (lambda x: x[:, x[0] > 0], "aten::index", 4, (4, 4)),
    (lambda x: x[x[:, 0] > 0, x[0] > 0], "aten::index", 3, (3,)),
    (lambda x: torch.masked_select(x, x[:1] > 0), "aten::masked_select", 0.25, (5,)),
    (lambda x: x.unique(), "aten::_unique2", 3, (3,)),
    (lambda x: x.unique(return_inverse=True)[1], "aten::_unique2", 3, (4, 5)),
    (lambda x: x.unique(return_counts=True)[1], "aten::_unique2", 3, (3,)),
    (lambda x: x.unique(dim=1), "aten::unique_dim", 3, (4, 3)),
    (lambda x: x.unique_consecutive(), "aten::unique_consecutive", 3, (3,)),
    (lambda x: x.unique_consecutive(dim=0), "aten::unique_consecutive", 3, (3, 5)),
    (lambda x: OPS.unique_dim_consecutive(x, 0, True, True)[1], "aten::unique_dim_consecutive", 3, (4,)),
    (lambda x: OPS._unique(x, True, True)[1], "aten::_unique", 3, (4, 5)),
    (lambda x: torch.repeat_interleave((x[0] > 0).long()), "aten::repeat_interleave", 9, (9,)),
    (lambda x: x.repeat_interleave((x[:, 0] > 0).long(), dim=0), "aten::repeat_interleave", 9, (9, 5)),
    (lambda x: torch.bincount((x[0] > 0).long()), "aten::bincount", 9, (9,)),
    (lambda x: torch.bincount((x[0] > 0).long(), minlength=12), "aten::bincount", 9, (12,)),
    (lambda x: nn.functional.one_hot((x[0] > 0).long()), "aten::one_hot", 6, (5, 6)),
)


@pytest.mark.parametrize(("select", "name", "size", "shape"), SIZE_CASES)
def test_output_size_is_assumed(select, name, size, shape):
    args = (floats(4, 5),)
    doubled = lambda x: select(x * 2)  # noqa: E731
    with pytest.raises(ExecutionError, match=r"needs values"):
        run(doubled, args, {}, "shapes")
    assert run(doubled, args, {}, "shapes", assume={name: size}).results[0][0] == shape


@pytest.mark.parametrize(
    ("compute", "name", "value", "expected"),
    [
        (lambda x: x.sum().item(), "aten::_local_scalar_dense", 3, 3.0),
        (lambda x: x.sum().item(), "aten::item", 3, 3.0),
        (lambda x: x.argmax().item(), "aten::_local_scalar_dense", 3, 3),
        (lambda x: int(x.sum()), "aten::_local_scalar_dense", 3, 3),
        (lambda x: bool((x > 0).any()), "aten::_local_scalar_dense", True, True),
        (lambda x: bool((x > 0).any()), "aten::is_nonzero", False, False),
        (lambda x: x.sum().to(torch.complex64).item(), "aten::_local_scalar_dense", 3, 3 + 0j),
        (lambda x: torch.equal(x, x + 1), "aten::equal", True, True),
        (lambda x: torch.allclose(x, x + 1), "aten::allclose", True, True),
        (lambda x: torch.allclose(x, x + 1), "aten::_local_scalar_dense", False, False),
    ],
)
def test_value_is_assumed(compute, name, value, expected):
    results = []
    run(lambda x: results.append(compute(x * 2)), (floats(4, 5),), {}, "shapes", assume={name: value})
    assert results[-1] == expected and type(results[-1]) is type(expected)


def test_known_indices_select_from_a_tensor_with_unknown_values():
    mask = torch.tensor([True, False, True, False, True])
    weighted_counts = lambda x, ids: torch.bincount(ids, x[0] * 2, minlength=2)  # noqa: E731
    assert compare(lambda x, mask: (x * 2).masked_select(mask), (floats(4, 5), mask)) == ""
    assert compare(weighted_counts, (floats(4, 5), torch.tensor([1, 7, 2, 2, 3]))) == ""
    assert compare(lambda x, mask: (x * 2)[:, mask], (floats(4, 5), mask)) == ""


def test_small_mask_expanded_to_a_large_one_keeps_its_values():
    mask = torch.tensor([True, False, True]).repeat(300)  # expanded to 1,800,000 elements, more than CONCRETE_LIMIT
    select = lambda x, mask: (x * 2)[mask[:, None].expand(900, 2000)]  # noqa: E731
    assert concrete_tensors.CONCRETE_LIMIT < 900 * 2000
    assert compare(select, (floats(900, 2000), mask)) == ""
    too_large = mask[:, None].expand(900, concrete_tensors.CONCRETE_LIMIT)
    assert concrete_tensors.is_small(metadata_of(mask)) and not concrete_tensors.is_small(metadata_of(too_large))


def test_one_hot_of_a_transposed_tensor_is_contiguous_as_in_real_execution(monkeypatch):
    clear_cache()
    monkeypatch.setattr(concrete_tensors, "CONCRETE_LIMIT", -1)
    classes = torch.arange(60).remainder(10).view(3, 4, 5).transpose(0, 2)
    assert compare(lambda x: nn.functional.one_hot(x, 10).view(-1, 10), (classes,)) == ""
    clear_cache()


def test_nms_selects_all_boxes_as_an_upper_bound():
    boxes, scores = torch.empty(9, 4, device=META), torch.empty(9, device=META)
    rules = ShapeRules()
    assert depends_on_values("torchvision::nms") and not rules.bounds
    assert rules.assumed_size("torchvision::nms")(boxes, scores, 0.5).shape == (9,)
    assert rules.bounds == {"torchvision::nms"}
    assumed = ShapeRules({"torchvision::nms": 4}, exact=True)
    assert assumed.assumed_size("torchvision::nms")(boxes, scores, 0.5).shape == (4,) and not assumed.bounds
    assert ShapeRules(exact=True).assumed_size("torchvision::nms") is None


def test_ops_that_need_unknown_values_raise():
    rule = ShapeRules().replacement_for("aten::_ctc_loss.Tensor")
    probabilities = floats(7, 2, 5).to(META)
    assert rule(probabilities, None, None, torch.tensor([3, 2]))[1].shape == (2, 7, 7)
    with pytest.raises(DataDependentError):
        rule(probabilities, None, None, torch.tensor([3, 2]).to(META))
    with pytest.raises(DataDependentError, match="lstsq"):
        ShapeRules().replacement_for("aten::linalg_lstsq")(*to_meta((floats(4, 3), floats(4, 2))), driver="gelsd")


def test_only_ops_that_depend_on_values_are_data_dependent():
    rules = ShapeRules()
    assert depends_on_values("aten::index.Tensor") and depends_on_values("aten::_local_scalar_dense")
    assert depends_on_values("aten::narrow.Tensor") and not depends_on_values("aten::narrow")
    assert not depends_on_values("aten::mm") and rules.assumed_size("aten::mm") is None
    assert can_be_assumed("aten::index.Tensor") and not can_be_assumed("aten::mm")


@pytest.mark.parametrize(
    ("assume", "message"),
    [
        ({"aten::nonzer": 3}, "'aten::nonzer' is not an op whose result can be assumed; did you mean 'aten::nonzero'?"),
        ({"aten::mm": 3}, "'aten::mm' is not an op whose result can be assumed"),
        ({3: 3}, "3 is not an op whose result can be assumed"),
        ({"aten::nonzero": -1}, "a size must not be negative"),
        ({"aten::nonzero": 1.5}, "a fraction must be between 0.0 and 1.0"),
        ({"aten::nonzero": float("nan")}, "a fraction must be between 0.0 and 1.0"),
        ({"aten::nonzero": True}, "pass a number of results"),
        ({"aten::nonzero": "many"}, "pass a number of results"),
        ({"aten::equal": 3}, "the op's result must be True or False"),
        ({"aten::item": "3"}, "the op's result must be a number"),
    ],
)
def test_invalid_assumption_is_reported_in_one_line(assume, message):
    with pytest.raises(ValueError) as raised:
        ShapeRules(assume)
    (name, value), text = next(iter(assume.items())), str(raised.value)
    assert message in text and f"assume={{{name!r}: {value!r}}}" in text and "\n" not in text
    if "is not an op" in message:
        assert "aten::nonzero" in text and "torchvision::nms" in text


def filled(tensor):
    """Return values for a tensor of an example: well-conditioned square matrices, zeros for integers."""
    if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex):
        return torch.zeros(tensor.shape, dtype=tensor.dtype)
    values = floats(*tensor.shape)
    if tensor.ndim >= 2 and tensor.shape[-1] == tensor.shape[-2]:
        values = values + 4 * torch.eye(tensor.shape[-1])
    if tensor.dtype is torch.float4_e2m1fn_x2:  # two numbers in a byte; no other dtype converts to it
        return torch.zeros(tensor.shape, dtype=torch.uint8).view(tensor.dtype)
    return values.to(tensor.dtype)


def example_calls(row):
    """Return the calls in a row's example that real execution supports on this machine."""
    runnable = []
    if row.name.startswith(("bitsandbytes::", "torchao::")):
        return []  # their kernels crash on values that no quantized tensor has
    try:
        overloads = overloads_of(row.name)
    except NotRunnable:
        return []
    for overload in overloads:
        values = bind_example(overload._schema, Example.parse(row.example))
        if values is None:
            continue
        if any(isinstance(value, torch.Tensor) and value.is_quantized for value in values.values()):
            continue  # an example does not specify its scale
        values = pytree.tree_map_only(torch.Tensor, filled, values)
        try:
            overload(**pytree.tree_map_only(torch.Tensor, torch.clone, values))
        except (RuntimeError, NotImplementedError, ValueError):
            continue
        runnable.append((overload, values))
    return runnable


# Their kernels crash on the small tensors of the examples.
UNSAFE = frozenset({"aten::_weight_int8pack_mm"})
ROWS = [
    row
    for row in load_table("default").rows.values()
    if row.kind == "counted" and "::" in row.example + row.name and row.name not in UNSAFE and row.example
]


def test_examples_of_the_default_table_have_the_shapes_of_real_execution():
    problems, runs = {}, 0
    for row in ROWS:
        if row.name.startswith(("higher_order::", "prim::")):
            continue
        for op, values in example_calls(row):
            runs += 1
            problem = compare(lambda op=op, values=values: op(**values), ())
            if problem:
                problems[row.name] = problem
    assert not problems
    assert runs > 80


# Ops with other results in shape execution, with the reason. Where it raises, execution="auto" uses real execution.
RAISES = "raises: "
DIFFERENT = {
    "combinations": RAISES + "under autograd it decomposes into masked_select",
    "corrcoef": RAISES + "it checks whether its weights are positive",
    "cov": RAISES + "it checks whether its weights are positive",
    "nn.functional.gaussian_nll_loss": RAISES + "it checks whether the variances are positive",
    "index_put": RAISES + "its backward pass selects by the mask",
    "linalg.lstsq": RAISES + "gelsd and gelss return residuals if the rank is full",
    "sparse.mm": RAISES + "sparse tensors have no shape rules",
    "sparse.sampled_addmm": RAISES + "sparse tensors have no shape rules",
    "to_sparse": RAISES + "sparse tensors have no shape rules",
    "nn.functional.pad": "autograd recreates a modified view by its own op here, by as_strided in real execution",
}


@pytest.mark.long
@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    ("dtype", "backward"),
    [(torch.float32, True), *((dtype, False) for dtype in (torch.float32, torch.complex64, torch.int64, torch.bool))],
)
def test_shapes_are_those_of_real_execution_or_shape_execution_raises(dtype, backward, known, monkeypatch):
    clear_cache()
    if not known:
        monkeypatch.setattr(concrete_tensors, "CONCRETE_LIMIT", -1)
    infos = [info for info in op_infos() if info.supports_dtype(dtype, "cpu") and not info.name.startswith("jiterator")]
    try:
        checks = [
            (info.name, checked)
            for info in infos
            for checked in check_op(info, dtype, "contiguous", 10 if backward else 40, backward=backward)
        ]
    finally:
        clear_cache()
    assert {name: item for name, item in checks if (item.problem or item.refused) and name not in DIFFERENT} == {}
    assert not [item for name, item in checks if item.problem and DIFFERENT[name].startswith(RAISES)]


def test_where_with_three_arguments_accepts_no_assumed_size():
    model = Applied(
        lambda self, x: self.layer(torch.where(x > 0, x, -x)[torch.where(x[:, 0] > 0)]),
        layer=nn.Linear(4, 4, bias=False),
    )
    with pytest.raises(ExecutionError, match=r"assume=\{'aten::where': \.\.\.\}"):
        FlopCountAnalysis(model, torch.ones(5, 4), execution="shapes").total()
    with pytest.raises(ValueError, match=r"'aten::where.self' is not an op .* did you mean 'aten::where'"):
        FlopCountAnalysis(model, torch.ones(5, 4), execution="shapes", assume={"aten::where.self": 3}).total()
    assert FlopCountAnalysis(model, torch.ones(5, 4)).macs() == 5 * 16


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (nn.functional.linear, [(2, 3), (4, 3)]),
        (torch.mm, [(2, 3), (3, 4)]),
        (torch.bmm, [(1, 2, 3), (1, 3, 4)]),
        (lambda a, b: torch.addmm(torch.ones(2, 4), a, b), [(2, 3), (3, 4)]),
        (nn.functional.conv2d, [(1, 3, 4, 4), (2, 3, 2, 2)]),
        (nn.functional.conv_transpose2d, [(1, 3, 4, 4), (3, 2, 2, 2)]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
@pytest.mark.parametrize("execution", ["shapes", "real"])
def test_a_product_of_two_dtypes_is_refused_as_when_it_runs(function, shapes, dtype, execution):
    first, second = map(torch.ones, shapes)
    with pytest.raises(RuntimeError, match=r"same|expected scalar type"):
        FlopCountAnalysis(function, (first.to(dtype), second), execution=execution).total()
