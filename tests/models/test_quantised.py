"""Models of torch.ao quantisation: they count what the models that they were made of count."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.ao import quantization
from torch.ao.nn import quantized

from fvflops import FlopCountAnalysis, parameter_count, parameter_summary
from fvflops.trace import Status
from tests.support.models.parts import Applied
from tests.support.models.whole_models import Function

pytestmark = pytest.mark.skipif(
    torch.backends.quantized.engine in (None, "none"), reason="this torch has no kernels for quantised tensors"
)


@pytest.fixture(autouse=True)
def _deprecated():
    """torch says of its own quantisation that another library will take its place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def total_of(model, *inputs):
    """Return the products of a model, whose every op is known."""
    analysis = FlopCountAnalysis(model, inputs)
    assert not analysis.counts().ledger()[Status.UNSUPPORTED]
    return sum(analysis.by_operator()[label] for label in PRODUCTS)


PRODUCTS = ("linear", "linear_dynamic", "linear_relu", "conv", "lstm", "gru", "lstm_cell", "gru_cell", "rnn_tanh_cell")


class Net(nn.Module):
    """Grouped, pointwise, strided and padded convolutions, one with a sum behind it, and a linear layer."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = quantization.QuantStub(), quantization.DeQuantStub()
        self.first, self.relu = nn.Conv2d(4, 6, 3, groups=2, padding=1), nn.ReLU()
        self.second = nn.Conv2d(6, 6, 1, bias=False)
        self.third = nn.Conv2d(6, 8, 3, stride=2)
        self.last = nn.Linear(8, 5)
        self.sum = quantized.FloatFunctional()

    def forward(self, x):
        x = self.relu(self.first(self.enter(x)))
        x = self.third(self.sum.add(x, self.second(x)))
        return self.leave(self.last(x.mean((2, 3))))


def test_a_convolutional_net_of_quantised_tensors():
    model, x = Net().eval(), torch.rand(2, 4, 9, 9)
    plain = total_of(model, x)
    assert plain == 2 * (81 * 6 * 2 * 9 + 81 * 6 * 6 + 16 * 8 * 6 * 9 + 8 * 5)
    model.qconfig = quantization.get_default_qconfig(torch.backends.quantized.engine)
    quantization.fuse_modules(model, [["first", "relu"]], inplace=True)
    prepared = quantization.prepare(model)
    prepared(x)
    converted = quantization.convert(prepared)
    assert isinstance(converted.third, quantized.Conv2d)
    assert total_of(converted, x) == plain


@pytest.mark.parametrize(
    ("kind", "rank"), [("Conv1d", 1), ("Conv2d", 2), ("Conv3d", 3), ("ConvTranspose1d", 1), ("ConvTranspose2d", 2)]
)
@pytest.mark.parametrize("groups", [1, 2])
def test_a_quantised_convolution(kind, rank, groups):
    plain = getattr(nn, kind)(4, 6, 3, stride=2, groups=groups)
    x = torch.rand(2, 4, *[7] * rank)
    layer = getattr(quantized, kind)(4, 6, 3, stride=2, groups=groups)
    assert total_of(layer, torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)) == total_of(plain, x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(6, 5),
        lambda: nn.LSTM(6, 5),
        lambda: nn.LSTM(6, 5, num_layers=2, bidirectional=True),
        lambda: nn.LSTM(6, 5, num_layers=3, batch_first=True),
        lambda: nn.GRU(6, 5, num_layers=2, bidirectional=True),
        *(partial(kind, 6, 5) for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)),
    ],
)
def test_a_layer_or_cell_of_dynamic_quantisation(make):
    plain = make()
    x = torch.rand(2, 6) if isinstance(plain, nn.RNNCellBase) else torch.rand(3, 2, 6)
    layer = quantization.quantize_dynamic(nn.Sequential(plain))[0]
    assert type(layer) is not type(plain) and total_of(layer, x) == total_of(plain, x)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_packed_batch_of_dynamic_quantisation(kind):
    plain = kind(6, 5, num_layers=2)
    packed = nn.utils.rnn.pack_sequence([torch.rand(4, 6), torch.rand(3, 6)])
    layer = quantization.quantize_dynamic(nn.Sequential(plain))[0]
    assert total_of(layer, packed) == total_of(plain, packed)


needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or "onednn" not in torch.backends.quantized.supported_engines,
    reason="this torch has no oneDNN",
)


@needs_onednn
@pytest.mark.parametrize("groups", [1, 2])
def test_a_packed_quantised_convolution(groups):
    weight = torch.randint(-8, 8, (6, 4 // groups, 3, 3), dtype=torch.int8)
    ones, zeros = torch.ones(6), torch.zeros(6, dtype=torch.int64)
    where = ([1, 1], [0, 0], [1, 1], groups)
    packed = torch.ops.onednn.qconv_prepack(weight, ones, 1.0, 0, *where, [1, 4, 8, 8])

    def convolve(x):
        rest = (1.0, 0, torch.float32, "none", [], "")
        return torch.ops.onednn.qconv2d_pointwise(x, 1.0, 0, packed, ones, zeros, None, *where, *rest)

    x = torch.randint(0, 8, (1, 4, 8, 8), dtype=torch.uint8)
    assert total_of(Function(convolve), x) == total_of(nn.Conv2d(4, 6, 3, groups=groups), x.float())


@needs_onednn
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("transposed", [True, False])
def test_a_packed_convolution(transposed, groups, packs):
    plain = (nn.ConvTranspose2d if transposed else nn.Conv2d)(4, 6, 3, groups=groups)
    more = ([0, 0], [0, 0]) if transposed else ([0, 0],)
    where = (*more, [1, 1], [1, 1], groups)
    kind = "_transpose" if transposed else ""
    weight = plain.weight.detach()
    if packs:
        weight = getattr(torch.ops.mkldnn, f"_reorder_convolution{kind}_weight")(weight, *where, [1, 4, 8, 8])
    run = getattr(torch.ops.mkldnn, f"_convolution{kind}_pointwise")
    x = torch.rand(1, 4, 8, 8)
    assert total_of(Function(lambda x: run(x, weight, None, *where, "none", [], "")), x) == total_of(plain, x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Linear(6, 5),
        lambda: nn.Linear(6, 5, bias=False),
        lambda: nn.LSTM(6, 5, num_layers=2, bidirectional=True),
        lambda: nn.GRU(6, 5, num_layers=2),
        lambda: nn.LSTMCell(6, 5),
        lambda: nn.RNNCell(6, 5),
    ],
)
@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
def test_packed_weights_count_as_parameters(make, dtype):
    """As many as the layer had, all of them used when it runs."""
    plain = make()
    model = quantization.quantize_dynamic(nn.Sequential(plain), dtype=dtype)
    expected = sum(tensor.numel() for tensor in plain.parameters())
    missing = 5 if isinstance(plain, nn.Linear) and plain.bias is None else 0  # torch packs a bias of zeros
    assert parameter_count(model)[""] in (expected, expected + missing)
    analysis = FlopCountAnalysis(model, torch.rand(2, 6) if "Cell" in str(plain) else torch.rand(3, 2, 6))
    summary = parameter_summary(analysis)[""]
    assert (summary.active, summary.unused, summary.trainable) == (summary.total, 0, 0)
    assert summary.total == parameter_count(model)[""] > 0
    tells = isinstance(plain, (nn.LSTM, nn.Linear))  # the other ops' arguments do not say what is packed
    assert set(analysis.by_dtype()) == {"float32" if dtype is torch.float16 and tells else "int8"}


def test_the_parameters_of_a_convolutional_net():
    model = Net().eval()
    before = parameter_count(model)
    model.qconfig = quantization.get_default_qconfig(torch.backends.quantized.engine)
    prepared = quantization.prepare(model)
    prepared(torch.rand(2, 4, 9, 9))
    after = parameter_count(quantization.convert(prepared))
    assert after[""] == before[""] == 4 * 6 * 9 // 2 + 6 + 6 * 6 + 6 * 8 * 9 + 8 + 8 * 5 + 5
    assert after["last"] == before["last"] and after["first"] == before["first"]


def test_a_packed_weight_that_two_modules_share_counts_once():
    layer = quantization.quantize_dynamic(nn.Sequential(nn.Linear(6, 5)))[0]
    shared = nn.Sequential(layer, nn.Sequential(layer))
    assert parameter_count(shared)[""] == 35


def test_a_packed_layer_that_never_runs_is_unused():
    summary = parameter_summary(
        FlopCountAnalysis(
            quantization.quantize_dynamic(
                Applied(lambda self, x: self.used(x), used=nn.Linear(6, 6), left=nn.Linear(6, 6))
            ),
            torch.rand(2, 6),
        )
    )
    assert (summary[""].total, summary[""].unused) == (84, 42)
    assert summary["left"].unused == 42 and summary["used"].active == 42


def test_a_table_of_embeddings():
    plain = nn.EmbeddingBag(8, 4)
    plain.qconfig = quantization.float_qparams_weight_only_qconfig
    assert parameter_count(quantized.EmbeddingBag.from_float(plain))[""] == 32
