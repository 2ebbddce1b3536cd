"""Layers of the classes that `tests.support.models.whole_models` lacks, in the variants that peers know."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from tests.support.models.parts import Parts
from tests.support.models.whole_models import Case


class Swish(torch.autograd.Function):
    """A region of its own, with a backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s + x * s * (1 - s))


class Net(nn.Module):
    """A Linear(8, 16), a ReLU and a Linear(16, 4); for 2 rows 256 and 128 multiply-adds, 544, 32 and 264 FLOPs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


class Packed(Parts):
    """A recurrent layer on three sequences, of 5, 3 and 2 steps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(pack_padded_sequence(x, torch.tensor([5, 3, 2])))[0].data


class Attention(nn.Module):
    """Multi-head attention of a sequence to itself, with or without its weights among the results."""

    def __init__(self, need_weights: bool, masked: bool = False, **options: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **options)
        self.need_weights = need_weights
        self.mask = torch.zeros(5, 5) if masked else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=self.need_weights, attn_mask=self.mask)[0]


class CrossAttention(Parts):
    """Multi-head attention of 5 queries to 7 keys."""

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return self.attention(query, key, key)[0]


class Renamed(nn.Linear):
    """A linear layer under another name."""


class Shared(nn.Module):
    """A linear layer that two modules hold and call."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(4, 4)
        self.first = nn.Sequential(layer)
        self.second = nn.Sequential(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Repeated(Parts):
    """A linear layer called three times."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.layer(self.layer(x)))


def _case(layer: nn.Module, *sizes: int) -> Case:
    return layer, (torch.randn(*sizes),)


_IDS = torch.ones(2, 6, dtype=torch.int64)

