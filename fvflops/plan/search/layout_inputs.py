"""The inputs of a rank for a microbatch of another size, or for a part of the sequence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fvflops.plan.layout import PlanError


def resize_inputs(inputs: Any, *, batch: int, ranks: int = 1) -> Any:
    """Return nested inputs with `batch` samples, of a rank of `ranks` among which the sequence is divided.

    The first dimension of every tensor that has one is the batch, the second of token ids the sequence. Tensors that
    differ in their first dimension, and a sequence that `ranks` does not divide, raise PlanError.

    >>> tokens = torch.ones(2, 16, dtype=torch.int64)
    >>> resize_inputs((tokens, {"mask": tokens}), batch=3, ranks=4)[1]["mask"].shape
    torch.Size([3, 4])
    """
    sizes = {tensor.shape[0] for tensor in _tensors_in(inputs) if tensor.ndim}
    if len(sizes) != 1:
        found = ", ".join(str(tuple(tensor.shape)) for tensor in _tensors_in(inputs)) or "no tensors"
        raise PlanError(f"a search changes the batch, the first dimension of all inputs; got {found}")
    return _resize(inputs, batch, ranks)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif type(value) in (tuple, list):
        for item in value:
            yield from _tensors_in(item)


def _resize(value: Any, batch: int, ranks: int) -> Any:
    if isinstance(value, torch.Tensor):
        return _resize_tensor(value, batch, ranks) if value.ndim else value
    if isinstance(value, Mapping):
        return {name: _resize(item, batch, ranks) for name, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_resize(item, batch, ranks) for item in value)
    return value


def _resize_tensor(tensor: torch.Tensor, batch: int, ranks: int) -> torch.Tensor:
    shape = [batch, *tensor.shape[1:]]
    if ranks > 1 and tensor.ndim == 2 and not tensor.is_floating_point():
        if shape[1] % ranks:
            raise PlanError(f"cp={ranks} must divide the sequence of {shape[1]} tokens")
        shape[1] //= ranks
    first = tensor[tuple(slice(size) for size in (1, *shape[1:]))]
    return first.expand(shape).contiguous()
