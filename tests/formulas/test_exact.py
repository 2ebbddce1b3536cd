"""The table `exact`: it leaves nothing out, and a composite op costs what its parts cost."""

from collections import defaultdict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fvflops import FlopCountAnalysis, load_table
from fvflops.capture.run import record_call
from fvflops.counting import TableCostModel, count
from fvflops.formulas.loading import shipped_tables
from fvflops.trace import Status
from tests.support.models.whole_models import build_case
from tests.support.old_torch import VERSION
from tests.support.tools import load_tool

coverage = load_tool("op_coverage.py")

EXACT, DEFAULT = load_table("exact"), load_table("default")


def test_no_op_is_omitted():
    coverage.import_namespaces()
    classes = defaultdict(set)
    for namespace in coverage.NAMESPACES:
        for name in coverage.list_overloads(namespace):
            classes[coverage.classify(EXACT, name)].add(name)
    assert not classes["ignored"], "a row of `default` leaves out arithmetic that `exact` must count"
    assert not classes["unclassified"]
    assert {name.partition(".")[0] for name in classes["unsupported"]} <= coverage.UNSUPPORTED.keys()
    assert len(classes["counted"]) > 1900


# Ops of libraries whose arguments' names are not known here, so that no row can speak of them.
NAMELESS = ["xformers::fmha_merge_attentions_varargs", "xformers::merge_attentions_varargs_backward"]


def test_no_row_is_omitted_in_any_library():
    assert [row.name for row in EXACT.rows.values() if row.kind == "ignored"] == NAMELESS


def test_what_default_counts_is_not_free():
    """Of the rows that `default` counts some are only copies: nearest neighbours."""
    free = [name for name, row in DEFAULT.rows.items() if row.kind == "counted" and EXACT.rows[name].kind != "counted"]
    assert free == ["aten::upsample_nearest2d"]


def test_products_keep_their_multiply_adds():
    """A row that restates a product has the macs of the row that it stands for, or its formula under another name."""
    changed = {
        name
        for name, row in DEFAULT.rows.items()
        if row.macs is not None and "".join(row.macs.split()) != "".join((EXACT.rows[name].macs or "").split())
    }
    assert {name: EXACT.rows[name].use for name in changed} == {"aten::_triton_scaled_dot_attention": "exact_attention"}


MODELS = ["toy", "zoo:resnet50", "zoo:gpt2", "zoo:llama_tiny", "torchvision:swin_t", "timm:gmlp_ti16_224"]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_counted_whole(name):
    model, inputs = build_case(name)
    exact, default = (FlopCountAnalysis(model, inputs, table=table) for table in ("exact", "default"))
    macs = sum(entry.macs for entry in default.counts().entries)
    assert not exact.unsupported_ops()
    assert sum(entry.macs for entry in exact.counts().entries) == macs
    assert exact.total() > 2 * macs > 0