# Name → how to build it; each returns the module and its inputs, of a batch of 2 unless the name says otherwise.
LAYERS: dict[str, Callable[[], Case]] = {
    "linear": lambda: _case(nn.Linear(4, 5), 2, 3, 4),
    "linear without a bias": lambda: _case(nn.Linear(4, 5, bias=False), 2, 3, 4),
    "bilinear": lambda: (nn.Bilinear(4, 5, 3), (torch.randn(2, 6, 4), torch.randn(2, 6, 5))),
    "embedding": lambda: (nn.Embedding(10, 4), (_IDS,)),
    "embedding bag": lambda: (nn.EmbeddingBag(10, 4), (_IDS,)),
    # convolutions
    "conv1d": lambda: _case(nn.Conv1d(4, 6, 3, groups=2), 2, 4, 9),
    "conv2d": lambda: _case(nn.Conv2d(4, 6, (3, 5), stride=2, padding=1, dilation=2), 2, 4, 19, 17),
    "conv2d without a batch": lambda: _case(nn.Conv2d(4, 6, 3, bias=False), 4, 9, 7),
    "conv3d": lambda: _case(nn.Conv3d(4, 6, 3, groups=2, bias=False), 2, 4, 5, 6, 7),
    "conv transpose 1d": lambda: _case(nn.ConvTranspose1d(4, 6, 3, stride=2), 2, 4, 9),
    "conv transpose 2d": lambda: _case(nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), 2, 4, 9, 7),
    "conv transpose 3d": lambda: _case(nn.ConvTranspose3d(4, 6, 2, stride=2, bias=False), 2, 4, 3, 4, 5),
    # norms
    "batch norm 1d": lambda: _case(nn.BatchNorm1d(4), 2, 4, 9),
    "batch norm 2d": lambda: _case(nn.BatchNorm2d(4, affine=False), 2, 4, 9, 7),
    "batch norm 3d": lambda: _case(nn.BatchNorm3d(4), 2, 4, 3, 4, 5),
    "sync batch norm": lambda: _case(nn.SyncBatchNorm(4), 2, 4, 9, 7),
    "instance norm 1d": lambda: _case(nn.InstanceNorm1d(4, affine=True), 2, 4, 9),
    "instance norm 2d": lambda: _case(nn.InstanceNorm2d(4), 2, 4, 9, 7),
    "instance norm 2d with weights": lambda: _case(nn.InstanceNorm2d(4, affine=True), 2, 4, 9, 7),
    "instance norm 3d": lambda: _case(nn.InstanceNorm3d(4, affine=True), 2, 4, 3, 4, 5),
    "layer norm": lambda: _case(nn.LayerNorm(4), 2, 3, 4),
    "layer norm without weights": lambda: _case(nn.LayerNorm(4, elementwise_affine=False), 2, 3, 4),
    "layer norm without a bias": lambda: _case(nn.LayerNorm(4, bias=False), 2, 3, 4),
    "group norm": lambda: _case(nn.GroupNorm(2, 4), 2, 4, 9, 7),
    "group norm without weights": lambda: _case(nn.GroupNorm(2, 4, affine=False), 2, 4, 9, 7),
    "rms norm": lambda: _case(nn.RMSNorm(4), 2, 3, 4),
    # activation functions
    "relu": lambda: _case(nn.ReLU(), 2, 3, 4),
    "relu6": lambda: _case(nn.ReLU6(inplace=True), 2, 3, 4),
    "leaky relu": lambda: _case(nn.LeakyReLU(), 2, 3, 4),
    "prelu": lambda: _case(nn.PReLU(3), 2, 3, 4),
    "elu": lambda: _case(nn.ELU(), 2, 3, 4),
    "gelu": lambda: _case(nn.GELU(), 2, 3, 4),
    "silu": lambda: _case(nn.SiLU(), 2, 3, 4),
    "hardswish": lambda: _case(nn.Hardswish(), 2, 3, 4),
    "softmax": lambda: _case(nn.Softmax(dim=1), 2, 3, 4),
    # pooling
    "max pool 1d": lambda: _case(nn.MaxPool1d(2), 2, 4, 9),
    "max pool 2d": lambda: _case(nn.MaxPool2d(3, 2), 2, 4, 9, 7),
    "max pool 2d with indices": lambda: _case(nn.MaxPool2d(3, 2, return_indices=True), 2, 4, 9, 7),
    "max pool 3d": lambda: _case(nn.MaxPool3d(2), 2, 4, 4, 5, 6),
    "avg pool 1d": lambda: _case(nn.AvgPool1d(2), 2, 4, 9),
    "avg pool 2d": lambda: _case(nn.AvgPool2d(3, 2), 2, 4, 9, 7),
    "avg pool 3d": lambda: _case(nn.AvgPool3d(2), 2, 4, 4, 5, 6),
    "adaptive max pool 1d": lambda: _case(nn.AdaptiveMaxPool1d(3), 2, 4, 9),
    "adaptive max pool 2d": lambda: _case(nn.AdaptiveMaxPool2d((3, 2)), 2, 4, 9, 7),
    "adaptive max pool 3d": lambda: _case(nn.AdaptiveMaxPool3d(2), 2, 4, 4, 5, 6),
    "adaptive avg pool 1d": lambda: _case(nn.AdaptiveAvgPool1d(3), 2, 4, 9),
    "adaptive avg pool 2d": lambda: _case(nn.AdaptiveAvgPool2d((3, 2)), 2, 4, 9, 8),
    "adaptive avg pool 2d without a batch": lambda: _case(nn.AdaptiveAvgPool2d((3, 2)), 4, 9, 8),
    "adaptive avg pool 2d, uneven": lambda: _case(nn.AdaptiveAvgPool2d((3, 4)), 2, 4, 7, 9),
    "adaptive avg pool 3d": lambda: _case(nn.AdaptiveAvgPool3d(2), 2, 4, 4, 6, 8),
    "adaptive avg pool 3d without a batch": lambda: _case(nn.AdaptiveAvgPool3d(2), 4, 4, 6, 8),
    # resampling
    "upsample nearest": lambda: _case(nn.Upsample(scale_factor=2), 2, 3, 4, 5),
    "upsample nearest-exact": lambda: _case(nn.Upsample(scale_factor=2, mode="nearest-exact"), 2, 3, 4, 5),
    "upsample linear": lambda: _case(nn.Upsample(size=8, mode="linear"), 2, 3, 4),
    "upsample bilinear": lambda: _case(nn.Upsample(size=(8, 9), mode="bilinear"), 2, 3, 4, 5),
    "upsample bicubic": lambda: _case(nn.Upsample(scale_factor=(2, 3), mode="bicubic"), 2, 3, 4, 5),
    "upsample trilinear": lambda: _case(nn.Upsample(scale_factor=2, mode="trilinear"), 2, 3, 4, 5, 6),
    "upsample by 1.5": lambda: _case(nn.Upsample(scale_factor=1.5), 2, 3, 3, 3),
    "upsampling nearest 2d": lambda: _case(nn.UpsamplingNearest2d(scale_factor=2), 2, 3, 4, 5),
    "upsampling bilinear 2d": lambda: _case(nn.UpsamplingBilinear2d(size=(8, 9)), 2, 3, 4, 5),
    # recurrence
    "rnn": lambda: _case(nn.RNN(6, 7), 5, 2, 6),
    "rnn, deep": lambda: _case(nn.RNN(6, 7, num_layers=3, bidirectional=True, bias=False), 5, 2, 6),
    "gru": lambda: _case(nn.GRU(6, 7, batch_first=True), 2, 5, 6),
    "gru, deep": lambda: _case(nn.GRU(6, 7, num_layers=3, bidirectional=True, bias=False), 5, 2, 6),
    "lstm": lambda: _case(nn.LSTM(6, 7, bidirectional=True), 5, 2, 6),
    "lstm, deep": lambda: _case(nn.LSTM(6, 7, num_layers=3, bidirectional=True, batch_first=True), 2, 5, 6),
    "lstm without biases": lambda: _case(nn.LSTM(6, 7, num_layers=2, bias=False), 5, 2, 6),
    "lstm without a batch": lambda: _case(nn.LSTM(6, 7), 5, 6),
    "lstm with a projection": lambda: _case(nn.LSTM(6, 7, num_layers=2, proj_size=3, bidirectional=True), 5, 2, 6),
    "lstm, packed": lambda: _case(Packed(layer=nn.LSTM(6, 7)), 5, 3, 6),
    "gru, packed": lambda: _case(Packed(layer=nn.GRU(6, 7, num_layers=2, bidirectional=True)), 5, 3, 6),
    "rnn, packed": lambda: _case(Packed(layer=nn.RNN(6, 7)), 5, 3, 6),
    "rnn cell": lambda: _case(nn.RNNCell(6, 7), 2, 6),
    "gru cell": lambda: _case(nn.GRUCell(6, 7), 2, 6),
    "gru cell without biases": lambda: _case(nn.GRUCell(6, 7, bias=False), 2, 6),
    "lstm cell": lambda: _case(nn.LSTMCell(6, 7), 2, 6),
    # attention
    "attention": lambda: _case(Attention(need_weights=False), 5, 2, 8),
    "attention, batch first": lambda: _case(Attention(need_weights=False, batch_first=True), 2, 5, 8),
    "attention with weights": lambda: _case(Attention(need_weights=True), 5, 2, 8),
    "attention with weights and a mask": lambda: _case(Attention(need_weights=True, masked=True), 5, 2, 8),
    "attention without biases": lambda: _case(Attention(need_weights=False, bias=False), 5, 2, 8),
    "cross attention": lambda: (
        CrossAttention(attention=nn.MultiheadAttention(8, 2)),
        (torch.randn(5, 2, 8), torch.randn(7, 2, 8)),
    ),
    "encoder layer": lambda: _case(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, 5, 8),
    "decoder layer": lambda: (nn.TransformerDecoderLayer(8, 2, 16), (torch.randn(5, 2, 8), torch.randn(7, 2, 8))),
    # what modules are to a peer
    "renamed": lambda: _case(Renamed(4, 5), 2, 4),
    "shared": lambda: _case(Shared(), 2, 4),
    "repeated": lambda: _case(Repeated(layer=nn.Linear(4, 4)), 2, 4),
}
