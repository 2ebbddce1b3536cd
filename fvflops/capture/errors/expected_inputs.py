"""Inputs that torch's layers accept: the number of dimensions, the size of an axis, the dtype, the smallest image."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fvflops.units import format_quantity

_SIDES = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}


@dataclass(frozen=True, slots=True)
class Expectation:
    """Requirement of a layer on its input number `index`, and the nearest shape and dtype that it accepts.

    `shape` is None where none can be derived; `dtype` is "" where the input's is right. `in_training`: it expects
    this in training mode alone.
    """

    text: str
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    index: int = 0
    in_training: bool = False


@dataclass(frozen=True, slots=True)
class _Axis:
    """An axis whose size is an attribute of the layer, and the numbers of dimensions of the input, () for any."""

    axis: int
    size: str
    noun: str
    ndims: tuple[int, ...] = ()
    layout: str = ""


def find_mismatch(module: nn.Module, tensors: Sequence[torch.Tensor]) -> Expectation | None:
    """Return the requirement of a layer of torch.nn on its first input that it does not accept, or None.

    >>> find_mismatch(nn.Linear(4, 2), [torch.ones(3, 5)])
    Expectation(text='4 input features', shape=(3, 4), dtype='', index=0, in_training=False)
    """
    if not type(module).__module__.startswith("torch.nn.") or not tensors:  # a subclass may accept other inputs
        return None
    for kinds, check in _CHECKS.items():
        if isinstance(module, kinds) and (expectation := check(module, tensors)) is not None:
            return expectation
    return _check_dtype(module, tensors)


def _check_axes(axes: Sequence[_Axis], module: Any, tensors: Sequence[torch.Tensor]) -> Expectation | None:
    for index, (axis, tensor) in enumerate(zip(axes, tensors, strict=False)):
        shape, size = list(tensor.shape), getattr(module, axis.size)
        what = format_quantity(size, axis.noun)
        if (axis.ndims and len(shape) not in axis.ndims) or not shape:
            dimensions = " or ".join(map(str, axis.ndims)) or "at least 1"
            layout = f" {axis.layout}" if axis.layout else ""
            return Expectation(f"a tensor of {dimensions} dimensions{layout} with {what}", index=index)
        if not -len(shape) <= axis.axis < len(shape):
            return Expectation(f"a tensor of more dimensions with {what}", index=index)
        if shape[axis.axis] != size:
            shape[axis.axis] = size
            return Expectation(what, tuple(shape), index=index)
    return None


def _check_convolution(module: Any, tensors: Sequence[torch.Tensor]) -> Expectation | None:
    sides = len(module.kernel_size)
    layout = f"(batch, channels, {', '.join(_SIDES[sides])})"
    axis = _Axis(-sides - 1, "in_channels", "input channel", (sides + 1, sides + 2), layout)
    return _check_axes([axis], module, tensors) or _check_smallest(module, tensors)


def _check_smallest(module: Any, tensors: Sequence[torch.Tensor]) -> Expectation | None:
    """Return the smallest image of a convolution or a pooling layer, if the input is smaller."""
    tensor = tensors[0]
    if isinstance(module, _TRANSPOSED) or isinstance(module.padding, str):
        return None
    sides = _count_sides(module)
    kernel, padding = _spread(module.kernel_size, sides), _spread(module.padding, sides)
    dilation = _spread(vars(module).get("dilation", 1), sides)
    if tensor.ndim < sides:
        return None
    spans = zip(kernel, padding, dilation, strict=True)
    smallest = [span * (size - 1) + 1 - 2 * pad for size, pad, span in spans]
    shape = list(tensor.shape)
    if all(have >= need for have, need in zip(shape[-sides:], smallest, strict=True)):
        return None
    shape[-sides:] = [max(have, need) for have, need in zip(shape[-sides:], smallest, strict=True)]
    what = f"{' and '.join(_SIDES[sides])} of at least {' x '.join(map(str, smallest))}"
    return Expectation(what, tuple(shape))


def _count_sides(module: nn.Module) -> int:
    return next(sides for sides in _SIDES if type(module).__name__.endswith(f"{sides}d"))


def _spread(value: int | Sequence[int], sides: int) -> tuple[int, ...]:
    return (value,) * sides if isinstance(value, int) else tuple(value) * (sides // len(value))


def _check_batch_norm(module: Any, tensors: Sequence[torch.Tensor]) -> Expectation | None:
    name = type(module).__name__
    ndims = {"BatchNorm1d": (2, 3), "BatchNorm2d": (4,), "BatchNorm3d": (5,)}.get(name, ())
    mismatch = _check_axes([_Axis(1, "num_features", "channel", ndims, "(batch, channels, ...)")], module, tensors)
    if mismatch is None and module.training and tensors[0].numel() == module.num_features:
        return Expectation("more than one value per channel in training mode", in_training=True)
    return mismatch


def _check_instance_norm(module: Any, tensors: Sequence[torch.Tensor]) -> Expectation | None:
    sides = _count_sides(module)
    axis = _Axis(-sides - 1, "num_features", "channel", (sides + 1, sides + 2))
    has_channels = module.affine or module.track_running_stats
    return _check_axes([axis], module, tensors) if has_channels else None


def _check_last_sizes(module: Any, tensors: Sequence[torch.Tensor]) -> Expectation | None:
    sizes, shape = tuple(module.normalized_shape), tuple(tensors[0].shape)
    if shape[-len(sizes) :] == sizes:
        return None
    what = f"a last dimension of {sizes[0]}" if len(sizes) == 1 else f"last dimensions {' x '.join(map(str, sizes))}"
    return Expectation(what, (*shape[: -len(sizes)], *sizes) if len(shape) >= len(sizes) else None)


def _check_recurrent(module: Any, tensors: Sequence[torch.Tensor]) -> Expectation | None:
    layout = "(batch, length, features)" if module.batch_first else "(length, batch, features)"
    return _check_axes([_Axis(-1, "input_size", "input feature", (2, 3), layout)], module, tensors)


def _check_indices(module: Any, tensors: Sequence[torch.Tensor]) -> Expectation | None:
    """Return the requirement of an embedding: integers, or indices that have a row."""
    indices = tensors[0]
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        return Expectation("integer indices", tuple(indices.shape), "int64")
    has_values = type(indices) is torch.Tensor and indices.device.type != "meta"
    if not has_values or not indices.numel():
        return None
    low, high = int(indices.min()), int(indices.max())
    if low >= 0 and high < module.num_embeddings:
        return None
    wrong = high if high >= module.num_embeddings else low
    return Expectation(f"indices from 0 to {module.num_embeddings - 1} (one is {wrong})")


def _check_dtype(module: nn.Module, tensors: Sequence[torch.Tensor]) -> Expectation | None:
    if isinstance(module, _EMBEDDINGS):
        return None
    weight = next(module.parameters(recurse=False), None)
    if weight is None or not weight.is_floating_point() or tensors[0].dtype == weight.dtype:
        return None
    dtype = str(weight.dtype).removeprefix("torch.")
    return Expectation(f"{dtype}, as its weights are", tuple(tensors[0].shape), dtype)


_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)
_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

_ATTENTION = [
    _Axis(-1, size, f"{name} feature", (2, 3))
    for name, size in (("query", "embed_dim"), ("key", "kdim"), ("value", "vdim"))
]

# Layers → the function that returns their requirement.
_CHECKS: Mapping[tuple[type[nn.Module], ...], Callable[[Any, Sequence[torch.Tensor]], Expectation | None]] = {
    _CONVOLUTIONS: _check_convolution,
    _POOLS: _check_smallest,
    _BATCH_NORMS: _check_batch_norm,
    _INSTANCE_NORMS: _check_instance_norm,
    (nn.GroupNorm,): partial(_check_axes, [_Axis(1, "num_channels", "channel")]),
    (nn.LayerNorm, nn.RMSNorm): _check_last_sizes,
    (nn.RNN, nn.LSTM, nn.GRU): _check_recurrent,
    (nn.RNNCell, nn.LSTMCell, nn.GRUCell): partial(_check_axes, [_Axis(-1, "input_size", "input feature", (1, 2))]),
    (nn.MultiheadAttention,): partial(_check_axes, _ATTENTION),
    (nn.Linear,): partial(_check_axes, [_Axis(-1, "in_features", "input feature")]),
    (nn.Bilinear,): partial(_check_axes, [_Axis(-1, f"in{number}_features", "input feature") for number in (1, 2)]),
    _EMBEDDINGS: _check_indices,
}
