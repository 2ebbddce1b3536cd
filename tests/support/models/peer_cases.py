"""Small models for what neither whole models nor layers hold, and builders for all three by name."""

from collections.abc import Callable
from functools import partial
from typing import Any

import einops
import torch
from torch import nn
from torch.nn import functional

from tests.support.models.layers import LAYERS
from tests.support.models.parts import Parts
from tests.support.models.whole_models import MODELS, Case, Function, build_case


class OfOne(nn.Module):
    """A layer inside a model, called with one tensor: torch.fx looks into the model, and not into the layer.

    Its results hold a parameter, because torch_flops asks the first one in a graph for its device.
    """

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.parameter = nn.Parameter(torch.ones(1))

    def forward(self, first):
        return self.layer(first), self.parameter


class OfTwo(OfOne):
    def forward(self, first, second):
        return self.layer(first, second), self.parameter


class OfThree(OfOne):
    def forward(self, first, second, third):
        return self.layer(first, second, third), self.parameter


class PaddedLeNet5(Parts):
    """LeNet-5 on 32x32 images, its third layer a convolution and its result probabilities, as DeepSpeed measures it."""

    def forward(self, images):
        return functional.softmax(self.classifier(torch.flatten(self.features(images), 1)), dim=1)


class AddOne(nn.Module):
    """A linear layer of 5 into 4, and one added to its result or not: what torch_flops' page compares peers on."""

    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)
        self.adds = adds

    def forward(self, x):
        x = self.layer(x)
        if self.adds:
            x += 1.0
        return x


def _products(first: torch.Tensor, second: torch.Tensor) -> list[torch.Tensor]:
    return [
        torch.matmul(first, second),
        first.matmul(second[0]),
        torch.matmul(first, second[0, :, 0]),
        torch.mm(first[0], second[0]),
        torch.bmm(first, second),
        first.bmm(second),
        torch.addmm(second[0, 0], first[0], second[0]),
        torch.baddbmm(second[:, :1], first, second),
        torch.einsum("bij,bjk->bik", first, second),
        torch.einsum("bij,cjk,cd->id", first, second, second[0, :2, :3]),
    ]


def _unseen_products(first: torch.Tensor, second: torch.Tensor) -> list[torch.Tensor]:
    return [
        torch.tensordot(first, second, ([2], [1])),
        torch.inner(first, first),
        torch.linalg.multi_dot([first[0], second[0], second[0].T]),
        torch.chain_matmul(first[0], second[0]),
        torch.linalg.matmul(first, second),
        torch.addbmm(second[0, :1], first, second),
        torch.mv(first[0], second[0, :, 0]),
        torch.cdist(first, first),
    ]


def _resize(x: torch.Tensor) -> list[torch.Tensor]:
    resize = functional.interpolate
    return [
        resize(x, size=(5, 6), mode="nearest-exact"),
        resize(x, scale_factor=2),
        resize(x, scale_factor=2, mode="bilinear", antialias=True),
        resize(x, size=(7, 7), mode="bicubic", antialias=True),
        resize(x, scale_factor=(2, 3), mode="bilinear", align_corners=True),
    ]


def _arithmetic(x):
    x = x + 1
    x = 2 - x
    x = x * x
    x -= 3
    x = (x / 2).softmax(-1)
    equal = x == 0
    return x.exp().sum(1, keepdim=True) + x.sum() + (x @ x.transpose(1, 2)).sum(-1, keepdim=True).sum() + equal


def _resize_for_fx(x):
    resize = functional.interpolate
    x = resize(x, scale_factor=2)
    x = resize(x, size=(9, 8), mode="bilinear")
    x = resize(x, size=(7, 7), mode="bicubic")
    return resize(x, (5, 6))


def _call_functions(x):
    weight = torch.ones(6, 2, 3, 3)
    x = functional.conv2d(x, weight, torch.ones(6), 1, 1, 1, 2)
    x = functional.leaky_relu(x)
    x = functional.relu(functional.layer_norm(x, (7,)))
    x = functional.max_pool2d(functional.gelu(x), 2)
    return functional.linear(x, torch.ones(4, 3))


