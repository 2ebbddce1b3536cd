"""The leaving of no trace: what a run may change is noted before and put back after."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

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

# Objects that hold no state of a run, or state that is not theirs.
_OPAQUE = (nn.Module, torch.Tensor, type, ModuleType, FunctionType, MethodType)

Undo = Callable[[], None]


class UndoLog:
    """The first contents of each storage that a run writes to and that existed before the run.

    It is keyed by storage, so that a write through one view restores all of them. Sparse tensors are not covered.
    """

    def __init__(self) -> None:
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def before(
        self, schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any], fresh: Mapping[int, Any]
    ) -> None:
        """Save what a call is about to overwrite, except the storages in `fresh`, which the run itself made."""
        for value in _written_arguments(schema, args, kwargs):
            for tensor in tensors_of(value):
                self._save(tensor, fresh)

    def _save(self, tensor: torch.Tensor, fresh: Mapping[int, Any]) -> None:
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


def _written_arguments(schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterable[Any]:
    for position in schema.written:
        yield args[position] if position < len(args) else kwargs.get(schema.names[position])
    unsaid = _WRITES_UNSAID.get(schema.name)
    if unsaid is not None:
        arguments = dict(zip(schema.names, args, strict=False)) | dict(kwargs)
        switch, *written = unsaid
        if arguments.get(switch):
            yield from (arguments.get(name) for name in written)


class Snapshot:
    """What modules, inputs, random generators and torch's settings looked like before a run.

    Of each module the attributes are noted, hooks included, and the plain containers in them; of the inputs also the
    attributes of objects, such as a cache that the caller passed in. Values are compared by identity.
    """

    def __init__(self, modules: Iterable[nn.Module], inputs: Any) -> None:
        self._undos: list[Undo] = []
        seen: set[int] = set()
        with _disable_current_modes():
            for module in modules:
                self._undos.append(_watch_mapping(module.__dict__))
                for value in module.__dict__.values():
                    self._undos.extend(_watch(value, seen, objects=False))
                for tensor in (*module._parameters.values(), *module._buffers.values()):
                    if tensor is not None:
                        self._undos.extend(_watch_tensor(tensor))
            self._undos.extend(_watch(inputs, seen, objects=True))
            self._undos.extend(_watch_settings())

    def restore(self) -> None:
        """Put back whatever differs; what one thing raises keeps no other from being put back."""
        with _disable_current_modes(), ExitStack() as stack:
            for undo in self._undos:
                stack.callback(undo)


def _watch(value: Any, seen: set[int], *, objects: bool) -> Iterator[Undo]:
    """Yield how to put back each container that can be reached through containers, and through `objects` if asked."""
    pending = [value]
    while pending:
        item = pending.pop()
        if id(item) in seen or item is None or isinstance(item, (str, bytes, int, float)):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Generator):
            yield _watch_generator(item)
        elif isinstance(item, torch.Tensor):
            if objects:
                yield from _watch_tensor(item)
        elif isinstance(item, dict):
            yield _watch_mapping(item)
            pending.extend(item.values())
        elif isinstance(item, (list, deque)):
            yield _watch_sequence(item)
            pending.extend(item)
        elif isinstance(item, set):
            yield _watch_set(item)
        elif isinstance(item, tuple):
            pending.extend(item)
        elif objects and hasattr(item, "__dict__") and not isinstance(item, _OPAQUE):
            yield _watch_mapping(item.__dict__)
            pending.extend(item.__dict__.values())


def _watch_mapping(mapping: dict[Any, Any]) -> Undo:
    before = list(mapping.items())

    def undo() -> None:
        now = list(mapping.items())
        same = len(now) == len(before) and all(
            key is old_key and value is old for (key, value), (old_key, old) in zip(now, before, strict=True)
        )
        if not same:
            dict.clear(mapping)
            dict.update(mapping, before)

    return undo


def _watch_sequence(items: Any) -> Undo:
    before = list(items)

    def undo() -> None:
        if len(items) != len(before) or any(now is not old for now, old in zip(items, before, strict=True)):
            items.clear()
            items.extend(before)

    return undo


def _watch_set(items: set[Any]) -> Undo:
    before = set(items)

    def undo() -> None:
        if items != before:
            items.clear()
            items.update(before)

    return undo


def _watch_generator(generator: torch.Generator) -> Undo:
    state = generator.get_state()
    return lambda: _ignore(generator.set_state(state))


def _watch_tensor(tensor: torch.Tensor) -> Iterator[Undo]:
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    alias = tensor.detach() if plain and not tensor.is_nested else None
    requires_grad, grad = tensor.requires_grad, tensor.grad if tensor.is_leaf else None

    def undo() -> None:
        if alias is not None and _place(tensor) != _place(alias):
            tensor.data = alias
        if tensor.is_leaf and tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)
        if tensor.is_leaf and tensor.grad is not grad:
            tensor.grad = grad

    yield undo


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


def _watch_settings() -> Iterator[Undo]:
    """Yield how to put back the random generators, and the settings of torch that a model may change."""
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    yield lambda: random.setstate(python_state)
    yield lambda: torch.set_rng_state(torch_state)
    if torch.cuda.is_initialized():
        cuda_states = torch.cuda.get_rng_state_all()
        yield lambda: torch.cuda.set_rng_state_all(cuda_states)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy_state = numpy.random.get_state()
        yield lambda: numpy.random.set_state(numpy_state)
    dtype = torch.get_default_dtype()
    yield lambda: torch.set_default_dtype(dtype) if torch.get_default_dtype() is not dtype else None
    mode = torch.get_deterministic_debug_mode()
    yield lambda: torch.set_deterministic_debug_mode(mode) if torch.get_deterministic_debug_mode() != mode else None


def _ignore(_: Any) -> None:
    return None
