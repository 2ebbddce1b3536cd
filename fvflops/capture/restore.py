"""The leaving of no trace: what a run may change is noted before and put back after."""

from __future__ import annotations

import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from fvflops.capture.fully_sharded import sharding_state
from fvflops.capture.interrupts import deferred
from fvflops.capture.reading import Reading
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

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
# Objects that hold no state of a run, or state that is not theirs.
_OPAQUE = (nn.Module, torch.Tensor, type, ModuleType, FunctionType, MethodType)

Undo = Callable[[], None]
# A tensor, an alias of its elements, whether it required a gradient, and its gradient.
_TensorState = tuple[torch.Tensor, torch.Tensor | None, bool, torch.Tensor | None]


def leaves_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that get a gradient from the backward pass of one.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> leaves_of((weight * 2).sum())[0] is weight
    True
    """
    found, seen, waiting = [], set(), [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [below for below, _ in node.next_functions]
    return found


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
        for value in written_arguments(schema, args, kwargs):
            for tensor in tensors_of(value):
                self._save(tensor, fresh)

    def _save(self, tensor: torch.Tensor, fresh: Mapping[int, Any]) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":
            return
        key = id(storage)  # torch keeps the object as long as the storage lives
        if key not in fresh and key not in self._saved:
            with deferred(), _disable_current_modes():  # copying a storage is ops too
                self._saved[key] = (storage, storage.clone())

    def undo(self) -> None:
        """Put the saved contents back."""
        with _disable_current_modes():
            for storage, contents in self._saved.values():
                if storage.nbytes() != contents.nbytes():
                    storage.resize_(contents.nbytes())
                storage.copy_(contents)
        self._saved.clear()


def written_arguments(schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterable[Any]:
    """Yield the arguments of a call that it writes to, those included of which its schema says nothing."""
    for position in schema.written:
        yield args[position] if position < len(args) else kwargs.get(schema.names[position])
    unsaid = _WRITES_UNSAID.get(schema.name)
    if unsaid is not None:
        arguments = dict(zip(schema.names, args, strict=False)) | dict(kwargs)
        switch, *written = unsaid
        if arguments.get(switch):
            yield from (arguments.get(name) for name in written)


def writes_to_arguments(schema: OpSchema) -> bool:
    """Return whether an op may write to an argument, whatever its schema says."""
    return bool(schema.written) or schema.name in _WRITES_UNSAID


class Containers:
    """What was in dictionaries, lists, sets and generators before a run, and where tensors among it stood.

    `tensors` are all that were met.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._containers: list[tuple[Any, Any]] = []
        self._tensors: list[_TensorState] = []
        self._seen: set[int] = set()

    def watch(self, values: Iterable[Any], *, objects: bool) -> None:
        """Note each container that can be reached through containers, and through objects if asked."""
        pending = list(values)
        while pending:
            item = pending.pop()
            kind = type(item)
            if kind in _PLAIN or id(item) in self._seen:
                continue
            self._seen.add(id(item))
            if isinstance(item, dict):
                self._containers.append((item, list(item.items())))
                pending.extend(item.values())
            elif isinstance(item, (list, deque)):
                self._containers.append((item, list(item)))
                pending.extend(item)
            elif isinstance(item, set):
                self._containers.append((item, set(item)))
            elif isinstance(item, tuple):
                pending.extend(item)
            elif kind is torch.Generator:
                self._containers.append((item, item.get_state()))
            elif isinstance(item, torch.Tensor):
                self.tensors.append(item)
                if objects:
                    self._tensors.append(_note_tensor(item))
            elif objects and hasattr(item, "__dict__") and not isinstance(item, _OPAQUE):
                self._containers.append((item.__dict__, list(item.__dict__.items())))
                pending.extend(item.__dict__.values())

    def restorers(self) -> tuple[tuple[Callable[[Any], None], Iterable[Any]], ...]:
        """Return functions that put things back, and what each is to be called with."""
        return (_restore_tensor, self._tensors), (_restore_container, self._containers)

    def restore(self) -> None:
        """Put back whatever differs; what one thing raises keeps no other from being put back."""
        restore_all(self.restorers())


def restore_all(kinds: Iterable[tuple[Callable[[Any], None], Iterable[Any]]]) -> None:
    """Call functions with each of their states; what one raises, whatever it is, keeps no other from being called."""
    problems: list[BaseException] = []
    with _disable_current_modes():
        for restore, states in kinds:
            for state in states:
                try:
                    restore(state)
                except BaseException as error:
                    problems.append(error)
    if problems:
        raise problems[0]