def _attend(query, key, value):
    attend = functional.scaled_dot_product_attention
    masked = attend(query, key, value, torch.ones(6, 5))
    return masked + attend(query, key, value) + attend(query, key, value, is_causal=True)


def _unfused_vit():
    import timm

    timm.layers.set_fused_attn(False)
    try:
        # timm had nn.LayerNorm here when torch_flops was written, and has one of its own today.
        return timm.create_model("vit_base_patch16_224", norm_layer=partial(nn.LayerNorm, eps=1e-6))
    finally:
        timm.layers.set_fused_attn(True)


def _resnet50():
    import torchvision

    return torchvision.models.resnet50(weights=None)


def _case(model: nn.Module, *sizes: tuple[int, ...]) -> Case:
    return model, tuple(torch.randn(shape) for shape in sizes)


def _one(layer: Callable[..., Any], *shape: int) -> Case:
    return _case(OfOne(layer), shape)


def _wrap(name: str) -> Case:
    layer, inputs = LAYERS[name]()
    return (OfOne if len(inputs) == 1 else OfTwo)(layer), inputs


_SIZES = (2, 4, 9, 8)
# Layers that torch_flops counts inside of a model.
_TRACED = (
    *("conv1d", "conv2d", "conv3d", "conv transpose 2d", "linear without a bias", "bilinear", "relu", "gelu"),
    *("leaky relu", "layer norm without weights", "group norm", "batch norm 1d", "batch norm 3d"),
    *("instance norm 1d", "instance norm 2d with weights", "instance norm 3d", "rms norm", "lstm", "encoder layer"),
    "decoder layer",
)

