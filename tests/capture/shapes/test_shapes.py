"""Compare shape execution with real execution: calls, totals, memory, and the fallback where values are needed."""

import copy
import gc
import logging
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.capture.run import ExecutionError, record_call
from fvflops.capture.shapes.rules.assumptions import can_be_assumed
from fvflops.capture.shapes.shape_cache import clear_cache, outcome_count
from fvflops.counting import count
from fvflops.trace import tensors_in
from fvflops.zoo.llama import Attention, LlamaConfig
from tests.support.models.layers import LAYERS, Swish
from tests.support.models.parts import Applied
from tests.support.models.whole_models import MODELS, USUAL, build_case
from tests.support.old_torch import OLDER, VERSION
from tests.support.random_cases import long_except
from tests.support.trace_comparison import OPEN, PRICER, WAYS_OF_VIEWS, add_up, differences, text_of, totals_of

record = partial(record_call, stops_at=PRICER.stops_at)

# Ops that torch calls for a tensor subclass only, or for other tensors only. All of them are zero-FLOP.
OTHER_OPS = {
    "in place, through views": WAYS_OF_VIEWS,
    # A parameter created from a tensor of a subclass is a detached alias of it.
    "a module made inside": frozenset({"aten::detach"}),
    # Checks for values out of range, and then scatters ones or compares.
    "one_hot": frozenset(
        f"aten::{op}"
        for op in (
            "aminmax",
            "min",
            "max",
            "_local_scalar_dense",
            "zeros",
            "scatter_",
            "arange",
            "eq",
            "_to_copy",
            "unsqueeze",
        )
    ),
}


def assert_same(shapes, real, *, other_ways=frozenset()):
    """Fail with one line for each difference."""
    lines = differences(shapes, real, other_ways=other_ways)
    assert not lines, "\n".join(lines)


def run_both(case, *, backward=False, other_ways=frozenset()):
    """Record a case in shape execution and real execution, compare, and return the trace of shape execution."""
    model, args, kwargs = case
    loss = add_up if backward else None
    shapes = record(model, args, kwargs, execution="shapes", loss=loss)
    real = record(model, args, kwargs, execution="real", loss=loss)
    assert_both(shapes, real, backward=backward, other_ways=other_ways)
    return shapes


def assert_both(shapes, real, *, backward, other_ways=frozenset()):
    """Check that two traces are of shape execution and of real execution, and equal."""
    assert (shapes.about["execution"], real.about["execution"]) == ("shapes", "real")
    assert_same(shapes, real, other_ways=other_ways)
    if backward:
        assert any(phase == "backward" for _, _, phase in shapes.calls)


def on_meta(model):
    """Return a copy of a model on the meta device with tied parameters, which `Module.to` would untie."""
    meta_copy = copy.deepcopy(model)
    moved = {}
    for module in meta_copy.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                moved.setdefault(id(parameter), nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad))
                module._parameters[name] = moved[id(parameter)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to("meta")
        if isinstance(module, nn.RNNBase):
            module._flat_weights = [getattr(module, name) for name in module._flat_weights_names]
    return meta_copy


@pytest.fixture(scope="module", params=long_except(USUAL, MODELS))
def zoo_case(request):
    """A model of MODELS, built once for all tests, since a recording does not change it."""
    model, args = build_case(request.param)
    return model, args, {}


@pytest.fixture(scope="module", params=[None, add_up], ids=["forward", "backward"])
def zoo_run(zoo_case, request):
    """The loss, if any, and the trace of shape execution to compare with."""
    model, args, kwargs = zoo_case
    loss = request.param
    return loss, record(model, args, kwargs, execution="shapes", loss=loss)


def test_zoo_model_has_the_same_costs_in_shape_execution(zoo_case, zoo_run):
    model, args, kwargs = zoo_case
    loss, shapes = zoo_run
    real = record(model, args, kwargs, execution="real", loss=loss)
    assert_both(shapes, real, backward=loss is not None)


def test_zoo_model_has_the_same_costs_on_the_meta_device(zoo_case, zoo_run):
    model, args, kwargs = zoo_case
    assert isinstance(model, nn.Module)
    loss, expected = zoo_run
    # "auto" cannot fall back to real execution here.
    trace = record(on_meta(model), args, kwargs, loss=loss)
    assert trace.about["execution"] == "shapes" and trace.about["device"] == "cpu"
    assert not any(spec.device == "meta" for item in trace.signatures for spec in tensors_in(item.inputs))
    assert_same(trace, expected)


def after_linear(function, *more):
    """Return a model that applies a function to the (2, 4) result of a linear layer and further arguments."""
    model = Applied(lambda self, x, *rest: function(self.fc(x), *rest), fc=nn.Linear(4, 4))
    return model, (torch.randn(2, 4), *more), {}


def before_linear(layer, *shape):
    """Return a layer whose input requires a gradient, since it is multiplied by a parameter."""
    model = Applied(lambda self, x: self.layer(x * self.scale), layer=layer, scale=nn.Parameter(torch.ones(1)))
    return model, (torch.randn(shape),), {}


def attend(*shapes, dtype=torch.float32, **options):
    """Return a scaled dot product attention on query, key and value of these shapes."""
    model = Applied(
        lambda self, q, k, v, **more: F.scaled_dot_product_attention(q * self.scale, k, v, **more),
        scale=nn.Parameter(torch.ones(1, dtype=dtype)),
    )
    q, k, v = (torch.randn(shape, dtype=dtype) for shape in (shapes * 3)[:3])
    return model, (q, k, v), options


def of_layer(make):
    """Return a layer whose inputs require gradients, as results of ops: it may write to them."""
    layer, inputs = make()
    model = Applied(
        lambda self, *args: self.layer(*(x * self.scale if x.is_floating_point() else x for x in args)),
        layer=layer,
        scale=nn.Parameter(torch.ones(1)),
    )
    return model, inputs, {}


def encode(training, *, masked=False):
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    kwargs = {"src_key_padding_mask": mask} if masked else {}
    return nn.TransformerEncoder(layer, 2).train(training), (torch.randn(2, 5, 16),), kwargs


def translate(training):
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True).train(training)
    return model, (torch.randn(2, 5, 16), torch.randn(2, 4, 16)), {"tgt_mask": mask, "tgt_is_causal": True}