class Snapshot:
    """What a model, its inputs, random generators and torch's settings looked like before a run.

    Of each module the attributes are noted, hooks included, and the plain containers in them; of the inputs also the
    attributes of objects, such as a cache that the caller passed in. Values are compared by identity.
    """

    def __init__(self, reading: Reading, inputs: Any) -> None:
        self._reading = reading
        self._held = Containers()
        with _disable_current_modes():
            self._grads = [tensor.grad if tensor.is_leaf else None for tensor in reading.tensors]
            self._tensors = [_note_tensor(tensor) for tensor in reading.odd]
            self._held.watch([value for value in reading.others if not isinstance(value, _OPAQUE)], objects=False)
            self._held.watch([inputs], objects=True)
            self._held.watch(sharding_state(reading.names), objects=False)
            self._settings = list(_watch_settings())

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that the model has beside its parameters and buffers, and those of the inputs."""
        apart = [value for value in self._reading.others if isinstance(value, torch.Tensor)]
        return [*apart, *self._held.tensors]

    def restore(self) -> None:
        """Put back whatever differs; what one thing raises keeps no other from being put back."""
        tensors, containers = self._held.restorers()
        restore_all(
            (
                (_restore_setting, self._settings),
                (self._restore_held, self._changed_tensors()),
                (_restore_tensor, self._tensors),
                tensors,
                (_restore_mapping, self._changed_mappings()),
                containers,
                (_restore_empty, filter(None, self._reading.empty)),
            )
        )

    def _changed_mappings(self) -> Iterable[tuple[dict[Any, Any], dict[Any, Any]]]:
        """Return the mappings if any of them differs: nearly always none does, and one pass over all tells that."""
        reading = self._reading
        now = reading.mappings
        unchanged = (
            list(map(len, now)) == reading.sizes
            and list(chain.from_iterable(now)) == reading.keys
            and all(map(is_, chain.from_iterable([mapping.values() for mapping in now]), reading.values))
        )
        return () if unchanged else zip(now, reading.contents(), strict=True)

    def _changed_tensors(self) -> list[int]:
        """Return the positions of the tensors that stand for other elements, or have another gradient."""
        reading = self._reading
        tensors = reading.tensors
        storages = map(is_, map(torch.Tensor.untyped_storage, tensors), reading.storages)
        changed = {index for index, same in enumerate(storages) if not same}
        columns: tuple[tuple[list[Any], list[Any]], ...] = (
            (list(map(torch.Tensor.storage_offset, tensors)), reading.offsets),
            ([tensor.shape for tensor in tensors], reading.shapes),
            ([tensor.stride() for tensor in tensors], reading.strides),
            ([tensor.requires_grad for tensor in tensors], reading.requires_grad),
            ([id(tensor.grad if tensor.is_leaf else None) for tensor in tensors], list(map(id, self._grads))),
        )
        for now, before in columns:
            if now != before:
                changed.update([index for index, (a, b) in enumerate(zip(now, before, strict=True)) if a != b])
        return sorted(changed)

    def _restore_held(self, index: int) -> None:
        reading = self._reading
        tensor, metadata = reading.tensors[index], reading.metadata[index]
        alias = torch.empty(0, dtype=metadata.dtype, device=metadata.device)
        alias.set_(reading.storages[index], reading.offsets[index], metadata.shape, metadata.stride)
        if _place(tensor) != _place(alias):
            tensor.data = alias
        _restore_gradient(tensor, reading.requires_grad[index], self._grads[index])


def _restore_mapping(state: tuple[dict[Any, Any], dict[Any, Any]]) -> None:
    mapping, before = state
    if list(mapping) != list(before) or not all(map(is_, mapping.values(), before.values())):
        _refill(mapping, before)


def _refill(mapping: dict[Any, Any], before: Any) -> None:
    # An immutable mapping refuses its own methods, an ordered one needs them.
    kind = OrderedDict if isinstance(mapping, OrderedDict) else dict
    kind.clear(mapping)
    kind.update(mapping, before)


def _restore_empty(container: Any) -> None:
    container.clear()


def _restore_container(state: tuple[Any, Any]) -> None:
    container, before = state
    if isinstance(container, dict):
        if len(container) != len(before) or any(
            key is not old_key or value is not old
            for (key, value), (old_key, old) in zip(container.items(), before, strict=True)
        ):
            _refill(container, before)
    elif isinstance(container, set):
        if container != before:
            container.clear()
            container.update(before)
    elif isinstance(container, torch.Generator):
        container.set_state(before)
    elif len(container) != len(before) or any(now is not old for now, old in zip(container, before, strict=True)):
        container.clear()
        container.extend(before)


def _note_tensor(tensor: torch.Tensor) -> _TensorState:
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    alias = tensor.detach() if plain and not tensor.is_nested else None
    return tensor, alias, tensor.requires_grad, tensor.grad if tensor.is_leaf else None


def _restore_tensor(state: _TensorState) -> None:
    """Put back whatever differs, the elements themselves excepted, which are the undo log's."""
    tensor, alias, requires_grad, grad = state
    if alias is not None and _place(tensor) != _place(alias):
        tensor.data = alias
    _restore_gradient(tensor, requires_grad, grad)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()


def _restore_gradient(tensor: torch.Tensor, requires_grad: bool, grad: torch.Tensor | None) -> None:
    if not tensor.is_leaf and not requires_grad and not tensor._is_view():
        tensor.detach_()  # the run wrote something with a history into it
    if tensor.is_leaf:
        if tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)
        if tensor.grad is not grad:
            tensor.grad = grad


def _restore_setting(undo: Undo) -> None:
    undo()


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
