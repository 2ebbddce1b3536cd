"""Snapshot and restore a tensor's data pointer, metadata and gradient, not its elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from fvflops.capture.restore.torch_state import without_modes

# A tensor, an alias of its data, requires_grad, and its gradient.
TensorState = tuple[torch.Tensor, torch.Tensor | None, bool, torch.Tensor | None]


def save_tensor(tensor: torch.Tensor) -> TensorState:
    """Return a tensor's state; the alias is None for sparse and nested tensors and subclasses."""
    is_strided = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    alias = tensor.detach() if is_strided and not tensor.is_nested else None
    return tensor, alias, tensor.requires_grad, tensor.grad if is_leaf(tensor) else None


def restore_tensor(state: TensorState) -> None:
    """Restore what has changed except the elements, which the undo log restores."""
    tensor, alias, requires_grad, grad = state
    if alias is not None and data_location(tensor) != data_location(alias):
        tensor.data = alias
    restore_gradient(tensor, requires_grad, grad)


def data_location(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the storage, offset, shape and strides of a tensor."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


def restore_gradient(tensor: torch.Tensor, requires_grad: bool, grad: torch.Tensor | None) -> None:
    """Restore a leaf's gradient and whether it requires one."""
    if is_leaf(tensor) is False and not requires_grad and not tensor._is_view():
        tensor.detach_()  # the run wrote a tensor with autograd history into it
    if is_leaf(tensor):
        if tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)
        if tensor.grad is not grad:
            tensor.grad = grad


def is_leaf(tensor: torch.Tensor) -> bool | None:
    """Return whether a tensor is a leaf, or None if autograd raises.

    It raises for one of several views, such as FSDP's parameters, whose base was written to.
    """
    try:
        return tensor.is_leaf
    except RuntimeError:
        return None


def restore_all(restorers: Iterable[tuple[Callable[[Any], None], Iterable[Any]]]) -> None:
    """Call each function with each of its states; the first exception, of any kind, is raised after all calls."""
    errors: list[BaseException] = []
    with without_modes():
        for restore, states in restorers:
            for state in states:
                try:
                    restore(state)
                except BaseException as error:
                    errors.append(error)
    if errors:
        raise errors[0]