def check_point(reentrant):
    model = Applied(
        lambda self, x: checkpoint(self.block, self.first(x), use_reentrant=reentrant),
        first=nn.Linear(4, 4),
        block=nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 4)),
    )
    return model, (torch.randn(2, 4),), {}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


@torch.library.custom_op("fvflops_shapes::thrice", mutates_args=())
def thrice(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@thrice.register_fake
def _(x):
    return torch.empty_like(x)


thrice.register_autograd(lambda ctx, grad: grad * 3, setup_context=lambda ctx, inputs, output: None)


@torch.library.custom_op("fvflops_shapes::fill", mutates_args={"out"})
def fill(x: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(x)


@fill.register_fake
def _(x, out):
    return None


@torch.library.custom_op("fvflops_shapes::ruleless", mutates_args=())
def ruleless(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def fill_and_use(x):
    out = torch.empty_like(x)
    fill(x.detach(), out)
    return x + out


def write_through_views(x):
    x = x.clone()
    x[:, 1:3] = 0
    x[0] += 1
    x.view(-1)[2:4].mul_(2)
    return x


def write_where(x, mask):
    x = x.clone()
    x[mask] = 0
    return x


def continue_cache(self, x, cache):
    end = 2 + x.shape[1]
    cache["k"][:, 2:end] = self.key(x)
    cache["v"][:, 2:end].copy_(self.value(x))
    return F.scaled_dot_product_attention(self.query(x), cache["k"][:, :end], cache["v"][:, :end])


def cached():
    parts = {name: nn.Linear(4, 4) for name in ("query", "key", "value")}
    cache = {"k": torch.zeros(1, 8, 4), "v": torch.zeros(1, 8, 4)}
    return Applied(continue_cache, **parts), (torch.randn(1, 3, 4), cache), {}


def index_copied():
    model = Applied(lambda self, x, cache, at: self.fc(x) @ cache.index_copy_(1, at, x).mT, fc=nn.Linear(4, 4))
    return model, (torch.randn(1, 3, 4), torch.zeros(1, 8, 4), torch.tensor([2, 3, 4])), {}


def tie():
    model = Applied(lambda self, ids: self.head(self.embedding(ids)), embedding=nn.Embedding(10, 4))
    model.head = nn.Linear(4, 10, bias=False)
    model.head.weight = model.embedding.weight
    return model, (torch.tensor([[1, 2, 3]]),), {}


def bag(mode, *args):
    return nn.EmbeddingBag(10, 4, mode=mode), args, {}


def normalise(layer, training):
    return before_linear(layer.train(training), 3, 4, 5, 5)


BAGS = torch.tensor([1, 2, 4, 5, 4, 3]), torch.tensor([0, 2, 4])
INDEX = torch.tensor([[0, 1, 1, 1], [1, 1, 0, 0]])
MASK = torch.tensor([[True, False, True, True], [False, False, True, False]])

LOSSES = (
    lambda x: F.cross_entropy(x, torch.tensor([1, 2]), label_smoothing=0.1),
    lambda x: F.cross_entropy(x, torch.tensor([1, -100]), weight=torch.ones(4)),
    lambda x: F.mse_loss(x, x * 2),
    lambda x: F.smooth_l1_loss(x, x * 2),
    lambda x: F.kl_div(x.log_softmax(-1), x.softmax(-1)),
    lambda x: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid()),
    lambda x: F.nll_loss(x.log_softmax(-1), torch.tensor([1, 2])),
    lambda x: F.cosine_embedding_loss(x, x, torch.tensor([1, -1])),
    lambda x: F.triplet_margin_loss(x, x * 2, x * 3),
    lambda x: F.multilabel_soft_margin_loss(x, x.detach().sigmoid()),
)


# By name. Each result depends on a parameter or an input that has a gradient, so that there is a backward pass.
CASES = {
    **{name: partial(of_layer, make) for name, make in LAYERS.items()},
    "LSTM with dropout": lambda: (nn.LSTM(4, 6, num_layers=2, dropout=0.5), (torch.randn(5, 3, 4),), {}),
    "LSTM in eval mode": lambda: (nn.LSTM(4, 6).eval(), (torch.randn(5, 3, 4),), {}),
    "scaled attention": partial(attend, (2, 4, 8, 16)),
    "attention, bool mask": partial(attend, (2, 4, 8, 16), attn_mask=torch.ones(8, 8, dtype=torch.bool).tril()),
    "attention, float mask": partial(attend, (2, 4, 8, 16), attn_mask=torch.zeros(2, 1, 8, 8)),
    "attention, grouped queries": partial(attend, (2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16), enable_gqa=True),
    "attention, two lengths": partial(attend, (2, 4, 8, 16), (2, 4, 5, 16), (2, 4, 5, 24)),
    "attention, bfloat16": partial(attend, (2, 4, 8, 16), dtype=torch.bfloat16),
    "encoder, train": partial(encode, True),
    "encoder, eval": partial(encode, False),
    "encoder with padding, train": partial(encode, True, masked=True),
    "encoder with padding, eval": partial(encode, False, masked=True),
    "transformer, train": partial(translate, True),
    "transformer, eval": partial(translate, False),
    **{
        f"{name}, {'train' if training else 'eval'}": partial(
            lambda make, training: normalise(make(), training), make, training
        )
        for name, make in {
            "batch norm": partial(nn.BatchNorm2d, 4),
            "batch norm, cumulative": partial(nn.BatchNorm2d, 4, momentum=None),
            "batch norm without statistics": partial(nn.BatchNorm2d, 4, track_running_stats=False),
            "instance norm": partial(nn.InstanceNorm2d, 4, affine=True, track_running_stats=True),
            "dropout": nn.Dropout,
            "dropout of channels": nn.Dropout2d,
            "alpha dropout": nn.AlphaDropout,
            "randomised ReLU": nn.RReLU,
        }.items()
        for training in (True, False)
    },
    "spectral norm, train": lambda: before_linear(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), 2, 4),
    "spectral norm, eval": lambda: before_linear(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)).eval(), 2, 4),
    "spectral norm by a hook": lambda: before_linear(nn.utils.spectral_norm(nn.Linear(4, 4)), 2, 4),
    "weight norm": lambda: before_linear(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), 2, 4),
    "weight norm by a hook": lambda: before_linear(nn.utils.weight_norm(nn.Linear(4, 4)), 2, 4),
    "checkpoint": partial(check_point, False),
    "reentrant checkpoint": partial(check_point, True),
    "autograd function": lambda: after_linear(lambda x: Swish.apply(x).cos()),
    "autograd function in place": lambda: after_linear(lambda x: Doubled.apply(x).cos()),
    "grad inside": lambda: after_linear(torch.func.grad(lambda x: (x.sin() ** 2).sum())),
    "vmap inside": lambda: after_linear(torch.func.vmap(lambda x: x.sin() @ x)),
    "vmap of grad inside": lambda: after_linear(torch.func.vmap(torch.func.grad(lambda x: x.sin() @ x))),
    "Jacobian inside": lambda: after_linear(torch.func.jacrev(torch.sin)),
    "functional call": lambda: (
        Applied(
            lambda self, x: torch.func.functional_call(self.fc, {"weight": self.fc.weight * 2}, (x,)),
            fc=nn.Linear(4, 3),
        ),
        (torch.randn(2, 4),),
        {},
    ),
    "a module made inside": lambda: after_linear(lambda x: nn.Linear(4, 3)(x)),
    "gradient in forward": lambda: after_linear(lambda x: torch.autograd.grad(x.sin().sum(), x, create_graph=True)[0]),
    "no_grad inside": lambda: after_linear(lambda x: x + torch.no_grad()(torch.sin)(x)),
    "inference_mode inside": lambda: after_linear(lambda x: x + torch.inference_mode()(torch.sin)(x).clone()),
    "custom op": lambda: after_linear(lambda x: thrice(x).sin()),
    "custom op that writes": lambda: after_linear(fill_and_use),
    "in place": lambda: after_linear(lambda x: x.mul_(2).add_(1).relu_()),
    "in place, through views": lambda: after_linear(write_through_views),
    "key-value cache": cached,
    "key-value cache by index": index_copied,
    "bags": partial(bag, "sum", *BAGS),
    "bags, mean": partial(bag, "mean", *BAGS),
    "bags, max": partial(bag, "max", *BAGS),
    "bags of one size": partial(bag, "mean", torch.tensor([[1, 2, 4], [5, 4, 3]])),
    "bags with weights": partial(bag, "sum", torch.tensor([[1, 2, 4], [5, 4, 3]]), None, torch.ones(2, 3)),
    "embedding with padding": lambda: (nn.Embedding(10, 4, padding_idx=0), (torch.tensor([[1, 2, 0]]),), {}),
    "dilated convolution": lambda: (nn.Conv2d(4, 8, 3, padding="same", dilation=2), (torch.randn(2, 4, 7, 7),), {}),
    "circular convolution": lambda: (
        nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular"),
        (torch.randn(2, 4, 7, 7),),
        {},
    ),
    "channels last": lambda: (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3)).to(memory_format=torch.channels_last),
        (torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),),
        {},
    ),
    "tied weights": tie,
    "index_put": lambda: after_linear(
        lambda x: x.index_put((torch.tensor([0, 1]), torch.tensor([0, 1])), torch.ones(2), accumulate=True)
    ),
    "index by a known mask": lambda: after_linear(lambda x, mask: x[mask] * 2, MASK),
    "write by a known mask": lambda: after_linear(write_where, MASK),
    "select by a known mask": lambda: after_linear(lambda x, mask: x.masked_select(mask) * 2, MASK),
    "fill by a known mask": lambda: after_linear(lambda x, mask: x.masked_fill(mask, 0).where(mask, x), MASK),
    "known repeats": lambda: after_linear(lambda x, repeats: x.repeat_interleave(repeats, 0), torch.tensor([1, 3])),
    "scatter": lambda: after_linear(lambda x, i: x.scatter(0, i, x.exp()).scatter_add(0, i, x), INDEX),
    "scatter_reduce": lambda: after_linear(lambda x, i: x.scatter_reduce(0, i, x.exp(), "amax"), INDEX),
    "gather": lambda: after_linear(lambda x, i: x.gather(1, i) + x.take_along_dim(i, 1), INDEX),
    "index_add": lambda: after_linear(lambda x, i: x.index_add(1, i, x).index_select(1, i), torch.tensor([3, 2, 1, 0])),
    "cumulative": lambda: after_linear(lambda x: x.cumsum(0) + x.cumprod(1) + x.logcumsumexp(0) + x.cummax(0)[0]),
    "sort": lambda: after_linear(lambda x: (x.sort(-1)[0], x.max(-1)[0], x.median(-1)[0], x.kthvalue(1)[0])),
    "topk": lambda: after_linear(lambda x: (x.topk(2)[0], x.gather(1, x.topk(2)[1]))),
    "one_hot": lambda: after_linear(lambda x: F.one_hot(x.argmax(-1), 4) * x),
    "FFT": lambda: after_linear(
        lambda x: (torch.fft.fft(x), torch.fft.irfft(torch.fft.rfft(x)), torch.fft.fft2(x), torch.fft.hfft(x))
    ),
    "STFT": lambda: after_linear(
        lambda x: torch.stft(x.flatten().repeat(4), 8, 4, window=torch.hann_window(8), return_complex=True)
    ),
    "complex numbers": lambda: after_linear(
        lambda x: (
            torch.complex(x, x).mH @ torch.complex(x, x),
            torch.view_as_real(torch.complex(x, x).conj() * torch.polar(x, x)),
            torch.complex(x, x).conj().imag.neg(),
        )
    ),
    "losses": lambda: after_linear(lambda x: [loss(x) for loss in LOSSES]),
    "statistics": lambda: after_linear(
        lambda x: (x.std(), torch.var_mean(x), x.logsumexp(0), x.norm(dim=1), x.prod(), x.quantile(0.5), torch.cov(x))
    ),
    "random numbers": lambda: after_linear(
        lambda x: (x + torch.randn_like(x) + torch.rand(2, 4) + torch.bernoulli(x.sigmoid()), torch.randperm(4))
    ),
    "constants": lambda: after_linear(
        lambda x: x * torch.tensor([1.0, 2, 3, 4]) + torch.tensor(2.0) + x.new_tensor([1.0]) + torch.full((4,), 2)
    ),
    "NumPy array": lambda: after_linear(lambda x: x + torch.from_numpy(np.ones(4, dtype="float32"))),
    "autocast": lambda: after_linear(torch.autocast("cpu", torch.bfloat16)(lambda x: F.linear(x, x))),
    "rows in a loop": lambda: after_linear(lambda x: torch.stack([row * n for n, row in enumerate(x)])),
    "lists of tensors": lambda: after_linear(lambda x: torch._foreach_add([x, x * 2], 1.0)),
    "other dtypes": lambda: after_linear(lambda x: (x.double(), x.half().float(), x.type_as(x.double()), x.long())),
    "view as another dtype": lambda: after_linear(lambda x: x.detach().view(torch.int32).view(torch.float32) + x),
}


