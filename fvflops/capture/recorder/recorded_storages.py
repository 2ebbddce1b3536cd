"""The storages of a run: which exist, which the run created and freed, and which an op call reads and writes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import count
from threading import get_ident
from typing import Any

import torch

from fvflops.capture.instrument.probe import Probe
from fvflops.capture.recorder.run_position import RunPosition, append_row
from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.capture.restore.interrupts import weak_callback
from fvflops.capture.shapes.shape_tensor import ShapeTensor, StorageRef, stored_index
from fvflops.capture.unseen.unseen_work import UnseenWork
from fvflops.torch_internals import current_autograd_node, is_functorch_wrapped, is_wrapper_subclass


class _LiveStorage(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage of a run, with its id, index and bytes."""

    __slots__ = ("index", "key", "nbytes")
    index: int
    key: int
    nbytes: int


class RecordedStorages(RunPosition):
    """Storages by their indices, and the events of a run, which include freed storages.

    `fresh` maps ids of the storages that the run created to their indices; all other storages existed before.
    `events` and `storages` are rows of the Trace's columns of these names. `index_of_ref` returns the index of a shape
    tensor's storage. `of_earlier_steps` has the storages that earlier steps of the same program created. `unseen`
    detects work that bypasses dispatch modes.
    """

    def __init__(self, backward: bool, probe: Probe | None) -> None:
        super().__init__(backward)
        self.probe = probe
        self.unseen: UnseenWork | None = None
        self.events: list[tuple[Any, ...]] = []
        self._pauses = 0
        self.fresh: dict[int, int] = {}
        self.index_of_ref: Callable[[StorageRef], int] = stored_index
        self.storage_indices: dict[int, int] = {}
        self.storages: list[tuple[Any, ...]] = []
        self.of_earlier_steps: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._live_storages: dict[int, _LiveStorage] = {}  # by id of the storage
        self._device_names: dict[torch.device, str] = {}

    @property
    def paused(self) -> bool:
        return self._pauses > 0

    def is_active(self) -> bool:
        """Return whether this thread is recorded, and the recording is not paused."""
        return not self._pauses and self.is_recording_thread()

    def register_storages(self, storages: Sequence[torch.UntypedStorage], rows: Sequence[tuple[Any, ...]]) -> list[int]:
        """Register storages that exist before the run and throughout it; return their indices."""
        keys = list(map(id, storages))
        indices = self.storage_indices
        if not indices and len(set(keys)) == len(keys):
            indices.update(zip(keys, count()))
            self.storages += rows
            return list(range(len(rows)))
        for key, row in zip(keys, rows, strict=True):
            if key not in indices:
                indices[key] = append_row(self.storages, (*row,))
        return [indices[key] for key in keys]

    def storage_of(self, tensor: torch.Tensor, origin: str) -> int:
        """Return the index of a tensor's storage; a new one is registered with `origin`.

        A wrapper subclass's storage has no memory: its inner tensors do.
        """
        storage = tensor.untyped_storage()
        index = self.storage_indices.get(id(storage))
        if index is None:
            has_memory = type(tensor) is torch.Tensor or not is_wrapper_subclass(tensor)
            index = self.add_storage(storage, origin, storage.nbytes() if has_memory else 0)
            if origin == "outside" and self.unseen is not None and storage not in self.of_earlier_steps:
                self.unseen.check_new(tensor, storage, index)
        return index

    def storages_of(self, values: Any, origin: str = "outside") -> tuple[int, ...]:
        """Return the indices of the storages of nested tensors, each once."""
        ids: dict[int, None] = {}
        for value in values:
            if type(value) is ShapeTensor:
                ids[self.index_of_ref(value.storage_ref)] = None
            elif isinstance(value, torch.Tensor):
                if value.layout is torch.strided and not is_functorch_wrapped(value):
                    ids[self.storage_of(value, origin)] = None
            elif isinstance(value, (list, tuple, dict)):
                ids.update(dict.fromkeys(self.storages_of(tensors_of(value), origin)))
        return tuple(ids)

    def add_storage(self, storage: torch.UntypedStorage, origin: str, nbytes: int | None = None) -> int:
        """Register a new storage, by default of its size, and return its index."""
        key = id(storage)
        if nbytes is None:
            nbytes = storage.nbytes()
        device, names = storage.device, self._device_names
        row = nbytes, names.get(device) or names.setdefault(device, str(device)), origin
        index = self.storage_indices[key] = append_row(self.storages, row)
        if origin == "op":
            self.fresh[key] = index
            if self.probe is not None:
                self.probe.live_bytes += nbytes
        live = self._live_storages[key] = _LiveStorage(storage, self._on_storage_freed)
        live.key, live.index, live.nbytes = key, index, nbytes
        return index

    def add_reallocated(self, index: int, nbytes: int) -> int:
        """Register the new memory of a resized storage, and return its index."""
        return append_row(self.storages, (nbytes, self.storages[index][1], "op"))

    def record_resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a real storage was resized: it is one index for each of its allocations."""
        live = self._live_storages.get(id(storage))
        if live is not None and live() is storage:
            self._forget_storage(live)
        if nbytes := storage.nbytes():
            self.add_storage(storage, "op", nbytes)

    def record_freed(self, index: int) -> None:
        if self.recording:
            if not self.backward:
                self.events.append(("free", index, self.stack))
                return
            # A thread that is not recorded may free storages too, such as a process group's or the garbage collector's.
            thread = get_ident()
            state = self if thread == self.thread else self._thread_states.get(thread)
            if state is None:
                state, phase = (self, "optimizer" if self.active_optimizers else "forward")
            else:
                phase = self._phase(state, current_autograd_node())
            self.events.append(("free", index, state.stack, phase, state.thread_number))

    @weak_callback
    def _on_storage_freed(self, live: _LiveStorage) -> None:
        if self.recording and self._live_storages.get(live.key) is live:
            self._forget_storage(live)

    def _forget_storage(self, live: _LiveStorage) -> None:
        key, index = live.key, live.index
        del self._live_storages[key], self.storage_indices[key]
        if self.fresh.pop(key, None) is not None and self.probe is not None:
            self.probe.live_bytes -= live.nbytes
        if self.unseen is not None:
            self.unseen.forget_storage(index)
        self.record_freed(index)
