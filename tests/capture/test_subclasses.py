"""Tensors that are not plain ones: quantised weights, sparse layouts, nested and masked tensors."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

from fvflops import FlopCountAnalysis
from fvflops.capture.run import ExecutionError
from fvflops.trace import Status


class Calls(nn.Module):
    def __init__(self, function, *weights):
        super().__init__()
        self.function, self.weights = function, nn.ParameterList(weights)

    def forward(self, *inputs):
        return self.function(*inputs, *self.weights)


def count(function, *inputs, weights=()):
    """Return the analysis of a function whose every op the table knows, be it to leave it out."""
    module = function if isinstance(function, nn.Module) else Calls(function, *weights)
    analysis = FlopCountAnalysis(module, inputs)
    assert not analysis.counts().ledger().get(Status.UNSUPPORTED)
    return analysis


class Quantised(torch.Tensor):
    """A weight of a linear layer as whole numbers of eight bits, with a scale for each row."""

    @staticmethod
    def __new__(cls, data, scale):
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)

    def __init__(self, data, scale):
        self.data8, self.scale = data, scale

    def __repr__(self):
        return f"{type(self).__name__}({self.data8}, {self.scale})"

    @classmethod
    def of(cls, weight):
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        return cls((weight.detach() / scale).round().to(torch.int8), scale)

    def __tensor_flatten__(self):
        return ["data8", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors, context, size, stride):
        return cls(tensors["data8"], tensors["scale"])

    def dequantise(self):
        return self.data8.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            return cls(args[0].data8.detach(), args[0].scale.detach())
        plain = pytree.tree_map_only(Quantised, Quantised.dequantise, (args, kwargs))
        return func(*plain[0], **plain[1])


class Dynamic(Quantised):
    """The same, and its linear layers multiply whole numbers: the input is quantised row by row."""

    __torch_function__ = classmethod(lambda cls, func, types, args=(), kwargs=None: cls.run(func, args, kwargs or {}))

    @classmethod
    def run(cls, func, args, kwargs):
        if func is not F.linear:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        x, weight, bias = args
        scale = x.abs().amax(-1, keepdim=True) / 127
        rows = (x / scale).round().to(torch.int8).flatten(0, -2)
        product = torch._int_mm(rows, weight.data8.t()).view(*x.shape[:-1], weight.shape[0])
        return product * scale * weight.scale.flatten() + bias


@pytest.mark.parametrize(("kind", "label"), [(Quantised, "linear"), (Dynamic, "_int_mm")])
def test_a_quantised_weight_counts_the_product_that_it_makes(kind, label):
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    x = torch.rand(4, 6, 16)
    plain = count(model, x)
    assert plain.total() == 4 * 6 * (16 * 32 + 32 * 8)
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(kind.of(layer.weight), requires_grad=False)
    quantised = count(model, x)
    assert quantised.total() == plain.total() and quantised.by_operator() == {label: plain.total()}
    assert quantised.by_module()["2"] == plain.by_module()["2"]


def test_a_quantised_weight_is_still_itself_after_the_count():
    layer = nn.Linear(16, 32)
    layer.weight = nn.Parameter(Quantised.of(layer.weight), requires_grad=False)
    data = layer.weight.data8
    count(layer, torch.rand(4, 16))
    assert type(layer.weight) is Quantised and layer.weight.data8 is data and data.dtype is torch.int8


MATRIX = torch.tensor([[1.0, 0, 0, 2], [0, 0, 3, 0], [0, 0, 0, 0], [4, 0, 5, 6], [0, 7, 0, 0], [0, 0, 8, 0]])
LAYOUTS = {
    "coo": MATRIX.to_sparse(),
    "csr": MATRIX.to_sparse_csr(),
    "csc": MATRIX.to_sparse_csc(),
    "bsr": MATRIX.to_sparse_bsr((2, 2)),
}


def stored_products(matrix, columns):
    """Return how many multiply-adds there are, one for each element that is stored and each column, zeros of a block
    included."""
    blocks = {(row // 2, column // 2) for row, column in MATRIX.nonzero().tolist()}
    elements = 4 * len(blocks) if matrix.layout is torch.sparse_bsr else len(MATRIX.nonzero())
    return elements * columns


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("function", [torch.sparse.mm, operator.matmul, torch.mm])
def test_a_sparse_matrix_by_a_dense_one(layout, function):
    matrix = LAYOUTS[layout]
    assert count(function, matrix, torch.rand(4, 5)).total() == stored_products(matrix, 5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_linear_layer_with_a_sparse_weight(layout):
    layer = nn.Linear(4, 6, bias=False)
    layer.weight = nn.Parameter(LAYOUTS[layout], requires_grad=False)
    assert count(layer, torch.rand(5, 4)).total() == stored_products(LAYOUTS[layout], 5)


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_sparse_matrix_that_is_added_to(layout):
    total = count(torch.addmm, torch.rand(6, 5), LAYOUTS[layout], torch.rand(4, 5)).total()
    assert total == stored_products(LAYOUTS[layout], 5)


@pytest.mark.parametrize("layout", ["coo", "csr"])
def test_a_sparse_matrix_by_a_vector(layout):
    assert count(torch.mv, LAYOUTS[layout], torch.rand(4)).total() == stored_products(LAYOUTS[layout], 1)


def test_a_matrix_that_becomes_sparse_on_the_way():
    total = count(lambda x, y: x.to_sparse_csr() @ y, MATRIX, torch.rand(4, 5)).total()
    assert total == stored_products(LAYOUTS["csr"], 5)


LENGTHS = (3, 5)
TOGETHER = sum(LENGTHS)
ROWS = [torch.rand(length, 8) for length in LENGTHS]
HEADS = [torch.rand(length, 2, 4) for length in LENGTHS]
WEIGHT = torch.rand(6, 8)


def nest(*parts, layout):
    return torch.nested.as_nested_tensor(list(parts), layout=layout)


def test_a_jagged_input_counts_what_it_holds():
    model = nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.LayerNorm(6))
    analysis = FlopCountAnalysis(model, nest(*ROWS, layout=torch.jagged))
    assert analysis.by_operator() == {"linear": TOGETHER * 8 * 6, "layer_norm": 5 * TOGETHER * 6}
    assert analysis.by_module()["0"] == TOGETHER * 8 * 6


def test_a_jagged_tensor_that_is_made_on_the_way_counts_what_it_holds():
    function = lambda *given: F.linear(nest(*given[:2], layout=torch.jagged), given[2]).values()  # noqa: E731
    assert count(function, *ROWS, weights=[WEIGHT]).total() == TOGETHER * 8 * 6


@pytest.mark.parametrize("made", [True, False])
def test_a_strided_nested_tensor_counts_what_it_holds(made):
    if made:
        function = lambda *given: F.linear(nest(*given[:2], layout=torch.strided), given[2])  # noqa: E731
        total = count(lambda *given: function(*given).to_padded_tensor(0.0), *ROWS, weights=[WEIGHT]).total()
    else:
        total = count(F.linear, nest(*ROWS, layout=torch.strided), weights=[WEIGHT]).total()
    assert total == TOGETHER * 8 * 6


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_the_attention_of_nested_tensors_counts_what_they_hold(layout):
    def attend(*parts):
        heads = nest(*parts, layout=layout).transpose(1, 2)
        heads = heads.contiguous() if layout is torch.strided else heads
        return F.scaled_dot_product_attention(heads, heads, heads)

    pairs = sum(2 * length * length for length in LENGTHS)
    assert count(attend, *HEADS).by_operator() == {"scaled_dot_product_attention": pairs * (4 + 4)}


def test_an_encoder_that_nests_its_padded_batch_counts_as_if_padded():
    """torch's fast path leaves the padding out where it runs; the count is of the path that everyone can run."""
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1).eval()
    mask = torch.tensor([[False] * 3 + [True] * 2, [False] * 5])
    x = torch.rand(2, 5, 8)
    alone, masked = (FlopCountAnalysis(model, inputs).by_operator() for inputs in ((x,), (x, None, mask)))
    assert masked == alone