# One of each kind. By default the others run with a backward pass only, which has the same forward pass.
KINDS = (
    *("lstm, deep", "gru", "attention, grouped queries", "encoder, train", "encoder, eval", "batch norm, train"),
    *("dropout, train", "checkpoint", "autograd function", "custom op", "tied weights", "bags, mean"),
    *("conv transpose 2d", "spectral norm, train", "losses", "key-value cache"),
)
WITH_BACKWARD, FORWARD = (tuple((name, backward) for name in CASES) for backward in (True, False))


@pytest.mark.parametrize(
    ("name", "backward"), long_except((*WITH_BACKWARD, *((name, False) for name in KINDS)), WITH_BACKWARD + FORWARD)
)
def test_small_model_has_the_same_costs_in_shape_execution(name, backward):
    if VERSION < (2, 9) and backward and name == "FFT":
        pytest.skip("this torch's transforms refuse an expanded gradient")
    if OLDER and backward and name in ("lstm without biases", "rnn, deep", "gru, deep"):
        pytest.skip(f"torch {torch.__version__}: its meta kernel gives the absent biases other gradients")
    torch.manual_seed(0)
    run_both(CASES[name](), backward=backward, other_ways=OTHER_OPS.get(name, frozenset()))


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("name", KINDS)
def test_small_model_has_the_same_costs_on_the_meta_device(name, backward):
    loss = add_up if backward else None
    model, args, kwargs = CASES[name]()
    assert isinstance(model, nn.Module)
    real = record(model, args, kwargs, execution="real", loss=loss)
    shapes = record(on_meta(model), args, kwargs, execution="shapes", loss=loss)
    assert_same(shapes, real)


