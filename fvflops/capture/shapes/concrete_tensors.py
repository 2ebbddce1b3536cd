"""Real tensors in shape execution, from before the run or computed by it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.recorder.tensor_specs import describe_tensor
from fvflops.capture.shapes.metadata import META, Metadata, intern, is_available, metadata_of
from fvflops.capture.shapes.shape_tensor import ShapeTensor, UnsupportedError
from fvflops.torch_internals import FakeTensor, is_functorch_wrapped
from fvflops.trace import TensorSpec

# Tensors up to this many elements keep their values if they are integers or bools (ids, positions, masks, lengths), or
# computed only from such tensors and constants. So do views expanded up to EXPANDED times from a storage of this size.
CONCRETE_LIMIT = 1 << 20
EXPANDED = 64

INTEGRAL = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

# A tensor, its metadata in the run, and the index of its storage.
RegisteredTensor = tuple[torch.Tensor, Metadata, int]


class ConcreteTensors:
    """The real tensors of a run in shape execution, which emulates `device`; `devices` are their actual devices.

    Tensors that existed before the run are in `registered` by id. Of these, small integer and bool tensors have known
    values, all others unknown ones.
    """

    def __init__(self, recorder: Recorder, device: torch.device, devices: Sequence[torch.device]) -> None:
        self.device = device
        self.registered: dict[int, RegisteredTensor] = {}
        self._recorder = recorder
        # "cuda" means the current CUDA device, usually "cuda:0".
        self._devices = {META: device, torch.device(device.type): device, **dict.fromkeys(devices, device)}
        if not is_available(device):
            self._devices[torch.device("cpu")] = device
        # Tensors that the run computes are created on its device if all existing tensors are on it too.
        same_device = is_available(device) and all(item in (device, META) for item in devices)
        self._compute_device = device if same_device else torch.device("cpu")
        self._adapted: dict[Metadata, Metadata] = {}
        # Storages below this index existed before the run; the run computed the values of the others.
        self._preexisting = 0
        # By id; the weak reference tells whether it is still the same storage, since ids are reused.
        self._invalid: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def register(
        self,
        tensors: Sequence[torch.Tensor],
        metadata: Sequence[Metadata],
        storages: Sequence[torch.UntypedStorage],
        rows: Sequence[tuple[Any, ...]],
    ) -> None:
        """Register tensors that existed before the run and outlive it, with their storages."""
        indices = self._recorder.register_storages(storages, rows)
        self._preexisting = len(self._recorder.storages)
        adapted_by_metadata = {item: self._adapt(item) for item in set(metadata)}
        adapted = map(adapted_by_metadata.__getitem__, metadata)
        self.registered.update(zip(map(id, tensors), zip(tensors, adapted, indices, strict=True), strict=True))

    def resolve(self, tensor: torch.Tensor) -> RegisteredTensor:
        """Return a real tensor with its metadata in the run and its storage's index."""
        registered = self.registered.get(id(tensor))
        if registered is not None:
            return registered
        if tensor.layout is not torch.strided or tensor.is_nested:
            raise self.unsupported("nested tensors" if tensor.is_nested else f"tensors of layout {tensor.layout}")
        real_metadata = metadata_of(tensor)
        metadata = self._adapt(real_metadata)
        index = self._recorder.storage_of(tensor, "outside")
        unseen_work = self._recorder.unseen
        if unseen_work is not None and unseen_work.exported:
            unseen_work.exported.check((index,))
        if self._is_invalid(tensor.untyped_storage()):
            metadata = without_values(metadata)
        elif not metadata.known and index >= self._preexisting and real_metadata.device.type != "meta":
            # A constant that the model creates, or stores outside its parameters, buffers and inputs.
            metadata = _with_values(real_metadata, metadata.device)
        return tensor, metadata, index

    def unsupported(self, what: str) -> UnsupportedError:
        """Return the error of tensors that shape execution does not support, recorded as the run's failure."""
        error = UnsupportedError(f"shape execution does not support {what}")
        self._recorder.fail("", error)
        return error

    def metadata_of(self, tensor: torch.Tensor) -> Metadata:
        return tensor.metadata if type(tensor) is ShapeTensor else self.resolve(tensor)[1]

    def spec_of(self, tensor: torch.Tensor) -> TensorSpec:
        """Return the spec of a tensor of any layout, FakeTensor or torch.func wrapper."""
        is_wrapped = isinstance(tensor, FakeTensor) or is_functorch_wrapped(tensor)
        is_strided = tensor.layout is torch.strided and not tensor.is_nested
        return self.metadata_of(tensor).spec if is_strided and not is_wrapped else describe_tensor(tensor)

    def device_for(self, device: torch.device) -> torch.device:
        """Return the device that the run reports for a tensor's device."""
        return self._devices.get(device, device)

    def creation_device(self, device: torch.device) -> torch.device:
        """Return the device on which to create a real tensor requested on a device."""
        return self._compute_device if device in self._devices else device

    def have_values(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether all tensors are real and have the values of real execution."""
        are_real = all(type(tensor) is not ShapeTensor and tensor.device.type != "meta" for tensor in tensors)
        return bool(tensors) and are_real and not any(self._is_invalid(tensor.untyped_storage()) for tensor in tensors)

    def refresh(self, tensor: torch.Tensor) -> None:
        """Read a tensor's metadata again, since the model changed its shape, strides or memory."""
        if self.registered.pop(id(tensor), None) is not None:
            self.registered[id(tensor)] = self.resolve(tensor)

    def mark_known(self, tensor: torch.Tensor) -> None:
        """Treat the values of a tensor that existed before the run as known."""
        _, metadata, index = self.resolve(tensor)
        known = intern(metadata.shape, metadata.stride, metadata.dtype, metadata.device, True, metadata.bits)
        self.registered[id(tensor)] = tensor, known, index

    def invalidate(self, tensor: torch.Tensor) -> None:
        """Mark the values of a tensor's storage as unknown, since the model would have written to it."""
        storage = tensor.untyped_storage()
        if not self._is_invalid(storage):
            self._invalid[id(storage)] = weakref.ref(storage)
            for key, (registered, metadata, index) in list(self.registered.items()):
                if (metadata.known or metadata.lazy) and registered.untyped_storage() is storage:
                    self.registered[key] = registered, without_values(metadata), index

    def _is_invalid(self, storage: torch.UntypedStorage) -> bool:
        # torch keeps one Python object per storage for its lifetime.
        invalid = self._invalid.get(id(storage))
        return invalid is not None and invalid() is storage

    def _adapt(self, metadata: Metadata) -> Metadata:
        """Return a real tensor's metadata in the run: on its device, with the values of an integer or bool tensor."""
        adapted = self._adapted.get(metadata)
        if adapted is None:
            device = self.device_for(metadata.device)
            if metadata.dtype in INTEGRAL and metadata.device.type != "meta":
                adapted = _with_values(metadata, device)
            else:
                adapted = intern(metadata.shape, metadata.stride, metadata.dtype, device, False, metadata.bits)
            self._adapted[metadata] = adapted
        return adapted


def _with_values(metadata: Metadata, device: torch.device) -> Metadata:
    """Return the metadata of a tensor that has values: known ones if it is small, else lazy ones."""
    known = is_small(metadata)
    lazy = not known and (metadata.dtype in INTEGRAL or stored_numel(metadata) <= CONCRETE_LIMIT)
    return intern(metadata.shape, metadata.stride, metadata.dtype, device, known, metadata.bits, lazy)


def stored_numel(metadata: Metadata) -> int:
    """Return the number of elements in memory, each of which an expanded tensor has several times."""
    return metadata.nbytes // metadata.dtype.itemsize


def is_small(metadata: Metadata) -> bool:
    """Return whether a tensor is small enough to keep its values."""
    if metadata.numel <= CONCRETE_LIMIT:
        return True
    return stored_numel(metadata) <= CONCRETE_LIMIT and metadata.numel <= EXPANDED * CONCRETE_LIMIT


def without_values(metadata: Metadata) -> Metadata:
    """Return the metadata of a tensor with unknown values."""
    return intern(metadata.shape, metadata.stride, metadata.dtype, metadata.device, False, metadata.bits)
