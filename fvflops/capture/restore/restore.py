"""Snapshot everything a run may change, and restore it afterwards."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter, is_, methodcaller
from typing import Any

import torch

from fvflops.capture.model.model_index import ModelIndex
from fvflops.capture.recorder.tensor_specs import OpSchema, nodes_between, tensors_of
from fvflops.capture.restore import interrupts
from fvflops.capture.restore.containers import (
    CodeSnapshot,
    ContainerSnapshot,
    ObjectState,
    restore_all,
    restore_object,
    restore_tensor,
    save_tensor,
    with_copies,
)
from fvflops.capture.restore.contents import DICT, ORDERED_DICT
from fvflops.capture.restore.global_state import SavedGenerator, save_settings
from fvflops.capture.restore.namespaces import is_library
from fvflops.capture.restore.torch_state import restore_versions, sharding_state, without_modes
from fvflops.capture.shapes.data_parallel import replication_state

# Ops that update running statistics although their schemas declare no mutation: the argument on which that depends, if
# any. Overloads that return into `out` arguments do too.
_UPDATES_STATISTICS: Mapping[str, str | None] = {
    f"aten::{name}{overload}": condition
    for overload in ("", ".out")
    for name, condition in (
        *((f"{name}batch_norm", "training") for name in ("", "native_", "cudnn_", "miopen_")),
        *(("_batch_norm_impl_index", "training"), ("instance_norm", "use_input_stats")),
        *(("batch_norm_update_stats", None), ("batch_norm_gather_stats", None)),
        ("batch_norm_gather_stats_with_counts", None),
    )
}


_shape, _requires_grad = attrgetter("shape"), attrgetter("requires_grad")
_hooks, _attributes = attrgetter("_backward_hooks"), attrgetter("__dict__")
_is_leaf, _grad = attrgetter("is_leaf"), attrgetter("grad")
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def leaves_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the leaves that receive a gradient in a backward pass from a tensor.

    >>> weight = torch.ones(2, requires_grad=True)
    >>> leaves_of((weight * 2).sum())[0] is weight
    True
    """
    return [node.variable for node in nodes_between(tensor) if hasattr(node, "variable")]


class UndoLog:
    """Original contents of each pre-existing storage that a run writes to.

    By storage, so that all views of it are restored. Sparse and mkldnn tensors are copied as tensors.
    """

    def __init__(self) -> None:
        self._saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def before(
        self, schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any], fresh: Mapping[int, Any]
    ) -> None:
        """Save the storages that a call will write to, except the run's own, in `fresh`."""
        for value in written_arguments(schema, args, kwargs):
            for tensor in tensors_of(value):
                self.save(tensor, fresh)

    def save(self, tensor: torch.Tensor, fresh: Mapping[int, Any], max_bytes: int | None = None) -> None:
        """Save a tensor's storage, unless it has more than `max_bytes`."""
        if tensor.layout is torch.strided:
            self.save_storage(tensor.untyped_storage(), fresh, max_bytes)
        elif id(tensor) not in self._copies and not tensor.is_nested:
            with without_modes():
                self._copies[id(tensor)] = (tensor, tensor.detach().clone())

    def save_storage(
        self, storage: torch.UntypedStorage, fresh: Mapping[int, Any], max_bytes: int | None = None
    ) -> None:
        """Save a storage, unless it has more than `max_bytes`."""
        if storage.device.type == "meta":
            return
        key = id(storage)  # torch keeps one Python object per live storage
        if key not in fresh and key not in self._saved and (max_bytes is None or storage.nbytes() <= max_bytes):
            with interrupts.deferred(), without_modes():  # copying a storage dispatches ops
                self._saved[key] = (storage, storage.clone())

    def undo(self) -> None:
        if not (self._saved or self._copies):
            return
        with without_modes():
            for storage, contents in self._saved.values():
                if storage.nbytes() != contents.nbytes():
                    storage.resize_(contents.nbytes())
                storage.copy_(contents)
            for tensor, copy in self._copies.values():
                if tensor.layout in _COMPRESSED:  # where setting `data` has no effect
                    with torch.no_grad():
                        tensor.detach().resize_as_sparse_(copy).copy_(copy)
                else:
                    tensor.data = copy
        self._saved.clear()
        self._copies.clear()