@pytest.mark.parametrize("name", ["zoo:llama_tiny", "torchvision:resnet18", "transformers:BertModel"])
def test_model_built_on_the_meta_device_has_the_same_costs(name):
    with torch.device("meta"):
        model = MODELS[name]()[0].eval()
    real, args = build_case(name)
    for loss in (None, add_up):
        trace = record(model, args, loss=loss)
        assert_same(trace, record(real, args, execution="real", loss=loss))


def test_inputs_on_the_meta_device_work_with_real_weights():
    model, args = build_case("torchvision:resnet18")
    expected = record(model, args, execution="shapes")
    trace = record(model, tuple(tensor.to("meta") for tensor in args))
    assert trace.about["execution"] == "shapes"
    assert_same(trace, expected)


def test_forward_mode_derivatives_have_the_same_costs():
    """Only totals: real execution omits some additions of zero derivatives, which are zero-FLOP."""
    for derive in (torch.func.jacfwd(torch.sin), lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1]):
        shapes, real = (record(*after_linear(derive)[:2], execution=execution) for execution in ("shapes", "real"))
        assert totals_of(shapes) == totals_of(real)


def test_op_that_changes_the_shape_of_its_argument_is_recorded_with_both_shapes():
    for execution in ("shapes", "real"):
        trace = record_call(lambda x: (x + 1).transpose_(0, 1), (torch.ones(2, 3),), execution=execution)
        (signature,) = (item for item in trace.signatures if item.packet == "aten::transpose_")
        assert text_of(signature.inputs[0]) == "float32[2, 3]@cpu"
        assert text_of(signature.outputs[0]) == "float32[3, 2]@cpu"


def test_comparison_detects_each_difference():
    def run(model, x, **options):
        return record(model, (x,), **options)

    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.ones(2, 4)
    base = run(model, x, execution="shapes")
    assert_same(base, run(model, x, execution="real"))
    assert any("float32[3, 4]" in line for line in differences(base, run(model, torch.ones(3, 4), execution="real")))
    repeated = nn.Sequential(model[0], nn.ReLU(), model[0])
    assert any(line.startswith("totals") for line in differences(base, run(repeated, x, execution="real")))
    moved = nn.Sequential(nn.Sequential(model[0]), nn.ReLU())
    assert differences(base, run(moved, x, execution="real"))
    assert any("relu" in line for line in differences(base, run(nn.Sequential(model[0]), x, execution="real")))
    assert differences(base, run(model, x, execution="real", loss=add_up))
    double = run(nn.Sequential(nn.Linear(4, 4), nn.ReLU()).double(), x.double(), execution="real")
    assert any("float64" in line for line in differences(base, double))
    # An op in other_ways must be named, and zero-FLOP.
    assert differences(run(nn.ReLU(), x), run(nn.Tanh(), x), other_ways=frozenset({"aten::relu"})) != []
    assert differences(base, run(repeated, x), other_ways=frozenset({"aten::linear"})) != []


@pytest.mark.parametrize("op", OPEN)
def test_ops_with_ignored_arguments_are_zero_flop(op):
    """Otherwise a difference in their arguments would be a difference in the totals."""
    inputs, outputs = OPEN[op]
    packet, _, overload_name = op.removeprefix("aten::").partition(".")
    overload = getattr(getattr(torch.ops.aten, packet), overload_name or "default")
    names = tuple(argument.name for argument in overload._schema.arguments)
    assert inputs <= set(names)
    assert all(index < len(overload._schema.returns) for index in outputs)


