"""Real tensors in shape execution: those from before the run, and those that it computes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.recorder.signature import describe_tensor
from fvflops.capture.shapes.meta_run import META
from fvflops.capture.shapes.metadata import Metadata, intern, is_available, metadata_of
from fvflops.capture.shapes.shape_tensor import ShapeTensor
from fvflops.torch_internals import FakeTensor, is_functorch_wrapped
from fvflops.trace import TensorSpec

# Tensors up to this many elements keep their values if they are integers or bools (ids, positions, masks, lengths) or
# computed from such and constants only; so do views with a storage of this size, expanded up to EXPANDED times.
CONCRETE_LIMIT = 1 << 20
EXPANDED = 64

INTEGRAL = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

# A tensor, its metadata in the run, and the index of its storage.
RegisteredTensor = tuple[torch.Tensor, Metadata, int]


class ConcreteTensors:
    """The real tensors of a run in shape execution for one device; `devices` are those that they are on.

    Of tensors from before the run, floating-point ones have unknown values, small integer and bool ones known values.
    `registered` are these tensors, by id.
    """

    def __init__(self, recorder: Recorder, device: torch.device, devices: Sequence[torch.device]) -> None:
        self.registered: dict[int, RegisteredTensor] = {}
        self._recorder = recorder
        # "cuda" means the current CUDA device, usually "cuda:0".
        self._devices = {META: device, torch.device(device.type): device, **dict.fromkeys(devices, device)}
        if not is_available(device):
            self._devices[torch.device("cpu")] = device
        # Tensors that the run computes are created on its device if all existing tensors are there too.
        all_there = is_available(device) and all(item in (device, META) for item in devices)
        self._compute_device = device if all_there else torch.device("cpu")
        self._adapted: dict[Metadata, Metadata] = {}
        # Storages below this index existed before the run; those above have values that the run computed.
        self._preexisting = 0
        # By id; the weak reference shows whether the storage is still alive, since ids are reused.
        self._invalid: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def register(
        self,
        tensors: Sequence[torch.Tensor],
        metadata: Sequence[Metadata],
        storages: Sequence[torch.UntypedStorage],
        rows: Sequence[tuple[Any, ...]],
    ) -> None:
        """Register the storages of tensors that exist before the run and throughout it."""
        numbers = self._recorder.register_storages(storages, rows)
        self._preexisting = len(self._recorder.storages)
        adapted = {item: self._adapt(item) for item in set(metadata)}
        rewritten = map(adapted.__getitem__, metadata)
        self.registered.update(zip(map(id, tensors), zip(tensors, rewritten, numbers, strict=True), strict=True))

    def resolve(self, tensor: torch.Tensor) -> RegisteredTensor:
        """Return a real tensor with its metadata in the run and its storage's index."""
        registered = self.registered.get(id(tensor))
        if registered is not None:
            return registered
        if tensor.layout is not torch.strided or tensor.is_nested:
            error = NotImplementedError(f"shape execution does not support tensors of layout {tensor.layout}")
            self._recorder.fail("", error)
            raise error
        real = metadata_of(tensor)
        metadata = self._adapt(real)
        number = self._recorder.storage_of(tensor, "outside")
        if self._is_invalid(tensor.untyped_storage()):
            metadata = _unknown(metadata)
        elif not metadata.known and number >= self._preexisting and _may_keep_values(real):
            # A constant that the model creates, or stores outside its parameters, buffers and inputs.
            metadata = intern(real.shape, real.stride, real.dtype, metadata.device, True, real.bits)
        return tensor, metadata, number

    def metadata_of(self, tensor: torch.Tensor) -> Metadata:
        """Return a tensor's metadata in the run."""
        return tensor.metadata if type(tensor) is ShapeTensor else self.resolve(tensor)[1]

    def spec_of(self, tensor: torch.Tensor) -> TensorSpec:
        """Return the spec of a tensor of any layout, or of a wrapper of torch.func or of a graph tracer."""
        wrapped = isinstance(tensor, FakeTensor) or is_functorch_wrapped(tensor)
        plain = tensor.layout is torch.strided and not tensor.is_nested and not wrapped
        return self.metadata_of(tensor).spec if plain else describe_tensor(tensor)

    def device_for(self, device: torch.device) -> torch.device:
        """Return the device that the run shows for a tensor's device."""
        return self._devices.get(device, device)

    def creation_device(self, device: torch.device) -> torch.device:
        """Return the device on which to create a real tensor requested on a device."""
        return self._compute_device if device in self._devices else device

    def have_values(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether all tensors are real and have the values of a real run."""
        return bool(tensors) and all(
            type(tensor) is not ShapeTensor
            and tensor.device.type != "meta"
            and not self._is_invalid(tensor.untyped_storage())
            for tensor in tensors
        )

    def mark_known(self, tensor: torch.Tensor) -> None:
        """Treat the values of a tensor from before the run as known."""
        _, metadata, number = self.resolve(tensor)
        known = intern(metadata.shape, metadata.stride, metadata.dtype, metadata.device, True, metadata.bits)
        self.registered[id(tensor)] = tensor, known, number

    def invalidate(self, tensor: torch.Tensor) -> None:
        """Mark a storage's values as unknown: the model would have written to it."""
        storage = tensor.untyped_storage()
        if not self._is_invalid(storage):
            self._invalid[id(storage)] = weakref.ref(storage)
            for key, (registered, metadata, number) in list(self.registered.items()):
                if metadata.known and registered.untyped_storage() is storage:
                    self.registered[key] = registered, _unknown(metadata), number

    def _is_invalid(self, storage: torch.UntypedStorage) -> bool:
        # torch keeps one Python object per storage for its lifetime.
        invalid = self._invalid.get(id(storage))
        return invalid is not None and invalid() is storage

    def _adapt(self, metadata: Metadata) -> Metadata:
        """Return a real tensor's metadata in this run: on its device, values known if small and not floating-point."""
        adapted = self._adapted.get(metadata)
        if adapted is None:
            known = metadata.dtype in INTEGRAL and _may_keep_values(metadata)
            device = self.device_for(metadata.device)
            adapted = intern(metadata.shape, metadata.stride, metadata.dtype, device, known, metadata.bits)
            self._adapted[metadata] = adapted
        return adapted


def is_small(metadata: Metadata) -> bool:
    """Return whether a tensor is small enough to keep its values."""
    if metadata.numel <= CONCRETE_LIMIT:
        return True
    held = metadata.nbytes // metadata.dtype.itemsize
    return held <= CONCRETE_LIMIT and metadata.numel <= EXPANDED * CONCRETE_LIMIT


def _may_keep_values(metadata: Metadata) -> bool:
    return metadata.device.type != "meta" and is_small(metadata)


def _unknown(metadata: Metadata) -> Metadata:
    return intern(metadata.shape, metadata.stride, metadata.dtype, metadata.device, False, metadata.bits)
