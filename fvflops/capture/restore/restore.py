"""The leaving of no trace: what a run may change is noted before and put back after."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch

from fvflops.capture.model.model_index import ModelIndex
from fvflops.capture.recorder.signature import OpSchema, tensors_of
from fvflops.capture.restore.containers import ContainerSnapshot, Surroundings
from fvflops.capture.restore.fsdp_state import sharding_state
from fvflops.capture.restore.interrupts import deferred
from fvflops.capture.restore.namespaces import is_library
from fvflops.capture.restore.settings import Undo, watch_settings
from fvflops.capture.restore.tensor_state import note_tensor, place_of, restore_all, restore_gradient, restore_tensor
from fvflops.capture.restore.torch_state import without_modes
from fvflops.capture.shapes.data_parallel import replication_state

# Ops whose schema says that they write nothing, though in training they update their running statistics.
_WRITES_UNSAID: Mapping[str, tuple[str, str, str]] = {
    "aten::batch_norm": ("training", "running_mean", "running_var"),
    "aten::native_batch_norm": ("training", "running_mean", "running_var"),
    "aten::cudnn_batch_norm": ("training", "running_mean", "running_var"),
    "aten::miopen_batch_norm": ("training", "running_mean", "running_var"),
    "aten::_batch_norm_impl_index": ("training", "running_mean", "running_var"),
    "aten::instance_norm": ("use_input_stats", "running_mean", "running_var"),
}


_shape, _requires_grad = attrgetter("shape"), attrgetter("requires_grad")
_hooks, _attributes = attrgetter("_backward_hooks"), attrgetter("__dict__")
_is_leaf, _grad = attrgetter("is_leaf"), attrgetter("grad")
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


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

    It is keyed by storage, so that a write through one view restores all of them. A sparse tensor, or one of mkldnn, is
    kept as a whole.
    """

    def __init__(self) -> None:
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def before(
        self, schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any], fresh: Mapping[int, Any]
    ) -> None:
        """Save what a call is about to overwrite, except the storages in `fresh`, which the run itself made."""
        for value in written_arguments(schema, args, kwargs):
            for tensor in tensors_of(value):
                self.save(tensor, fresh)

    def save(self, tensor: torch.Tensor, fresh: Mapping[int, Any], largest: int | None = None) -> None:
        """Save a tensor's contents, unless there are more than `largest` bytes."""
        if tensor.layout is not torch.strided:
            self._save_copy(tensor)
            return
        storage = tensor.untyped_storage()
        if storage.device.type == "meta":
            return
        key = id(storage)  # torch keeps the object as long as the storage lives
        if key not in fresh and key not in self._saved and (largest is None or storage.nbytes() <= largest):
            with deferred(), without_modes():  # copying a storage is ops too
                self._saved[key] = (storage, storage.clone())

    def _save_copy(self, tensor: torch.Tensor) -> None:
        if id(tensor) not in self._copies and not tensor.is_nested:
            with without_modes():
                self._copies[id(tensor)] = (tensor, tensor.detach().clone())

    def undo(self) -> None:
        """Put the saved contents back."""
        if not (self._saved or self._copies):
            return
        with without_modes():
            for storage, contents in self._saved.values():
                if storage.nbytes() != contents.nbytes():
                    storage.resize_(contents.nbytes())
                storage.copy_(contents)
            for tensor, copy in self._copies.values():
                if tensor.layout in _COMPRESSED:  # to which `data` can be set without effect
                    with torch.no_grad():
                        tensor.detach().resize_as_sparse_(copy).copy_(copy)
                else:
                    tensor.data = copy
        self._saved.clear()
        self._copies.clear()


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