# Ways to read values, each with the op names of which the message contains one.
VALUE_READS = {
    "item": (lambda y: y.sum().item(), "item|_local_scalar_dense"),
    "bool": (lambda y: bool(y.sum()), "item|_local_scalar_dense|is_nonzero|bool"),
    "if": (lambda y: 1 if y.sum() > 0 else 2, "item|_local_scalar_dense|is_nonzero|bool"),
    "float": (lambda y: float(y.sum()), "item|_local_scalar_dense|float"),
    "int": (lambda y: int(y.sum()), "item|_local_scalar_dense|int"),
    "range": (lambda y: range(y.argmax()), "item|_local_scalar_dense|index"),
    "index of a list": (lambda y: list(range(8))[y.argmax()], "item|_local_scalar_dense|index"),
    "contains": (lambda y: 3 in y, "item|_local_scalar_dense|is_nonzero|bool"),
    "numpy": (lambda y: y.numpy(), "numpy"),
    "numpy of a detached": (lambda y: y.detach().cpu().numpy(), "numpy"),
    "asarray": (np.asarray, "numpy|__array__"),
    "tolist": (lambda y: y.tolist(), "tolist"),
    "format": (lambda y: f"{y.sum():.2f}", "format|item|_local_scalar_dense"),
    "nonzero": (lambda y: y.nonzero(), "nonzero"),
    "where of one argument": (lambda y: torch.where(y > 0), "nonzero|where"),
    "mask": (lambda y: y[y > 0], "index|nonzero"),
    "masked_select": (lambda y: y.masked_select(y > 0), "masked_select"),
    "equal": (lambda y: torch.equal(y, y), "equal"),
    "allclose": (lambda y: torch.allclose(y, y), "allclose|item|_local_scalar_dense"),
    "unique": (torch.unique, "unique"),
    "unique_consecutive": (torch.unique_consecutive, "unique"),
    "bincount": (lambda y: torch.bincount(y.argmax(-1)), "bincount"),
    "repeat_interleave": (lambda y: y.repeat_interleave(y.argmax(-1), 0), "repeat_interleave"),
    "arange": (lambda y: torch.arange(y.argmax()), "item|_local_scalar_dense|arange"),
    "tensor of tensors": (lambda y: torch.tensor([y.sum(), y.max()]), "item|_local_scalar_dense|tensor"),
    "sparse": (lambda y: y.to_sparse(), "sparse"),
    "a custom op without a rule": (lambda y: ruleless(y), "ruleless"),
}


def make_reader(read_value):
    """Return a model whose second layer reads values of its input, and returns the input."""
    reader = Applied(lambda self, y: (self.read_value(y), y)[1], read_value=read_value)
    return nn.Sequential(nn.Linear(4, 4), reader, nn.Linear(4, 3)).eval()


def messages(caplog):
    return [item.getMessage() for item in caplog.records if item.name == "fvflops"]


@pytest.fixture
def log(caplog):
    gc.freeze()  # what refers to shape tensors is searched for among all other objects
    with caplog.at_level(logging.DEBUG, "fvflops"):
        yield caplog


@pytest.mark.parametrize("name", VALUE_READS)
def test_model_that_reads_values_falls_back_or_raises_with_a_message(name, log):
    read_value, ops = VALUE_READS[name]
    model, x = make_reader(read_value), torch.randn(2, 4)
    with pytest.raises(ExecutionError, match=rf"(?s)(?=.*'1')(?=.*execution=.auto.).*({ops})"):
        record_call(model, (x,), execution="shapes")
    assert messages(log) == []
    trace = record(model, (x,))
    assert trace.about["execution"] == "real"
    (line,) = messages(log)
    assert any(op in line for op in ops.split("|")) and "'1'" in line and "\n" not in line, line
    assert trace == record(model, (x,), execution="real")
    for execution in ("auto", "shapes"):
        with pytest.raises(ExecutionError, match=rf"(?s)(?=.*'1')(?=.*real weights).*({ops})") as caught:
            record_call(on_meta(model), (x,), execution=execution)
        message = str(caught.value)
        assert ("assume=" in message) == can_be_assumed(message.partition(" in module ")[0])


def test_analysis_logs_the_fallback_once(log):
    model, x = make_reader(lambda y: y.sum().item()), torch.randn(2, 4)
    flops = FlopCountAnalysis(model, x)
    assert flops.total() == flops.total("0") + flops.total("2") == 2 * 4 * 4 + 2 * 4 * 3
    flops.by_operator()
    assert len([line for line in messages(log) if "used real execution" in line]) == 1
    assert FlopCountAnalysis(model, x, execution="real").by_module_and_operator() == flops.by_module_and_operator()
    with pytest.raises(ExecutionError):
        FlopCountAnalysis(model, x, execution="shapes").total()


def test_data_dependent_loop_runs_as_often_as_its_values_say():
    def forward(self, x):
        for _ in range(int(self.gate(x).round())):
            x = self.body(x)
        return x

    model = Applied(forward, gate=nn.Linear(4, 1), body=nn.Linear(4, 4))
    with torch.no_grad():
        model.gate.weight.zero_()
        model.gate.bias.fill_(3)
    trace = record(model, (torch.ones(1, 4),))
    assert totals_of(trace)["body"] == Counter({"linear": 3 * 16})


# torch.tensor reads the address of its arguments itself, so that an error that the model catches is not recorded.
@pytest.mark.parametrize("name", [name for name in VALUE_READS if name != "tensor of tensors"])
def test_model_that_catches_the_error_falls_back_to_real_execution(name, log):
    read_value, _ = VALUE_READS[name]

    def forward(self, x):
        x = self.fc(x)
        try:
            read_value(x)
        except Exception:
            x = self.other(x)
        return x

    model, x = Applied(forward, fc=nn.Linear(4, 4), other=nn.Linear(4, 4)), torch.randn(2, 4)
    trace = record(model, (x,))
    assert trace.about["execution"] == "real"
    assert len(messages(log)) == 1
    assert trace == record(model, (x,), execution="real")
    with pytest.raises(ExecutionError):
        record_call(model, (x,), execution="shapes")


