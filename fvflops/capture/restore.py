"""The leaving of no trace: what a run may change is noted before and put back after."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fvflops.capture.signature import OpSchema, tensors_of

# Ops whose schema says that they write nothing, though in training they update their running statistics.
_WRITES_UNSAID: Mapping[str, tuple[str, str, str]] = {
    "aten::batch_norm": ("training", "running_mean", "running_var"),
    "aten::native_batch_norm": ("training", "running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("training", "running_mean", "running_var"),
    "aten::miopen_batch_norm": ("training", "running_mean", "running_var"),
    "aten::_batch_norm_impl_index": ("training", "running_mean", "running_var"),
    "aten::instance_norm": ("use_input_stats", "running_mean", "running_var"),
}

# Hooks are left alone: they are ours, removed one by one, or another thread's.
_NOT_RESTORED = frozenset(
    {
        "_forward_hooks",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_forward_pre_hooks",
        "_forward_pre_hooks_with_kwargs",
        "_backward_hooks",
        "_backward_pre_hooks",
    }
)


class UndoLog:
    """The first contents of each storage that a run writes to and that existed before the run.

    It is keyed by storage, so that a write through one view restores all of them.
    """

    def __init__(self) -> None:
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def before(
        self, schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any], fresh: Mapping[int, Any]
    ) -> None:
        """Save what a call is about to overwrite, except the storages in `fresh`, which the run itself made."""
        for name, value in _written_arguments(schema, args, kwargs):
            for tensor in tensors_of(value):
                self._save(tensor, name, fresh)

    def _save(self, tensor: torch.Tensor, name: str, fresh: Mapping[int, Any]) -> None:
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in fresh and key not in self._saved:
            self._saved[key] = (storage, storage.clone())

    def undo(self) -> None:
        """Put the saved contents back."""
        for storage, contents in self._saved.values():
            if storage.nbytes() != contents.nbytes():
                storage.resize_(contents.nbytes())
            storage.copy_(contents)
        self._saved.clear()


def _written_arguments(schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for position in schema.written:
        name = schema.names[position]
        yield name, args[position] if position < len(args) else kwargs.get(name)
    unsaid = _WRITES_UNSAID.get(schema.name)
    if unsaid is not None:
        arguments = dict(zip(schema.names, args, strict=False)) | dict(kwargs)
        switch, *written = unsaid
        if arguments.get(switch):
            for name in written:
                yield name, arguments.get(name)


class Snapshot:
    """What a model's modules, parameters and the random generators looked like before a run.

    Modules' `__dict__`s are compared by identity, one level of plain containers in them included.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = [(module, _copy_state(module.__dict__)) for module in modules]
        self._tensors = [
            (tensor, tensor.requires_grad, tensor.grad if tensor.is_leaf else None, _alias(tensor))
            for module, _ in self._modules
            for tensor in (*module._parameters.values(), *module._buffers.values())
            if tensor is not None
        ]
        self._python_random = random.getstate()
        self._torch_random = torch.get_rng_state()
        self._cuda_random = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
        numpy = sys.modules.get("numpy")
        self._numpy_random = numpy.random.get_state() if numpy is not None else None

    def restore(self) -> None:
        """Put back whatever differs."""
        for module, state in self._modules:
            _restore_state(module.__dict__, state)
        for tensor, requires_grad, grad, alias in self._tensors:
            if alias is not None and tensor.data_ptr() != alias.data_ptr():
                tensor.data = alias
            if tensor.is_leaf:
                if tensor.requires_grad != requires_grad:
                    tensor.requires_grad_(requires_grad)
                if tensor.grad is not grad:
                    tensor.grad = grad
        random.setstate(self._python_random)
        torch.set_rng_state(self._torch_random)
        if self._cuda_random is not None:
            torch.cuda.set_rng_state_all(self._cuda_random)
        if self._numpy_random is not None:
            sys.modules["numpy"].random.set_state(self._numpy_random)


def _alias(tensor: torch.Tensor) -> torch.Tensor | None:
    plain = type(tensor) in (torch.Tensor, nn.Parameter)
    return tensor.detach() if plain and tensor.layout is torch.strided else None


def _copy_state(state: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return each attribute with a shallow copy of it where it is a plain container."""
    return {
        name: (value, value.copy() if isinstance(value, (dict, list, set)) else None)
        for name, value in state.items()
        if name not in _NOT_RESTORED
    }


def _restore_state(state: dict[str, Any], before: Mapping[str, tuple[Any, Any]]) -> None:
    for name in state.keys() - before.keys() - _NOT_RESTORED:
        del state[name]
    for name, (value, contents) in before.items():
        if state.get(name, before) is not value:
            state[name] = value
        if isinstance(value, list):
            value[:] = contents
        elif isinstance(value, (dict, set)) and not _same_items(value, contents):
            value.clear()
            value.update(contents)


def _same_items(now: Any, before: Any) -> bool:
    if isinstance(now, set):
        return bool(now == before)
    return list(now) == list(before) and all(now[key] is before[key] for key in before)