class Snapshot:
    """What a model, its inputs, random generators and torch's settings looked like before a run.

    Of each module the attributes are noted, hooks included, and the containers and objects in them, and so of the
    inputs; of the code of the model's classes, of the functions in its attributes, and of those in `code` also the
    globals, class attributes and closures that it uses. Values are compared by identity. `program` says that the run is
    a program's own, whose other globals are not the model's.
    """

    def __init__(self, reading: ModelIndex, inputs: Any, code: Iterable[Any] = (), *, program: bool = False) -> None:
        self._reading = reading
        seen = set(map(id, reading.modules))
        self._held = ContainerSnapshot(seen)
        self._around = Surroundings(seen, whole=not program)
        with without_modes():
            tensors = reading.tensors
            self._grads = _grads_of(tensors)
            self._hooks = list(map(_hooks, tensors))
            self._tensors = [note_tensor(tensor) for tensor in reading.odd]
            # A tensor can have attributes too, in a dict that is mostly empty.
            attributes = list(map(_attributes, tensors))
            filled = list(filter(None, attributes))
            self._bare = attributes if not filled else [mapping for mapping in attributes if not mapping]
            self._held.watch([*sharding_state(reading.modules), *replication_state(reading.modules)], objects=False)
            classes = [kind for kind in set(map(type, reading.modules)) if not is_library(kind.__module__)]
            self._held.watch([inputs, *reading.others, *filled, *filter(None, self._hooks)], objects=True)
            self._around.watch([*classes, *code, *self._held.code], objects=True)
            self._settings = list(watch_settings())

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that the model has beside its parameters and buffers, and those of the inputs."""
        return [*self._held.tensors, *self._around.tensors]

    def restore(self) -> None:
        """Put back whatever differs; what one thing raises keeps no other from being put back."""
        tensors, containers = self._held.restorers()
        restore_all(
            (
                (_restore_setting, self._settings),
                (self._restore_held, self._changed_tensors()),
                (self._restore_hooks, self._changed_hooks()),
                (restore_tensor, self._tensors),
                tensors,
                (_restore_mapping, self._changed_mappings()),
                containers,
                *self._around.restorers(),
                (dict.clear, filter(None, self._bare)),
                (_restore_empty, filter(None, self._reading.empty)),
            )
        )

    def _changed_mappings(self) -> Iterable[tuple[dict[Any, Any], dict[Any, Any]]]:
        """Return the mappings if any of them differs: nearly always none does, and one pass over all tells that."""
        reading = self._reading
        now = reading.mappings
        moved = self._held.moved()
        unchanged = (
            not moved
            and list(map(len, now)) == reading.sizes
            and list(chain.from_iterable(now)) == reading.keys
            and all(map(is_, chain.from_iterable([mapping.values() for mapping in now]), reading.values))
        )
        if unchanged:
            return ()
        before = ({key: moved.get(id(value), value) for key, value in old.items()} for old in reading.contents())
        return zip(now, before, strict=True)

    def _changed_hooks(self) -> list[int]:
        now = list(map(_hooks, self._reading.tensors))
        if now == self._hooks:
            return []
        return [index for index, (a, b) in enumerate(zip(now, self._hooks, strict=True)) if a is not b]

    def _restore_hooks(self, index: int) -> None:
        self._reading.tensors[index]._backward_hooks = self._hooks[index]

    def _changed_tensors(self) -> list[int]:
        """Return the positions of the tensors that stand for other elements, or have another gradient."""
        reading = self._reading
        tensors = reading.tensors
        storages = map(is_, map(torch.Tensor.untyped_storage, tensors), reading.storages)
        changed = {index for index, same in enumerate(storages) if not same}
        columns: tuple[tuple[list[Any], list[Any]], ...] = (
            (list(map(torch.Tensor.storage_offset, tensors)), reading.offsets),
            (list(map(_shape, tensors)), reading.shapes),
            (list(map(torch.Tensor.stride, tensors)), reading.strides),
            (list(map(_requires_grad, tensors)), reading.requires_grad),
        )
        grads = _grads_of(tensors)
        if not all(map(is_, grads, self._grads)):
            changed.update([index for index, grad in enumerate(grads) if grad is not self._grads[index]])
        for now, before in columns:
            if now != before:
                changed.update([index for index, (a, b) in enumerate(zip(now, before, strict=True)) if a != b])
        return sorted(changed)

    def _restore_held(self, index: int) -> None:
        reading = self._reading
        tensor, metadata = reading.tensors[index], reading.metadata[index]
        alias = torch.empty(0, dtype=metadata.dtype, device=metadata.device)
        alias.set_(reading.storages[index], reading.offsets[index], metadata.shape, metadata.stride)
        if place_of(tensor) != place_of(alias):
            tensor.data = alias
        restore_gradient(tensor, reading.requires_grad[index], self._grads[index])


def _grads_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    if all(map(_is_leaf, tensors)):
        return list(map(_grad, tensors))
    return [tensor.grad if tensor.is_leaf else None for tensor in tensors]


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


def _restore_setting(undo: Undo) -> None:
    undo()
