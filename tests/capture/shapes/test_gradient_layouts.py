"""Compare the strides of gradients in shape execution and real execution, for many layouts of inputs and gradients."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fvflops import record
from tests.support.opinfo import FORMATS
from tests.support.random_cases import long_except

LINE, IMAGE, VOLUME = (2, 4, 6), (2, 4, 6, 6), (2, 4, 4, 6, 6)
HEADS = (2, 2, 4, 8)
ROWS = torch.tensor([1, 0])
FIRST = torch.zeros(2, 2, 6, dtype=torch.long)
LSTM, GRU = nn.LSTM(6, 3, batch_first=True), nn.GRU(6, 3, batch_first=True)
MASK = torch.ones(LINE, dtype=torch.bool)


INPUTS = {name: FORMATS[name] for name in ("contiguous", "channels_last", "transposed", "sliced")}
GRADIENTS = {**INPUTS, "expanded": lambda tensor: torch.randn(()).expand(tensor.shape)}

_ACTIVATIONS = (
    *("ReLU", "GELU", "SiLU", "Tanh", "Sigmoid", "ELU", "SELU", "CELU", "Mish", "Softplus", "Softsign", "Hardswish"),
    *("Hardsigmoid", "Hardtanh", "LeakyReLU", "LogSigmoid", "PReLU", "RReLU", "ReLU6", "Tanhshrink", "Softshrink"),
    "Hardshrink",
)
# Whose derivative is one op, laid out as the others': long.
ALIKE = _ACTIVATIONS[4::2]
_POOLS = {1: LINE, 2: IMAGE, 3: VOLUME}
CASES = {
    **{name: (LINE, getattr(nn, name)()) for name in _ACTIVATIONS},
    **{
        f"{kind} over {dim}": (LINE, getattr(nn, kind)(dim))
        for kind in ("Softmax", "LogSoftmax", "GLU")
        for dim in (1, 2)
    },
    **{
        f"{kind}Pool{axes}d": (shape, getattr(nn, f"{kind}Pool{axes}d")(2))
        for kind in ("Max", "Avg", "AdaptiveMax", "AdaptiveAvg")
        for axes, shape in _POOLS.items()
    },
    **{
        f"{mode} interpolation": (IMAGE, lambda x, mode=mode: F.interpolate(x, scale_factor=2, mode=mode))
        for mode in ("nearest", "nearest-exact", "area", "bilinear", "bicubic")
    },
    **{
        f"{mode} with antialiasing": (
            IMAGE,
            lambda x, mode=mode: F.interpolate(x, size=(3, 4), mode=mode, antialias=True),
        )
        for mode in ("bilinear", "bicubic")
    },
    **{
        f"padding, {mode}": (IMAGE, nn.Conv2d(4, 3, 3, padding=1, padding_mode=mode))
        for mode in ("zeros", "circular", "reflect", "replicate")
    },
    **{
        f"{name} loss": (LINE, lambda x, loss=loss: loss(x, torch.ones(LINE), reduction="none"))
        for name, loss in {
            "mse": F.mse_loss,
            "huber": F.huber_loss,
            "smooth": F.smooth_l1_loss,
            "l1": F.l1_loss,
        }.items()
    },
    "linear interpolation": (LINE, lambda x: F.interpolate(x, scale_factor=2, mode="linear")),
    "trilinear": (VOLUME, lambda x: F.interpolate(x, scale_factor=2, mode="trilinear")),
    "threshold": (LINE, nn.Threshold(0.1, 0.2)),
    "layer norm": (LINE, nn.LayerNorm(6)),
    "layer norm of an image": (IMAGE, nn.LayerNorm([6, 6], elementwise_affine=False)),
    "RMS norm": (LINE, nn.RMSNorm(6)),
    "group norm": (IMAGE, nn.GroupNorm(2, 4)),
    "batch norm 1d": (LINE, nn.BatchNorm1d(4)),
    "batch norm": (IMAGE, nn.BatchNorm2d(4)),
    "batch norm, eval": (IMAGE, nn.BatchNorm2d(4).eval()),
    "batch norm 3d": (VOLUME, nn.BatchNorm3d(4)),
    "instance norm": (IMAGE, nn.InstanceNorm2d(4, affine=True)),
    "local response": (IMAGE, nn.LocalResponseNorm(2)),
    "linear": (LINE, nn.Linear(6, 5)),
    "dropout": (LINE, nn.Dropout(0.3)),
    "convolution 1d": (LINE, nn.Conv1d(4, 3, 2)),
    "depthwise convolution": (IMAGE, nn.Conv2d(4, 4, 3, groups=4)),
    "convolution 1 × 1": (IMAGE, nn.Conv2d(4, 3, 1)),
    "convolution 3d": (VOLUME, nn.Conv3d(4, 3, 2)),
    "transposed convolution": (IMAGE, nn.ConvTranspose2d(4, 3, 2, stride=2)),
    "channel shuffle": (IMAGE, nn.ChannelShuffle(2)),
    "pixel shuffle": (IMAGE, nn.PixelShuffle(2)),
    "pixel unshuffle": (IMAGE, nn.PixelUnshuffle(2)),
    "unfold": (IMAGE, lambda x: F.unfold(x, 2)),
    "grid sample": (IMAGE, lambda x: F.grid_sample(x, torch.zeros(2, 3, 3, 2))),
    "unpool": (IMAGE, lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)),
    "cumsum": (LINE, lambda x: x.cumsum(1)),
    "cumprod": (LINE, lambda x: x.cumprod(1)),
    "sort": (LINE, lambda x: x.sort(1)[0]),
    "topk": (LINE, lambda x: x.topk(2, 1)[0]),
    "gather": (LINE, lambda x: x.gather(1, FIRST)),
    "index": (LINE, lambda x: x[:, ROWS]),
    "index_select": (LINE, lambda x: x.index_select(1, ROWS)),
    "scatter": (LINE, lambda x: x.scatter(1, FIRST, x[:, :2] * 2)),
    "masked_fill": (LINE, lambda x: x.masked_fill(MASK, 0)),
    "where": (LINE, lambda x: torch.where(MASK, x, x * 2)),
    "cat": (LINE, lambda x: torch.cat([x, x], 1)),
    "std": (LINE, lambda x: x.std(1)),
    "logsumexp": (LINE, lambda x: x.logsumexp(1)),
    "amax": (LINE, lambda x: x.amax(1)),
    "prod": (LINE, lambda x: x.prod(1)),
    "normalize": (LINE, lambda x: F.normalize(x, dim=1)),
    "cdist": (LINE, lambda x: torch.cdist(x, x * 2)),
    "bmm": (LINE, lambda x: torch.bmm(x, x.mT)),
    "einsum": (LINE, lambda x: torch.einsum("abc,abd->acd", x, x)),
    "attention": (HEADS, lambda x: F.scaled_dot_product_attention(x, x, x)),
    "attention with a mask": (HEADS, lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=torch.zeros(4, 4))),
    "rfft": (LINE, lambda x: torch.fft.rfft(x, dim=1).abs()),
    "LSTM": (LINE, lambda x: LSTM(x)[0]),
    "GRU": (LINE, lambda x: GRU(x)[0]),
}


def strides_of(tensor):
    """Return the strides of dimensions of size above 1; the others are arbitrary."""
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)


def differentiate(execution, name):
    """Return the strides of the gradients of input and parameters, by the layouts of input and output gradient."""
    shape, function = CASES[name]
    result_shape = function(torch.randn(shape)).shape
    parameters = list(function.parameters()) if isinstance(function, nn.Module) else []
    strides = {}
    with record(None, execution=execution):
        for of_input, of_gradient in itertools.product(INPUTS, GRADIENTS):
            x = INPUTS[of_input](torch.randn(shape)).requires_grad_()
            gradient = GRADIENTS[of_gradient](torch.randn(result_shape))
            gradients = torch.autograd.grad(function(x), [x, *parameters], gradient)
            strides[f"{of_input} input, {of_gradient} gradient"] = [strides_of(item) for item in gradients]
    return strides


@pytest.mark.parametrize("name", long_except([name for name in CASES if name not in ALIKE], CASES))
def test_gradients_have_the_layouts_of_real_execution(name):
    # torch 2.14 lays out the gradient of group norm as its input, but its meta kernel, which shape execution runs,
    # as the gradient of its result.
    are_equal = not (name == "group norm" and torch.__version__.startswith("2.14."))
    assert (differentiate("shapes", name) == differentiate("real", name)) == are_equal


def test_layouts_have_the_strides_that_their_names_say():
    strides = [make(torch.randn(LINE)).stride() for make in GRADIENTS.values()]
    assert strides == [(24, 6, 1), (24, 6, 1), (24, 1, 4), (48, 12, 2), (0, 0, 0)]
    assert INPUTS["channels_last"](torch.randn(IMAGE)).is_contiguous(memory_format=torch.channels_last)
    assert strides_of(torch.empty(3, 1, 2)) == (2, 1)