KNOWN_READS = {
    "item of ids": lambda y, ids, mask: ids.max().item(),
    "list of ids": lambda y, ids, mask: (ids + 1).tolist(),
    "numpy of ids": lambda y, ids, mask: (ids * 2).numpy(),
    "any of a mask": lambda y, ids, mask: bool((~mask).any()),
    "all of a mask": lambda y, ids, mask: y if (mask.cumsum(-1) > 0).all() else y * 2,
    "nonzero of a mask": lambda y, ids, mask: y.flatten()[mask.nonzero()[:, 0]],
    "ids by a mask": lambda y, ids, mask: ids[ids > 1],
    "activations by a mask": lambda y, ids, mask: y[mask],
    "unique ids": lambda y, ids, mask: torch.unique(ids, return_counts=True),
    "equal ids": lambda y, ids, mask: torch.equal(ids, ids.clone()),
    "a loop over ids": lambda y, ids, mask: [y * int(index) for index in ids[0]],
    "a shape": lambda y, ids, mask: torch.tensor(y.shape).prod().item(),
    "positions": lambda y, ids, mask: torch.arange(y.shape[0])[-1].item(),
    "positions on its device": lambda y, ids, mask: torch.arange(y.shape[0], device=y.device).max().item(),
    "a mask made here": lambda y, ids, mask: torch.ones(y.shape, dtype=torch.bool, device=y.device).tril().any().item(),
    "a mask sent to a device": lambda y, ids, mask: mask.to(y.device).all().item(),
    "lengths": lambda y, ids, mask: torch.arange(4) < mask.sum(-1)[:, None].max().item(),
    "count of ids": lambda y, ids, mask: y * (ids == 1).sum().item(),
}


@pytest.mark.parametrize("loss", [None, add_up], ids=["forward", "backward"])
@pytest.mark.parametrize("name", KNOWN_READS)
def test_values_of_small_integer_inputs_are_known(name, loss, log):
    read_value = KNOWN_READS[name]
    model, args, _ = after_linear(lambda y, *more: (read_value(y, *more), y)[1], torch.tensor([[3, 1, 2]]), MASK)
    trace = record(model, args, loss=loss)
    assert trace.about["execution"] == "shapes"
    assert messages(log) == []
    real = record(model, args, loss=loss, execution="real")
    assert_same(trace, real)


BUFFER_READS = {
    "item": lambda steps: steps.item(),
    "tolist": lambda steps: steps.tolist()[0],
    "numpy": lambda steps: steps.numpy()[0],
    "asarray": lambda steps: np.asarray(steps)[0],
    "memoryview": lambda steps: memoryview(steps.numpy())[0],
}


@pytest.mark.parametrize("dtype, name", [*((torch.float32, name) for name in BUFFER_READS), (torch.int64, "item")])
def test_a_model_reads_what_it_wrote_to_a_buffer(dtype, name):
    def forward(self, x):
        self.steps += 3
        for _ in range(int(BUFFER_READS[name](self.steps))):
            x = self.fc(x)
        return x

    model = Applied(forward, fc=nn.Linear(4, 4))
    model.register_buffer("steps", torch.zeros(1, dtype=dtype))
    execution = "shapes" if dtype == torch.int64 else "auto"
    trace = record(model, (torch.ones(1, 4),), execution=execution)
    assert totals_of(trace)[""] == Counter({"linear": 3 * 16})
    assert model.steps.tolist() == [0]


class OwnError(Exception):
    pass


def fail(error):
    raise error


@pytest.mark.parametrize(
    "model",
    [
        Applied(lambda self, x: fail(ValueError(f"no image of size {self.fc(x).shape}")), fc=nn.Linear(4, 4)),
        Applied(lambda self, x: self.fc(x) + fail(OwnError("mine")), fc=nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5)),
        nn.Sequential(nn.Linear(4, 4), nn.Conv2d(3, 3, 3)),
        Applied(lambda self, x: self.fc(x).view(3, 5), fc=nn.Linear(4, 4)),
        Applied(lambda self, x: self.fc(x) + torch.ones(3), fc=nn.Linear(4, 4)),
        Applied(lambda self, x: self.fc(x).absent, fc=nn.Linear(4, 4)),
        Applied(lambda self, x: self.fc(x)[:, 7], fc=nn.Linear(4, 4)),
    ],
    ids=["ValueError", "own error", "linear", "convolution", "view", "add", "attribute", "index"],
)
@pytest.mark.parametrize("loss", [None, add_up], ids=["forward", "backward"])
def test_errors_of_the_model_are_raised_unchanged(model, loss, log):
    x = torch.randn(2, 4)
    with pytest.raises(Exception) as real:
        record_call(model, (x,), execution="real", loss=loss)
    with pytest.raises(Exception) as auto:
        record_call(model, (x,), loss=loss)
    assert (auto.type, str(auto.value)) == (real.type, str(real.value))
    # Before Python 3.11, where errors have no notes, what to do is logged.
    assert [text for text in messages(log) if sys.version_info >= (3, 11) or not text.startswith("fvflops: ")] == []
    with pytest.raises(Exception) as shapes:
        record_call(model, (x,), execution="shapes", loss=loss)
    assert not isinstance(shapes.value, ExecutionError)


def test_invalid_execution_raises():
    for make in (record_call, FlopCountAnalysis):
        with pytest.raises(ValueError, match=r"auto, shapes, real.*'fast'"):
            make(nn.Identity(), (torch.ones(1),), execution="fast")


def count_bytes(function):
    """Return the bytes of CPU memory that torch allocates while a function runs, including freed ones."""
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
        function()
    events = profile.kineto_results.events()
    return sum(event.nbytes() for event in events if event.name() == "[memory]" and event.nbytes() > 0)


