"""Samples of memory, to find contents that no op has written."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from ctypes import c_ubyte
from struct import Struct
from typing import Any, cast

import torch

from fvflops.capture.recorder.tensor_specs import tensors_of

# Bytes of a storage that are compared, at its start and at its middle.
SAMPLE_BYTES = 64
read_bytes = Struct(f"{SAMPLE_BYTES}s").unpack_from
read_fewer = [Struct(f"{size}s").unpack_from for size in range(2 * SAMPLE_BYTES)]  # by size
# All memory, of which only what torch has allocated is read: this takes a fifth of the time of ctypes.string_at.
MEMORY = (c_ubyte * sys.maxsize).from_address(0)
# torch's method, unwrapped.
address_of = cast(Any, torch.UntypedStorage.__base__).data_ptr

PLAIN_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})

Sample = tuple[bytes, ...]


def find_address(storage: torch.UntypedStorage) -> int:
    """Return a storage's address, 0 without memory."""
    try:
        address: int = address_of(storage)
    except RuntimeError:  # the storage of a wrapper subclass
        return 0
    return address


def read_sample(address: int, nbytes: int) -> Sample:
    """Return a sample of memory: its start and its middle."""
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