COMPOSITES = [
    "aten::linear", "aten::bilinear", "aten::matmul", "aten::einsum", "aten::layer_norm", "aten::batch_norm",
    "aten::group_norm", "aten::instance_norm", "aten::rms_norm", "aten::softmax", "aten::log_softmax",
    "aten::scaled_dot_product_attention", "aten::_scaled_dot_product_attention_math", "aten::lstm", "aten::gru",
    "aten::rnn_tanh", "aten::rnn_relu", "aten::lstm_cell", "aten::gru_cell", "aten::rnn_tanh_cell",
    "aten::rnn_relu_cell", "aten::adaptive_avg_pool2d", "aten::grid_sampler", "aten::selu", "aten::prelu",
    "aten::log_sigmoid", "aten::max_pool2d", "aten::max_pool1d", "aten::avg_pool1d", "aten::relu6", "aten::square",
    "aten::divide", "aten::multiply", "aten::special_log1p", "aten::special_expit",
]  # fmt: skip


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Return a table that looks into every composite op."""
    path = tmp_path_factory.mktemp("tables") / "parts.yaml"
    path.write_text("extends: exact\nops:\n" + "".join(f"  {name}: decompose\n" for name in COMPOSITES))
    return load_table(str(path))


def ledger(function, inputs, table):
    entries = FlopCountAnalysis(function, inputs, table=table).counts().entries
    return [entry for entry in entries if entry.value]


def add_up(entries):
    return sum(entry.macs for entry in entries), sum(entry.flops for entry in entries)


def r(*shape):
    return torch.rand(shape) + 0.1


def recurrent(layer, **options):
    return layer(3, 4, **options), (r(5, 2, 3),)


PAIRS = {
    "linear": (nn.Linear(3, 4), (r(2, 5, 3),)),
    "linear without bias": (nn.Linear(3, 4, bias=False), (r(2, 5, 3),)),
    "bilinear": (nn.Bilinear(3, 4, 5), (r(2, 3), r(2, 4))),
    "matmul": (torch.matmul, (r(3, 1, 5, 4), r(2, 4, 6))),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), (r(2, 3, 4), r(2, 4, 5))),
    "einsum of an outer product": (lambda a, b: torch.einsum("i,j->ij", a, b), (r(3), r(4))),
    "einsum with sums": (lambda a, b: torch.einsum("ija,jkb->ik", a, b), (r(2, 3, 4), r(3, 5, 2))),
    "einsum of one": (lambda a: torch.einsum("ijk->i", a), (r(2, 3, 4),)),
    "einsum of three": (lambda a, b, c: torch.einsum("ij,jk,ki->i", a, b, c), (r(2, 3), r(3, 4), r(4, 2))),
    "layer_norm": (nn.LayerNorm((3, 4)), (r(2, 3, 4),)),
    "batch_norm": (nn.BatchNorm2d(3).eval(), (r(2, 3, 4, 5),)),
    "batch_norm in training": (nn.BatchNorm2d(3), (r(2, 3, 4, 5),)),
    "batch_norm without statistics": (nn.BatchNorm1d(3, affine=False, track_running_stats=False), (r(2, 3, 4),)),
    "group_norm": (nn.GroupNorm(2, 4), (r(2, 4, 3, 3),)),
    "instance_norm": (nn.InstanceNorm2d(3, affine=True), (r(2, 3, 4, 5),)),
    "instance_norm with statistics": (nn.InstanceNorm1d(3, affine=True, track_running_stats=True), (r(2, 3, 4),)),
    "rms_norm": (nn.RMSNorm(4), (r(2, 3, 4),)),
    "softmax": (nn.Softmax(-1), (r(2, 3),)),
    "log_softmax": (nn.LogSoftmax(0), (r(2, 3),)),
    "attention": (F.scaled_dot_product_attention, (r(1, 2, 3, 4), r(1, 2, 5, 4), r(1, 2, 5, 4))),
    "attention with a mask": (F.scaled_dot_product_attention, (r(1, 2, 3, 4), r(1, 2, 5, 4), r(1, 2, 5, 4), r(3, 5))),
    "lstm": recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "lstm without biases": recurrent(nn.LSTM, bias=False),
    "lstm with a projection": recurrent(nn.LSTM, proj_size=2),
    "gru": recurrent(nn.GRU, num_layers=2),
    "rnn": recurrent(nn.RNN),
    "rnn with relu": recurrent(nn.RNN, nonlinearity="relu", bias=False),
    "lstm cell": (nn.LSTMCell(3, 4), (r(2, 3),)),
    "gru cell": (nn.GRUCell(3, 4), (r(2, 3),)),
    "rnn cell": (nn.RNNCell(3, 4), (r(2, 3),)),
    "adaptive pooling": (nn.AdaptiveAvgPool2d((3, 2)), (r(1, 2, 5, 7),)),
    "global pooling": (nn.AdaptiveAvgPool2d(1), (r(1, 2, 5, 7),)),
    "max pooling": (nn.MaxPool2d(2), (r(1, 2, 6, 6),)),
    "max pooling of lines": (nn.MaxPool1d(2), (r(1, 2, 6),)),
    "average pooling of lines": (nn.AvgPool1d(2), (r(1, 2, 6),)),
    "grid_sample": (lambda x, g: F.grid_sample(x, g, align_corners=False), (r(1, 2, 4, 4), r(1, 3, 3, 2))),
    "selu": (nn.SELU(), (r(2, 3),)),
    "relu6": (torch.ops.aten.relu6, (r(2, 3),)),
    "prelu": (nn.PReLU(3), (r(2, 3),)),
    "log_sigmoid": (nn.LogSigmoid(), (r(2, 3),)),
    "square": (torch.square, (r(2, 3),)),
    "divide": (torch.divide, (r(2, 3), r(3))),
    "expit": (torch.special.expit, (r(2, 3),)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_a_composite_op_costs_what_its_parts_cost(name, parts):
    function, inputs = PAIRS[name]
    with torch.backends.mkldnn.flags(enabled=False):
        whole, inside = ledger(function, inputs, "exact"), ledger(function, inputs, parts)
    assert {entry.op for entry in whole} != {entry.op for entry in inside}
    assert add_up(whole) == add_up(inside) > (0, 0)


def test_attention_by_math_scales_query_and_key(parts):
    """Its parts multiply each number of the query and the key by the root of the scale, the row each score by it."""
    query, key, value = r(1, 2, 3, 4), r(1, 2, 5, 4), r(1, 2, 5, 4)

    def attend(*tensors):
        return torch.ops.aten._scaled_dot_product_attention_math(*tensors)[0]

    whole, inside = (add_up(ledger(attend, (query, key, value), table)) for table in ("exact", parts))
    assert whole[0] == inside[0]
    assert inside[1] - whole[1] == query.numel() + key.numel() - 2 * 3 * 5


# Name → a model and its inputs, to be run under autograd too.
TRAINED = {
    "convolutions": (
        nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5)
        ),
        (r(2, 3, 8, 8),),
    ),
    "an encoder": (
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, activation="gelu"),
        (r(2, 5, 8),),
    ),
    "a recurrence": recurrent(nn.LSTM, num_layers=2),
    "norms": (nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm1d(4), nn.LayerNorm(6), nn.RMSNorm(6)), (r(2, 4, 6),)),
    "a bag": (nn.EmbeddingBag(10, 4), (torch.tensor([[1, 2, 4], [4, 3, 2]]),)),
    "pooling": (
        nn.Sequential(nn.Linear(4, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LogSoftmax(1)),
        (r(2, 3, 4, 4),),
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_both_vocabularies_cost_the_same(name):
    """Below autograd composite ops are counted, under it their parts; nothing of the backward pass is left out."""
    model, inputs = TRAINED[name]
    with torch.backends.mkldnn.flags(enabled=False):
        composite = ledger(model, inputs, "exact")
        trace = record_call(model, inputs, stops_at=EXACT.stops_at, loss=total_of)
    core = count(trace, TableCostModel(EXACT, "flops"), "flops").entries
    forward = [entry for entry in core if entry.phase == "forward" and entry.scope]
    backward = [entry for entry in core if entry.phase == "backward"]
    assert not [entry for entry in core if entry.status in (Status.IGNORED, Status.UNSUPPORTED)]
    assert add_up(forward) == add_up([entry for entry in composite if entry.scope]) > (0, 0)
    assert sum(add_up(backward)) > 0


def total_of(result):
    first = result[0] if isinstance(result, tuple) else result
    return first.sum()


aten = torch.ops.aten
# Op and arguments: what it costs, and what its entry in torch._decomp costs, op by op, are the same. The other ops with
# such entries are called in tests/oracle.
DECOMPOSED = {
    **({"rms_norm": (aten._fused_rms_norm.default, (r(2, 6), [6], r(6), 1e-5))} if VERSION >= (2, 10) else {}),
    "weight_norm": (aten._weight_norm_interface.default, (r(2, 6), r(2, 1), 0)),
    "dropout": (aten.native_dropout.default, (r(2, 6), 0.5, True)),
    "nll_loss": (aten.nll_loss_forward.default, (r(2, 6), torch.tensor([1, 2]), None, 1, -100)),
}


COMPARISONS = tuple(f"aten::{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge"))


@pytest.mark.parametrize("name", DECOMPOSED)
def test_an_op_costs_what_its_decomposition_costs(name):
    op, arguments = DECOMPOSED[name]
    plain = torch._decomp.decomposition_table[op]
    whole, inside = (ledger(run, arguments, "exact") for run in (op, plain))
    assert {entry.op for entry in whole} != {entry.op for entry in inside}
    if name == "dropout":  # draws its mask by a comparison, which the op does not count
        counted = [entry for entry in inside if entry.op not in COMPARISONS]
        assert len(counted) < len(inside)
        inside = counted
    assert add_up(whole) == add_up(inside) > (0, 0)


def test_another_price_is_one_line(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: exact\nconstants: {exp: 1}\n")
    assert FlopCountAnalysis(nn.Softmax(1), (r(2, 3),), table=str(path)).total() == 6 * 5


PRODUCTS = {
    "mm": (torch.mm, ((4, 5), (5, 6)), 4 * 5 * 6),
    "matmul": (torch.matmul, ((2, 4, 5), (2, 5, 6)), 2 * 4 * 5 * 6),
    "linear": (torch.nn.functional.linear, ((4, 5), (6, 5)), 4 * 5 * 6),
    "einsum": (lambda a, b: torch.einsum("ij,jk->ik", a, b), ((4, 5), (5, 6)), 4 * 5 * 6),
    "conv2d": (torch.nn.functional.conv2d, ((1, 4, 8, 8), (6, 4, 3, 3)), 36 * 6 * 4 * 9),
}


@pytest.mark.parametrize("table", shipped_tables())
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_multiply_add_of_complex_numbers_is_one(name, table):
    """Where a convention counts a product of real numbers, it has as many multiply-adds of complex ones.

    torch multiplies complex images as three convolutions of real ones (the third of sums), and these are seen, but for
    where a convention counts conv2d as it is called.
    """
    function, sizes, macs = PRODUCTS[name]
    real, complex_ = (
        FlopCountAnalysis(function, tuple(torch.ones(size, dtype=dtype) for size in sizes), table=table)
        for dtype in (torch.float32, torch.complex64)
    )
    for analysis in (real, complex_):
        analysis.unsupported_ops_warnings(False)
    whole = load_table(table).row("aten::conv2d")
    seen = 3 if name == "conv2d" and (whole is None or whole.kind != "counted") else 1
    assert complex_.macs() == seen * real.macs()
    if table in ("default", "exact"):
        assert real.macs() == macs
    if table == "exact" and name != "conv2d":  # four real multiply-adds each, of two flops
        assert complex_.total() == 8 * macs
    elif table == "default":
        assert complex_.total() == seen * macs