@pytest.mark.parametrize("loss", [None, add_up], ids=["forward", "backward"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    "name", long_except(["timm:mobilevit_xxs"], ["timm:vit_tiny_patch16_224", "timm:mobilevit_xxs"])
)
def test_activations_need_no_memory(name, training, loss):
    model, args = build_case(name)
    model.train(training)
    model(*args)  # allocates what torch allocates once per process
    real = count_bytes(lambda: record_call(model, args, execution="real", loss=loss))
    assert real > 1_000_000
    # The rest: the state of the random generators, and position ids.
    assert count_bytes(lambda: record_call(model, args, execution="shapes", loss=loss)) < 100_000


def test_batch_larger_than_memory_is_counted():
    batch = 1 << 36
    model, _ = build_case("torchvision:resnet18")
    single = FlopCountAnalysis(model, torch.zeros(1, 3, 64, 64)).total()
    assert (
        FlopCountAnalysis(model, torch.zeros(1).expand(batch, 3, 64, 64), execution="shapes").total() == batch * single
    )
    assert FlopCountAnalysis(model, torch.empty(batch, 3, 64, 64, device="meta")).total() == batch * single


def test_masks_larger_than_memory_are_counted():
    def model(x):
        tokens = x.shape[1]
        positions = torch.arange(tokens)
        mask = positions[None] <= positions[:, None]
        mask = mask & torch.ones(tokens, tokens, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    tokens = 1 << 19
    flops = FlopCountAnalysis(model, torch.empty(1, 1, 1, device="meta").expand(1, tokens, 8), execution="shapes")
    assert flops.total() == 2 * tokens * tokens * 8


def test_weights_larger_than_memory_are_counted():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 20, 1 << 21), nn.ReLU(), nn.Linear(1 << 21, 1))
    trace = record(model, (torch.zeros(1).expand(3, 1 << 20),), loss=add_up)
    assert sum(totals_of(trace)["0"].values()) >= 3 << 41


@pytest.mark.parametrize(
    "name", long_except(["zoo:llama_tiny", "torchvision:swin_t", "transformers:BertModel"], MODELS)
)
def test_device_cuda_is_emulated_without_cuda(name):
    model, args = build_case(name)
    on_cpu = record(model, args, execution="shapes")
    on_cuda = record(model, args, execution="shapes", device="cuda")
    assert on_cuda.about["device"] == "cuda:0"
    devices = Counter(spec.device for item in on_cuda.signatures for spec in tensors_in((item.inputs, item.outputs)))
    assert devices.keys() == {"cuda:0"}
    assert totals_of(on_cuda) == totals_of(on_cpu)
    with pytest.raises(ValueError, match="not 'meta'"):
        record_call(model, args, device="meta")


@pytest.mark.parametrize("device", [None, "cuda"])
def test_a_number_may_be_the_first_operand(device):
    trace = record_call(
        lambda x: torch.add(0.5, x.relu(), alpha=2), (torch.ones(3, 4),), execution="shapes", device=device
    )
    assert [spec.shape for spec in tensors_in(trace.signatures[-1].outputs)] == [(3, 4)]


def test_a_kernel_that_only_a_missing_device_has_gives_unknown_values():
    def run(x):
        numbers = torch.arange(6, device=x.device)
        return x.relu(), torch.histc(numbers.int(), bins=3, min=0, max=5).cumsum(0)

    if torch.cuda.is_available():
        pytest.skip("CUDA computes it")
    trace = record_call(run, (torch.ones(3, device="cpu"),), execution="shapes", device="cuda")
    (histogram,) = (item for item in trace.signatures if item.packet == "aten::histc")
    assert [spec.shape for spec in tensors_in(histogram.outputs)] == [(3,)]
    with pytest.raises((ExecutionError, RuntimeError), match="histogram_cpu"):  # as a real run
        record_call(run, (torch.ones(3),), execution="shapes", device="cpu")


@pytest.mark.skipif(not hasattr(torch.ops.aten, "_fused_rms_norm_backward"), reason="this torch has no such op")
def test_a_kernel_that_the_cpu_lacks_altogether_gives_unknown_values_and_no_branch_reads_them():
    """A plan for a GPU chooses such kernels for tensors on the CPU."""

    def run(x):
        rows = torch.arange(12).view(2, 6).float()
        gradients = torch.ops.aten._fused_rms_norm_backward(
            rows, rows, [6], torch.ones(2, 1), torch.ones(6), [True, True]
        )
        return x.relu(), *gradients

    def branch(x):
        result, gradient, _ = run(x)
        return result if gradient.sum() > 0 else gradient

    trace = record_call(run, (torch.ones(3),), execution="shapes", device="cpu")
    (backward,) = (item for item in trace.signatures if item.packet == "aten::_fused_rms_norm_backward")
    assert [spec.shape for spec in tensors_in(backward.outputs)] == [(2, 6), (6,)]
    with pytest.raises(ExecutionError, match="data-dependent"):
        record_call(branch, (torch.ones(3),), execution="shapes", device="cpu")


def test_default_device_is_that_of_the_inputs():
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    assert record_call(model, (torch.ones(1, 4),)).about["device"] == "cpu"
    assert record_call(model, (torch.ones(1, 4, device="meta"),)).about["device"] == "cpu"
    devices = []
    model = Applied(lambda self, x: devices.append(self.fc(x).device) or self.fc(x), fc=model)
    record_call(model, (torch.ones(1, 4),), device="cuda:1", execution="shapes")
    assert devices == [torch.device("cuda:1")]


