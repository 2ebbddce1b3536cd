"""Cases to count: a model or function with its inputs, and the ways in which it is run."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.support.models.parts import Applied

HALF, BF16, FULL = torch.float16, torch.bfloat16, torch.float32


class Case(NamedTuple):
    """A model or function with its inputs, and the ways in which it is run."""

    model: Any
    args: tuple[Any, ...]
    train: tuple[bool, ...] = (False, True)
    context: Callable[[], Any] = nullcontext


def floats(*shape: int, dtype: torch.dtype = FULL, grad: bool = True) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float32).to(dtype).requires_grad_(grad)


def of(function: Callable[..., Any], *args: Any, **options: Any) -> Case:
    """Return the case of a function."""
    return Case(Applied(lambda _, *values: function(*values)), args, **options)


def image(*shape: int, dtype: torch.dtype = FULL) -> torch.Tensor:
    """Return an image in channels-last memory format."""
    return torch.rand(shape).to(dtype, memory_format=torch.channels_last).requires_grad_()


def to_format(model: nn.Module, form: torch.memory_format) -> nn.Module:
    """Return a model with its weights in a memory format, which torch's annotations lack."""
    change: Any = model.to
    return change(memory_format=form)
