"""What a shape run knows of real tensors: those that were there before it, and those that it computes."""

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

# Tensors of up to this many elements keep their numbers, if they are of integers or bools (ids, positions, masks,
# lengths) or made of nothing but such and constants; and views of so many that are expanded to EXPANDED times as many.
CONCRETE_LIMIT = 1 << 20
EXPANDED = 64

WHOLE = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

# A tensor, its metadata in the run, and the number of its storage.
Seen = tuple[torch.Tensor, Metadata, int]


class ConcreteTensors:
    """The real tensors of a shape run that answers for a device, where `homes` are the devices that they are on.

    Those of floating point that exist before the run count as unknown, small ones of integers and bools as known.
    `seen` are the former, by id.
    """

    def __init__(self, recorder: Recorder, device: torch.device, homes: Sequence[torch.device]) -> None:
        self.seen: dict[int, Seen] = {}
        self._recorder = recorder
        # A program may ask for "cuda", and gets the one that is current, "cuda:0" as a rule.
        self._devices = {META: device, torch.device(device.type): device, **dict.fromkeys(homes, device)}
        if not is_available(device):
            self._devices[torch.device("cpu")] = device
        # Where numbers are made that the run asks for on its device: there, if all that exists is there too.
        alone = is_available(device) and all(home in (device, META) for home in homes)
        self._numbers_at = device if alone else torch.device("cpu")
        self._adapted: dict[Metadata, Metadata] = {}
        # Of the storages the first so many existed before the run; the others' numbers are of the run's own making.
        self._held = 0
        # By id, with what tells that the storage still lives: another may come to be where it was.
        self._lost: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def register(
        self,
        tensors: Sequence[torch.Tensor],
        metadata: Sequence[Metadata],
        storages: Sequence[torch.UntypedStorage],
        rows: Sequence[tuple[Any, ...]],
    ) -> None:
        """Take down the storages of tensors that exist before the run, and throughout it."""
        numbers = self._recorder.register_storages(storages, rows)
        self._held = len(self._recorder.storages)
        adapted = {item: self._adapt(item) for item in set(metadata)}
        rewritten = map(adapted.__getitem__, metadata)
        self.seen.update(zip(map(id, tensors), zip(tensors, rewritten, numbers, strict=True), strict=True))

    def resolve(self, tensor: torch.Tensor) -> Seen:
        """Return a real tensor with its metadata in the run and the number of its storage."""
        seen = self.seen.get(id(tensor))
        if seen is not None:
            return seen
        if tensor.layout is not torch.strided or tensor.is_nested:
            error = NotImplementedError(f"a tensor of layout {tensor.layout} has no shape rules here")
            self._recorder.fail("", error)
            raise error
        real = metadata_of(tensor)
        metadata = self._adapt(real)
        number = self._recorder.storage_of(tensor, "outside")
        if self._is_invalid(tensor.untyped_storage()):
            metadata = _unknown(metadata)
        elif not metadata.known and number >= self._held and _could_stay(real):
            # A constant that the model makes, or keeps apart from its parameters, buffers and inputs.
            metadata = intern(real.shape, real.stride, real.dtype, metadata.device, True, real.bits)
        return tensor, metadata, number

    def metadata_of(self, tensor: torch.Tensor) -> Metadata:
        """Return the metadata that a tensor has in the run."""
        return tensor.metadata if type(tensor) is ShapeTensor else self.resolve(tensor)[1]

    def spec_of(self, tensor: torch.Tensor) -> TensorSpec:
        """Return the spec of a tensor of any layout, and of what torch.func or a graph's tracer makes of one."""
        wrapped = isinstance(tensor, FakeTensor) or is_functorch_wrapped(tensor)
        plain = tensor.layout is torch.strided and not tensor.is_nested and not wrapped
        return self.metadata_of(tensor).spec if plain else describe_tensor(tensor)

    def device_for(self, device: torch.device) -> torch.device:
        """Return the device that the run shows instead of one that its tensors are on."""
        return self._devices.get(device, device)

    def place_of(self, device: torch.device) -> torch.device:
        """Return the device on which a real tensor is made that is asked for on some device."""
        return self._numbers_at if device in self._devices else device

    def have_values(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether all tensors are real and hold the numbers that a real run would see."""
        return bool(tensors) and all(
            type(tensor) is not ShapeTensor
            and tensor.device.type != "meta"
            and not self._is_invalid(tensor.untyped_storage())
            for tensor in tensors
        )

    def mark_known(self, tensor: torch.Tensor) -> None:
        """Let a tensor that exists before the run count as known."""
        _, metadata, number = self.resolve(tensor)
        known = intern(metadata.shape, metadata.stride, metadata.dtype, metadata.device, True, metadata.bits)
        self.seen[id(tensor)] = tensor, known, number

    def invalidate(self, tensor: torch.Tensor) -> None:
        """Note that a real storage was to be written to: what it holds is not what a real run would see there."""
        storage = tensor.untyped_storage()
        if not self._is_invalid(storage):
            self._lost[id(storage)] = weakref.ref(storage)
            for key, (seen, metadata, number) in list(self.seen.items()):
                if metadata.known and seen.untyped_storage() is storage:
                    self.seen[key] = seen, _unknown(metadata), number

    def _is_invalid(self, storage: torch.UntypedStorage) -> bool:
        # torch keeps one object for a storage as long as it lives.
        lost = self._lost.get(id(storage))
        return lost is not None and lost() is storage

    def _adapt(self, metadata: Metadata) -> Metadata:
        """Return the metadata that a real tensor has in this run: on its device, known if small and whole."""
        adapted = self._adapted.get(metadata)
        if adapted is None:
            known = metadata.dtype in WHOLE and _could_stay(metadata)
            device = self.device_for(metadata.device)
            adapted = intern(metadata.shape, metadata.stride, metadata.dtype, device, known, metadata.bits)
            self._adapted[metadata] = adapted
        return adapted


def is_small(metadata: Metadata) -> bool:
    """Return whether a tensor may keep its numbers."""
    if metadata.numel <= CONCRETE_LIMIT:
        return True
    held = metadata.nbytes // metadata.dtype.itemsize
    return held <= CONCRETE_LIMIT and metadata.numel <= EXPANDED * CONCRETE_LIMIT


def _could_stay(metadata: Metadata) -> bool:
    return metadata.device.type != "meta" and is_small(metadata)


def _unknown(metadata: Metadata) -> Metadata:
    return intern(metadata.shape, metadata.stride, metadata.dtype, metadata.device, False, metadata.bits)
