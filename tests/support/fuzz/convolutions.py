"""Blocks of images, signals and volumes: convolutions, pooling and resampling."""

from math import prod

import torch
from torch import nn
from torch.nn import functional as F

from tests.support.fuzz.block import Function, Kind, Made, kinds, weight
from tests.support.models.parts import Parts

_CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


def convolution(draw):
    """Multiply-adds: one for each output, input channel of its group and tap of the kernel."""
    n, c, *sizes = draw.shape
    groups = draw.divisor(c)
    out = groups * draw.size(1, 3)
    kernel = [draw.size(1, 3) for _ in sizes]
    dilation = [1 if k > size // 2 else draw.of(1, 1, 2) for k, size in zip(kernel, sizes, strict=True)]
    mode = draw.of("zeros", "zeros", "reflect", "replicate", "circular")
    same = draw.rng.random() < 0.2
    stride = [1 if same else draw.size(1, 2) for _ in sizes]
    padding = [
        draw.of(0, 1) if size + 1 > d * k else d * k // 2 for size, k, d in zip(sizes, kernel, dilation, strict=True)
    ]
    if mode == "reflect" and any(p >= size for p, size in zip(padding, sizes, strict=True)):
        mode = "zeros"
    made = _CONVOLUTIONS[len(sizes)](
        c,
        out,
        kernel,
        stride=stride,
        padding="same" if same else padding,
        dilation=dilation,
        groups=groups,
        bias=draw.flag(),
        padding_mode="zeros" if same else mode,
    )
    outputs = [
        size if same else (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, p, d, k, s in zip(sizes, padding, dilation, kernel, stride, strict=True)
    ]
    return Made(made, n * out * prod(outputs) * (c // groups) * prod(kernel))


def transposed_convolution(draw):
    """Multiply-adds: one for each input, output channel of its group and tap of the kernel."""
    n, c, *sizes = draw.shape
    groups = draw.divisor(c)
    out = groups * draw.size(1, 3)
    kernel = [draw.size(1, 3) for _ in sizes]
    stride = [draw.size(1, 2) for _ in sizes]
    made = _TRANSPOSED[len(sizes)](
        c,
        out,
        kernel,
        stride=stride,
        padding=[draw.of(0, (k - 1) // 2) for k in kernel],
        output_padding=[draw.size(0, s - 1) for s in stride],
        groups=groups,
        bias=draw.flag(),
    )
    return Made(made, n * c * prod(sizes) * (out // groups) * prod(kernel))


class ChannelsLast(Parts):
    """A convolution of a tensor whose channels are next to each other in memory."""

    def forward(self, x):
        x = self.layer(x.contiguous(memory_format=torch.channels_last))
        return x if x.is_contiguous(memory_format=torch.channels_last) else x.relu()


def channels_last(draw):
    made = convolution(draw)
    return Made(ChannelsLast(layer=made.module.to(memory_format=torch.channels_last)), made.macs)


def pool(draw):
    axes = len(draw.shape) - 2
    kind = draw.of("Max", "Avg", "AdaptiveMax", "AdaptiveAvg", "LP")
    options = {}
    if kind.startswith("Adaptive"):
        arguments = [draw.of(1, 2, 3)]
    else:
        arguments = [2, draw.of(1, 2)] if kind != "LP" else [2.0, 2]
        options = {"ceil_mode": draw.flag()}
    if kind in ("Max", "Avg"):
        options["padding"] = draw.of(0, 1)
    if kind == "Avg":
        options["count_include_pad"] = draw.flag()
    return Made(getattr(nn, f"{kind}Pool{axes}d")(*arguments, **options))


def unpool(draw):
    def forward(x):
        pooled, indexes = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(pooled, indexes, 2, output_size=x.shape[2:])

    return Made(Function(forward))


def resample(draw):
    axes = len(draw.shape) - 2
    mode = draw.of("nearest", "nearest-exact", "area", {1: "linear", 2: "bilinear", 3: "trilinear"}[axes])
    if axes == 2:
        mode = draw.of(mode, "bicubic")
    smooth = mode not in ("nearest", "nearest-exact", "area")
    options = {"align_corners": draw.flag()} if smooth else {}
    if mode in ("bilinear", "bicubic"):
        options["antialias"] = draw.flag()
    by_size = draw.flag()
    to = {"size": [draw.size(2, 7) for _ in range(axes)]} if by_size else {"scale_factor": draw.of(0.5, 1.5, 2.0)}
    return Made(Function(lambda x: F.interpolate(x, mode=mode, **to, **options)))


def shuffle(draw):
    _, c, h, w = draw.shape
    if c % 4 == 0 and draw.flag():
        return Made(nn.PixelShuffle(2))
    if h % 2 == w % 2 == 0 and draw.flag():
        return Made(nn.PixelUnshuffle(2))
    return Made(nn.ChannelShuffle(draw.divisor(c)))


def unfold_and_fold(draw):
    """A convolution by hand: patches, a product, and patches put back."""
    n, c, h, w = draw.shape
    k, padding = draw.of(2, 3), 1
    out = draw.size(1, 3)
    places = (h + 2 * padding - k + 1) * (w + 2 * padding - k + 1)

    def forward(x, kernel):
        patches = F.unfold(x, k, padding=padding)
        # torch's kernel leaves a storage larger than the result, by which bytes of a real run would be bounded later.
        return F.fold(kernel @ patches, x.shape[2:], k, padding=padding) * 2

    return Made(Function(forward, weight(out * k * k, c * k * k)), n * out * k * k * c * k * k * places)


def sample_grid(draw):
    """A grid, 2 × 3 numbers by three coordinates of each place, and values between those at the places it names."""
    n, _, h, w = draw.shape
    mode, edges, corners = draw.of("bilinear", "nearest"), draw.of("zeros", "border", "reflection"), draw.flag()

    def forward(x, turn):
        grid = F.affine_grid(turn.expand(n, 2, 3), list(x.shape), align_corners=corners)
        return F.grid_sample(x, grid, mode=mode, padding_mode=edges, align_corners=corners)

    return Made(Function(forward, weight(1, 2, 3)), n * h * w * 3 * 2, backward=None)


def squeeze_and_excite(draw):
    """Two linear layers on the means of the channels, and a gate."""
    n, c = draw.shape[:2]
    hidden = draw.size(1, 6)
    gate = nn.Sequential(
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(c, hidden),
        nn.ReLU(),
        nn.Linear(hidden, c),
        draw.of(nn.Sigmoid, nn.Hardsigmoid)(),
        nn.Unflatten(1, (c, 1, 1)),
    )
    return Made(Gated(gate=gate), 2 * n * c * hidden)


class Gated(Parts):
    def forward(self, x):
        return x * self.gate(x)


_SPATIAL = {"1d": "signal", "2d": "image", "3d": "volume"}
KINDS = {
    **{f"conv{axes}": Kind(takes, convolution) for axes, takes in _SPATIAL.items()},
    **{f"conv_transpose{axes}": Kind(takes, transposed_convolution) for axes, takes in _SPATIAL.items()},
    **kinds("image", channels_last),
    **{f"pool{axes}": Kind(takes, pool) for axes, takes in _SPATIAL.items()},
    **kinds("image", unpool),
    **{f"resample{axes}": Kind(takes, resample) for axes, takes in _SPATIAL.items()},
    **kinds("image", shuffle, unfold_and_fold, sample_grid, squeeze_and_excite),
}