def written_arguments(schema: OpSchema, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterable[Any]:
    """Yield the arguments that a call writes to, including undeclared mutations."""
    for position in schema.written:
        yield args[position] if position < len(args) else kwargs.get(schema.names[position])
    if schema.name in _UPDATES_STATISTICS:
        arguments = dict(zip(schema.names, args, strict=False)) | dict(kwargs)
        condition = _UPDATES_STATISTICS[schema.name]
        if condition is None or arguments.get(condition):
            yield from (arguments.get(name) for name in ("running_mean", "running_var"))


def writes_to_arguments(schema: OpSchema) -> bool:
    """Return whether an op may write to an argument, declared or not."""
    return bool(schema.written) or schema.name in _UPDATES_STATISTICS


class Snapshot:
    """Snapshot of a model, its inputs, random generators and torch's settings.

    Covers the attributes of each module, hooks included, and the inputs, with containers and objects in them. Also
    covers globals, class attributes and closures used by the model's classes, functions in its attributes, and `code`.
    Values are compared by identity. `program`: the run is a program, whose globals are saved only if such code uses
    them, since the others are not the model's. `versions`: the tensors' version counters are restored too.
    """

    def __init__(
        self,
        model_index: ModelIndex,
        inputs: Any,
        code: Iterable[Any] = (),
        *,
        program: bool = False,
        versions: bool = True,
    ) -> None:
        self._model_index = model_index
        visited = set(map(id, model_index.modules))
        self._contents = ContainerSnapshot(visited)
        self._code = CodeSnapshot(visited, all_globals=not program)
        self._parts = (self._contents, self._code)
        with without_modes():
            tensors = model_index.tensors
            self._grads = _grads_of(tensors)
            self._hooks = list(map(_hooks, tensors))
            self._tensors = [save_tensor(tensor) for tensor in model_index.unstrided]
            # Tensors can have attributes too; their dicts are mostly empty.
            attributes = list(map(_attributes, tensors))
            nonempty = list(filter(None, attributes))
            self._empty_attributes = attributes if not nonempty else [item for item in attributes if not item]
            self._contents.snapshot(
                [*sharding_state(model_index.modules), *replication_state(model_index.modules)], objects=False
            )
            classes = [kind for kind in set(map(type, model_index.modules)) if not is_library(kind.__module__)]
            self._contents.snapshot([inputs, *model_index.others, *nonempty, *filter(None, self._hooks)], objects=True)
            self._code.snapshot([*classes, *code, *self._contents.code], objects=True)
            self._settings = list(save_settings())
            everything = (*tensors, *model_index.unstrided, *self.tensors) if versions else ()
            self._versions = [(item, item._version) for item in everything if not item.is_inference()]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Tensors of the model other than parameters and buffers, and the inputs' tensors."""
        return [tensor for part in self._parts for tensor in part.tensors]

    def generators(self) -> Iterator[SavedGenerator]:
        """Yield the random generators of Python and NumPy, with their states before the run."""
        yield from (undo for undo in self._settings if isinstance(undo, SavedGenerator))
        for part in self._parts:
            yield from part.generators()

    def changed_arrays(self) -> list[Any]:
        """Return the NumPy arrays of floating-point numbers that the run has changed, which no op does."""
        return [array for part in self._parts for array in part.changed_arrays()]

    def restore(self) -> None:
        """Restore all changed objects, even if restoring one raises."""
        tensors, containers = self._contents.restorers()
        restore_all(
            (
                (lambda undo: undo(), self._settings),
                (self._restore_tensor, self._changed_tensors()),
                (restore_tensor, self._tensors),
                tensors,
                (restore_object, self._changed_mappings()),
                containers,
                *self._code.restorers(),
                (methodcaller("clear"), filter(None, (*self._empty_attributes, *self._model_index.empty))),
                (restore_versions, [self._versions]),
            )
        )

    def _changed_mappings(self) -> list[ObjectState]:
        """Return all mappings with their contents before the run, or none if all are unchanged, which is usual."""
        model_index = self._model_index
        now = model_index.mappings
        iterator_copies = self._contents.advanced_iterators()
        has_same_keys = list(map(len, now)) == model_index.sizes and list(chain.from_iterable(now)) == model_index.keys
        values = chain.from_iterable([mapping.values() for mapping in now])
        if not iterator_copies and has_same_keys and all(map(is_, values, model_index.values)):
            return []
        pairs = chain.from_iterable(zip(model_index.keys, model_index.values, strict=True))
        befores = [with_copies(list(islice(pairs, 2 * size)), iterator_copies) for size in model_index.sizes]
        kinds = (ORDERED_DICT if isinstance(mapping, OrderedDict) else DICT for mapping in now)
        return list(zip(kinds, now, befores, strict=True))

    def _changed_tensors(self) -> list[int]:
        model_index = self._model_index
        tensors = model_index.tensors
        columns: tuple[tuple[list[Any], list[Any]], ...] = (
            (list(map(torch.Tensor.untyped_storage, tensors)), model_index.storages),
            (list(map(torch.Tensor.storage_offset, tensors)), model_index.offsets),
            (list(map(_shape, tensors)), model_index.shapes),
            (list(map(torch.Tensor.stride, tensors)), model_index.strides),
            (list(map(_requires_grad, tensors)), model_index.requires_grad),
            (list(map(id, map(_hooks, tensors))), list(map(id, self._hooks))),
            (list(map(id, _grads_of(tensors))), list(map(id, self._grads))),
        )
        changed: set[int] = set()
        for now, before in columns:
            if now != before:
                changed.update([index for index, (a, b) in enumerate(zip(now, before, strict=True)) if a != b])
        return sorted(changed)

    def _restore_tensor(self, index: int) -> None:
        model_index = self._model_index
        tensor, metadata = model_index.tensors[index], model_index.metadata[index]
        alias = torch.empty(0, dtype=metadata.dtype, device=metadata.device)
        alias.set_(model_index.storages[index], model_index.offsets[index], metadata.shape, metadata.stride)
        restore_tensor((tensor, alias, model_index.requires_grad[index], self._grads[index]))
        if tensor._backward_hooks is not self._hooks[index]:
            tensor._backward_hooks = self._hooks[index]


def _grads_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    if all(map(_is_leaf, tensors)):
        return list(map(_grad, tensors))
    return [tensor.grad if tensor.is_leaf else None for tensor in tensors]
