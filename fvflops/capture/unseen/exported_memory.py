"""Samples of memory, and memory that code outside torch can access, to find contents that no op has written."""

from __future__ import annotations

import sys
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator
from ctypes import c_ubyte
from struct import Struct
from typing import Any, cast

import torch

from fvflops.capture.recorder.tensor_specs import PLAIN_TENSORS, tensors_of
from fvflops.capture.unseen.unseen_reporter import Site
from fvflops.trace import TensorSpec

# Bytes of a storage that are compared, at its start and at its middle.
SAMPLE_BYTES = 64
read_bytes = Struct(f"{SAMPLE_BYTES}s").unpack_from
read_fewer = [Struct(f"{size}s").unpack_from for size in range(2 * SAMPLE_BYTES)]  # by size
# A view of all memory, of which only memory allocated by torch is read; five times as fast as ctypes.string_at.
MEMORY = (c_ubyte * sys.maxsize).from_address(0)
# torch's method, unwrapped.
address_of = cast(Any, torch.UntypedStorage.__base__).data_ptr

Sample = tuple[bytes, ...]


def find_address(storage: torch.UntypedStorage) -> int:
    """Return a storage's address, 0 if it has no memory."""
    try:
        address: int = address_of(storage)
    except RuntimeError:  # the storage of a wrapper subclass
        return 0
    return address


def read_sample(address: int, nbytes: int) -> Sample:
    if nbytes < 2 * SAMPLE_BYTES:
        return read_fewer[nbytes](MEMORY, address)
    return read_bytes(MEMORY, address) + read_bytes(MEMORY, address + (nbytes >> 1))


def with_storages(values: Any) -> Iterator[tuple[torch.Tensor, torch.UntypedStorage]]:
    """Yield the plain strided tensors in nested values with their storages."""
    for tensor in tensors_of(values):
        if type(tensor) in PLAIN_TENSORS and tensor.layout is torch.strided:
            try:
                storage = tensor.untyped_storage()
            except RuntimeError:  # functorch tensors have none
                continue
            yield tensor, storage


# Exported memory of up to this many bytes is compared in full; of larger memory, this many blocks of 64 bytes.
_MAX_COMPARED = 1 << 24
_BLOCKS = 256


class Export:
    """Memory that code outside torch can access: its storage, the tensor's spec, and where it was exported.

    `site` is None for an input that was not exported: only a sample of its memory is compared.
    """

    __slots__ = ("_checksum", "_storage", "site", "spec")

    def __init__(self, storage: torch.UntypedStorage, spec: TensorSpec, site: Site | None) -> None:
        self._storage = weakref.ref(storage)
        self.spec = spec
        self.site = site
        self.update()

    def update(self) -> bool:
        """Save a checksum of the contents; return whether it differs from the last one."""
        before, self._checksum = getattr(self, "_checksum", None), self._sum()
        return before is not None and self._checksum is not None and self._checksum != before

    def contains(self, address: int) -> bool:
        storage = self._storage()
        return storage is not None and 0 <= address - find_address(storage) < storage.nbytes()

    def _sum(self) -> int | Sample | None:
        storage = self._storage()
        if storage is None or storage.device.type != "cpu" or not (address := find_address(storage)):
            return None
        nbytes = storage.nbytes()
        if self.site is None:
            return read_sample(address, nbytes)
        if nbytes <= _MAX_COMPARED:
            return zlib.crc32((c_ubyte * nbytes).from_address(address))
        step = (nbytes - SAMPLE_BYTES) // (_BLOCKS - 1)
        return hash(tuple([read_bytes(MEMORY, address + index * step) for index in range(_BLOCKS)]))


class ExportedMemory(dict[int, Export]):
    """The exported storages of a run by index; `report` is called with one that changed although no op wrote to it."""

    def __init__(self, report: Callable[[Site | None, TensorSpec, int], None]) -> None:
        super().__init__()
        self._report = report

    def contains_address(self, address: int) -> bool:
        return self._find(address) is not None

    def add(self, index: int, storage: torch.UntypedStorage, spec: TensorSpec, site: Site | None) -> None:
        """Add a storage, or record that it was exported again."""
        export = self.get(index)
        is_new = export is None
        if export is None:  # perhaps another view of exported memory
            export = self[index] = self._find(find_address(storage)) or Export(storage, spec, site)
        if site is None or (is_new and export.site is not None):
            return
        is_input = export.site is None
        if export.site is None or export.site.stack != site.stack:  # one module's writes are reported once
            self.check((index,))
        export.site = site
        if is_input:  # all of it is compared from now on
            export.update()

    def check(self, indices: Iterable[int] | None = None) -> None:
        """Report which of these storages, by default all, changed since an op last wrote to them."""
        for index in list(self) if indices is None else indices:
            export = self.get(index)
            if export is not None and export.update():
                self._report(export.site, export.spec, index)

    def accept(self, indices: Iterable[int] | None = None) -> None:
        """Save the contents of these storages, by default all, without a report: an op may have written to them."""
        if self:
            for index in self.keys() & set(self if indices is None else indices):
                self[index].update()

    def _find(self, address: int) -> Export | None:
        return next((export for export in self.values() if export.contains(address)), None)