# For peers that put their own functions in place of torch's.
PIECES = {
    "lenet5 on 32x32": lambda: _case(
        PaddedLeNet5(
            features=nn.Sequential(
                *(nn.Conv2d(1, 6, 5), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2)),
                *(nn.Conv2d(16, 120, 5), nn.Tanh()),
            ),
            classifier=nn.Sequential(nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10)),
        ),
        (1024, 1, 32, 32),
    ),
    "products": lambda: _case(Function(_products), (2, 4, 5), (2, 5, 6)),
    "products by @": lambda: _case(Function(lambda a, b: (a @ b, a[0] @ b)), (2, 4, 5), (2, 5, 6)),
    "unseen products": lambda: _case(Function(_unseen_products), (2, 4, 5), (2, 5, 6)),
    "attention by a function": lambda: _case(
        Function(lambda *three: functional.scaled_dot_product_attention(*three)),
        (2, 4, 6, 8),
        (2, 4, 5, 8),
        (2, 4, 5, 7),
    ),
    "resize": lambda: _case(Function(_resize), _SIZES),
    "resize to a number": lambda: _case(Function(lambda x: functional.interpolate(x, size=6)), _SIZES),
    "conv1d, same": lambda: _case(nn.Conv1d(4, 6, 2, padding="same"), (2, 4, 9)),
    "conv2d, same": lambda: _case(nn.Conv2d(4, 6, (2, 4), padding="same", dilation=(1, 3), bias=False), (2, 4, 9, 17)),
    "conv2d, valid": lambda: _case(nn.Conv2d(4, 6, 3, padding="valid", stride=2), _SIZES),
    "conv3d, same": lambda: _case(nn.Conv3d(4, 6, (2, 3, 4), padding="same"), (2, 4, 5, 6, 7)),
    "conv2d without a batch, same": lambda: _case(nn.Conv2d(4, 6, 2, padding="same"), (4, 9, 8)),
    "conv transpose without a batch": lambda: _case(nn.ConvTranspose2d(4, 6, 2, groups=2), (4, 9, 8)),
    "conv2d, circular": lambda: _case(nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), _SIZES),
    "conv transpose, grouped": lambda: _case(nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), (2, 4, 9)),
    "conv transpose, depthwise": lambda: _case(
        nn.ConvTranspose2d(4, 8, (3, 2), (2, 3), 1, output_padding=1, dilation=2, groups=4), _SIZES
    ),
    "conv transpose, deep": lambda: _case(nn.ConvTranspose3d(4, 6, 2, groups=2), (2, 4, 5, 6, 7)),
    "batch norm of the batch": lambda: _case(nn.BatchNorm2d(4, track_running_stats=False), _SIZES),
    "local response norm": lambda: _case(nn.LocalResponseNorm(2), _SIZES),
    "lp pool 1d": lambda: _case(nn.LPPool1d(2, 2), (2, 4, 9)),
    "lp pool 2d": lambda: _case(nn.LPPool2d(2, 2), _SIZES),
    "lp pool 3d": lambda: _case(nn.LPPool3d(2, 2), (2, 4, 5, 6, 7)),
    "activation functions": lambda: _case(
        nn.Sequential(
            *(nn.ReLU(True), nn.ELU(1, True), nn.SiLU(True), nn.LeakyReLU(inplace=True), nn.GELU("tanh")),
            *(nn.SELU(), nn.CELU(), nn.RReLU(), nn.Hardtanh(), nn.Sigmoid(), nn.Tanh(), nn.Softplus(), nn.Mish()),
            *(nn.LogSoftmax(1), nn.GLU(1), nn.Threshold(0, 1), nn.LogSigmoid(), nn.Hardsigmoid()),
        ),
        (2, 4),
    ),
    "rnn without a batch": lambda: _case(nn.RNN(6, 7), (5, 6)),
    # one op, called in a way that these peers do and their tables do not know, or the other way round
    "relu of torch": lambda: _case(Function(torch.relu), (2, 4)),
    "softmax by a method": lambda: _case(Function(lambda x: x.softmax(1)), (2, 4)),
    "gelu held": lambda: _case(Function(functional.gelu), (2, 4)),
    "add and mul of torch": lambda: _case(Function(lambda x: torch.add(x, 1) + torch.mul(x, x)), (2, 4)),
    "einsum of einops": lambda: _case(
        Function(lambda a, b: einops.einsum(a, b, "b i j, b j k -> b i k")), (2, 4, 5), (2, 5, 6)
    ),
}