@pytest.fixture
def eight_ranks():
    """Initialize a fake process group of eight ranks, of which this process is rank 0."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=8, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (8,))
    finally:
        torch.distributed.destroy_process_group()


def make_attention():
    """Return attention of 8 heads of 4 numbers each."""
    sizes = {"vocab_size": 1, "hidden_size": 32, "intermediate_size": 1, "layers": 1, "heads": 8, "kv_heads": 8}
    return Attention(LlamaConfig(**sizes))


def parallelize(model, mesh):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {f"{name}_proj": ColwiseParallel() for name in "qkv"} | {"o_proj": RowwiseParallel()}
    return parallelize_module(model, mesh, plan)


@pytest.mark.parametrize("loss", [None, add_up], ids=["forward", "backward"])
@pytest.mark.parametrize("on_meta", [False, True], ids=["weights", "meta"])
def test_rank_counts_its_own_shard(eight_ranks, on_meta, loss):
    # DTensor infers once per process how to split a call of some shape, by running it. Since the first analysis could
    # therefore differ, each of these tests has its own shape.
    n = 6 + 2 * on_meta + (loss is None)
    inputs = torch.randn(2, n, 32), torch.ones(n, 4), torch.ones(n, 4)
    unsharded = record(make_attention(), inputs, loss=loss)
    with torch.device("meta" if on_meta else "cpu"):
        model = parallelize(make_attention(), eight_ranks)
    first, second = (record(model, inputs, loss=loss, execution="shapes") for _ in range(2))
    assert totals_of(first) == totals_of(second)
    assert count(first, PRICER, "flops").total() * 8 == count(unsharded, PRICER, "flops").total()
    ops = {item.packet for item in first.signatures}
    assert any("all_reduce" in op for op in ops)
    if not on_meta:
        for _ in range(2):
            assert totals_of(record(model, inputs, loss=loss, execution="real")) == totals_of(first)


@pytest.mark.parametrize("execution", ["real", "shapes"])
def test_ops_with_which_dtensor_searches_for_shardings_are_not_recorded(eight_ranks, execution):
    # DTensor has no rule for attention: it runs the op's decomposition for each sharding, once per process and shape.
    pytest.importorskip("torch.distributed.tensor._decompositions", reason="this torch's DTensor refuses attention")
    from torch.distributed.tensor import Replicate, distribute_tensor

    x = torch.randn(2, 2, 5 + (execution == "real"), 4)
    sharded = distribute_tensor(x, eight_ranks, [Replicate()])
    traces = [
        record(lambda x: F.scaled_dot_product_attention(x, x, x), (y,), execution=execution) for y in (sharded, x)
    ]
    assert len({count(trace, PRICER, "flops").total() for trace in traces}) == 1


@pytest.mark.parametrize("name", long_except(["torchvision:swin_t", "transformers:LlamaModel"], MODELS))
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_second_analysis_adds_no_outcomes(name, backward):
    model, args = build_case(name)
    loss = add_up if backward else None
    first = record(model, args, execution="shapes", loss=loss)
    cached = outcome_count()
    second = record(model, args, execution="shapes", loss=loss)
    assert outcome_count() == cached > 0
    assert second == first
    clear_cache()
    assert outcome_count() == 0
    assert_same(record(model, args, execution="shapes", loss=loss), first)


VARIANTS = {
    "True and 1": (lambda x: x * True, lambda x: x * 1),
    "1 and 1.0": (lambda x: x.long() * 1, lambda x: x.long() * 1.0),
    "True and 1.0": (lambda x: x.long() + True, lambda x: x.long() + 1.0),
    "False and 0": (lambda x: x.sum(0, keepdim=False), lambda x: x.sum(0, keepdim=True)),
    "0 and -0.0": (lambda x: x.bool() | False, lambda x: x.bool() * 0.0),
    "1 and 1j": (lambda x: x * 1, lambda x: x * 1j),
    "1 and True in full": (lambda x: torch.full((2,), 1), lambda x: torch.full((2,), True)),
    "1 and 1.0 in full": (lambda x: torch.full((2,), 1), lambda x: torch.full((2,), 1.0)),
    "1 and 1.0 in a list": (
        lambda x: torch._foreach_mul([x.long()], [1]),
        lambda x: torch._foreach_mul([x.long()], [1.0]),
    ),
    "dtypes": (lambda x: x.sum(dtype=torch.float32), lambda x: x.sum(dtype=torch.float64)),
    "dtypes of input": (lambda x: x.float() * 2, lambda x: x.double() * 2),
    "strides": (lambda x: x.reshape(-1), lambda x: x.t().reshape(-1)),
    "strides, in view": (lambda x: (x + 1).view(-1), lambda x: (x + 1).t().contiguous().view(-1)),
    "shapes": (lambda x: x[:1] @ x.t(), lambda x: x @ x.t()),
    "the same tensor twice": (lambda x: torch.cat([x, x]), lambda x: torch.cat([x, x + 1])),
    "the same tensor written to": (lambda x: x.clone().add_(x), lambda x: (y := x.clone()).add_(y)),
    "keywords": (lambda x: torch.add(x, x, alpha=2), lambda x: torch.add(x, x, alpha=2.0)),
    "None and a number": (lambda x: x.clamp(0, None), lambda x: x.clamp(None, 0)),
    "memory formats": (
        lambda x: x[None, :, :, None].contiguous(),
        lambda x: x[None, :, :, None].contiguous(memory_format=torch.channels_last),
    ),
    "conjugates": (lambda x: (x * 1j).resolve_conj(), lambda x: (x * 1j).conj().resolve_conj()),
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_similar_calls_have_different_outcomes(name):
    x = torch.randn(2, 4)
    clear_cache()
    for order in (VARIANTS[name], VARIANTS[name][::-1]):
        for model in order:
            layouts = []

            def store_layouts(x, model=model, layouts=layouts):
                out = model(x)
                layouts.append([(t.dtype, t.shape, t.stride()) for t in tensors_of(out)])
                return out

            shapes = record(store_layouts, (x,), execution="shapes")
            real = record(store_layouts, (x,), execution="real")
            assert_same(shapes, real)
            # Signatures contain no strides, so that these are compared inside the model.
            assert layouts[0] == layouts[1]


def test_concurrent_analyses_are_independent():
    cases = [build_case(name) for name in ("torchvision:resnet18", "zoo:llama_tiny")]
    expected = [record(*case, execution="shapes") for case in cases]
    clear_cache()
    with ThreadPoolExecutor(2) as pool:
        traces = pool.map(lambda case: [record(*case, execution="shapes") for _ in range(3)], cases)
    for analysed, trace in zip(traces, expected, strict=True):
        assert len(analysed) == 3
        for other in analysed:
            assert_same(other, trace)


def test_composite_ops_create_tensors_on_a_missing_device():
    trace = record_call(lambda x: F.interpolate(x, scale_factor=2), (torch.randn(1, 3, 8),), device="cuda")
    assert trace.info.execution == "shapes"


def test_a_data_dependent_op_inside_a_composite_op_is_the_only_error():
    with pytest.raises(ExecutionError) as failure:
        record_call(lambda x: torch.argwhere(x.T > 0), (torch.randn(3, 3),), execution="shapes")
    error, chain = failure.value, []
    while error is not None:
        chain.append(type(error))
        error = error.__cause__ or error.__context__
    assert UnboundLocalError not in chain