def test_a_masked_tensor_counts_like_a_plain_one():
    x, mask = torch.rand(4, 8), torch.rand(4, 8) > 0.5
    analysis = count(lambda x, mask: (torch.masked.masked_tensor(x, mask) * 2).sum(-1), x, mask)
    assert analysis.total() == 0 and analysis.unsupported_ops() == {"aten::mul": 1, "aten::sum": 1}


def test_what_a_masked_tensor_cannot_do_raises_as_without_a_count():
    """It knows no products, and says so itself."""
    masked = torch.masked.masked_tensor(torch.rand(4, 8), torch.rand(4, 8) > 0.5)
    with pytest.raises(TypeError, match="unsupported operand"):
        FlopCountAnalysis(Calls(operator.matmul), (masked, torch.rand(8, 3))).total()


class Image(torch.Tensor):
    """A subclass that torch gives its results too."""


@pytest.mark.parametrize(
    ("x", "what", "total"),
    [
        (torch.ones(2, 8).as_subclass(Image), "tensors of class Image", 2 * 8 * 6),
        (nest(*ROWS, layout=torch.strided), "nested tensors", TOGETHER * 8 * 6),
        (torch.eye(8).to_sparse(), "tensors of layout torch.sparse_coo", 8 * 6),
    ],
)
def test_a_class_of_tensors_that_shape_execution_lacks_is_named_and_counted(x, what, total):
    model = nn.Linear(8, 6, bias=False)
    with pytest.raises(ExecutionError, match=rf"shape execution does not support {what}\): use execution=\"auto\"$"):
        FlopCountAnalysis(model, x, execution="shapes").total()
    assert FlopCountAnalysis(model, x).total() == total