# For peers that trace a model with torch.fx: each holds what is looked at, and is itself looked into.
TRACEABLE = {
    "published: vit_base_patch16_224": lambda: _case(_unfused_vit(), (1, 3, 224, 224)),
    "published: resnet50": lambda: _case(_resnet50(), (1, 3, 224, 224)),
    "published: linear": lambda: _case(AddOne(False), (1, 5)),
    "published: linear and one": lambda: _case(AddOne(True), (1, 5)),
    **{f"fx: {name}": partial(_wrap, name) for name in _TRACED},
    "fx: arithmetic": lambda: _one(_arithmetic, 2, 3, 4),
    "fx: resize": lambda: _one(_resize_for_fx, 2, 4, 3, 3),
    "fx: resize by 1.5": lambda: _one(lambda x: functional.interpolate(x, scale_factor=1.5), 1, 4, 4, 4),
    "fx: functions": lambda: _one(_call_functions, 2, 4, 7, 7),
    "fx: attention": lambda: _case(OfThree(_attend), (2, 4, 6, 8), (2, 4, 5, 8), (2, 4, 5, 7)),
    "fx: batch norm 2d": lambda: _one(nn.BatchNorm2d(4), *_SIZES),  # without weights torch_flops fails
    "fx: others": lambda: _one(nn.Sequential(nn.SiLU(), nn.Sigmoid(), nn.Hardswish(), nn.PReLU(), nn.Dropout()), 2, 4),
    "fx: local response norm": lambda: _one(nn.LocalResponseNorm(2), *_SIZES),
    "fx: cross map norm": lambda: _one(nn.CrossMapLRN2d(2), *_SIZES),
    "fx: pools 1d": lambda: _one(nn.Sequential(nn.AvgPool1d(2), nn.MaxPool1d(2), nn.LPPool1d(2, 2)), 2, 4, 17),
    "fx: pools 2d": lambda: _one(nn.Sequential(nn.AvgPool2d(2), nn.MaxPool2d((3, 2)), nn.LPPool2d(2, 2)), 2, 4, 17, 16),
    "fx: pools 3d": lambda: _one(
        nn.Sequential(nn.AvgPool3d((2, 1, 2)), nn.MaxPool3d(2), nn.LPPool3d(2, 2)), 2, 4, 17, 16, 15
    ),
    "fx: adaptive pools 1d": lambda: _one(nn.Sequential(nn.AdaptiveAvgPool1d(4), nn.AdaptiveMaxPool1d(2)), 2, 4, 11),
    "fx: adaptive pools 2d": lambda: _one(
        nn.Sequential(nn.AdaptiveAvgPool2d((4, 6)), nn.AdaptiveMaxPool2d((3, 2))), 2, 4, 11, 12
    ),
    "fx: adaptive pools 3d": lambda: _one(
        nn.Sequential(nn.AdaptiveAvgPool3d((4, 6, 3)), nn.AdaptiveMaxPool3d((3, 2, 2))), 2, 4, 11, 12, 10
    ),
    "fx: softmax": lambda: _one(nn.Sequential(nn.Softmax(1), nn.Softmin(1), nn.LogSoftmax(1)), 2, 4),
    "fx: softmax 2d": lambda: _one(nn.Softmax2d(), *_SIZES),
    "fx: softsign": lambda: _one(nn.Sequential(nn.Softsign(), nn.Tanhshrink()), 2, 4),
    "fx: upsample": lambda: _one(
        nn.Sequential(
            nn.Upsample(scale_factor=2), nn.UpsamplingBilinear2d(size=(9, 9)), nn.UpsamplingNearest2d(scale_factor=2)
        ),
        *_SIZES,
    ),
    "fx: attention module": lambda: _case(OfThree(nn.MultiheadAttention(8, 2)), (5, 2, 8), (7, 2, 8), (7, 2, 8)),
    "fx: encoder": lambda: _one(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 1), 5, 2, 8),
    "fx: decoder": lambda: _case(
        OfTwo(nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 1)), (5, 2, 8), (7, 2, 8)
    ),
    "fx: transformer": lambda: _case(OfTwo(nn.Transformer(8, 2, 1, 1, 16)), (5, 2, 8), (7, 2, 8)),
    "fx: losses of two": lambda: _case(OfTwo(nn.MultiLabelSoftMarginLoss()), (2, 4), (2, 4)),
    "fx: losses of three": lambda: _case(OfThree(nn.TripletMarginWithDistanceLoss()), (2, 4), (2, 4), (2, 4)),
    "fx: loss with a variance": lambda: (OfThree(nn.GaussianNLLLoss()), (*torch.randn(2, 2, 4), torch.ones(2, 4))),
    "fx: adaptive softmax": lambda: (
        OfTwo(nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2])),
        (torch.randn(2, 4), torch.tensor([1, 3])),
    ),
    # one op, called in a way that torch_flops does and its table does not know, or the other way round
    "fx: softmax by a function": lambda: _one(lambda x: functional.softmax(x, 1), 2, 4),
    "fx: add by a method": lambda: _one(lambda x: x.add(1), 2, 4),
    "fx: sizes": lambda: _one(lambda x: x.view(x.size(0) * x.size(1), -1), 2, 3, 4),
}


def build(name: str) -> Case:
    """Return a model, layer or piece with fixed random weights, in eval mode, and its inputs.

    One without parameters gets one, because calflops asks the first for its device.
    """
    model, inputs = build_case(name, {**MODELS, **LAYERS, **PIECES, **TRACEABLE})
    if not [*model.parameters()]:
        model.register_parameter("unused", nn.Parameter(torch.ones(1)))
    return model, inputs
