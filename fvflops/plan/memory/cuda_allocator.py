"""Simulation of torch's caching allocator for CUDA: the memory that it reserves for the blocks of a run."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fvflops.plan.memory.buffers import find_buffers
from fvflops.plan.memory.storage_lifetimes import Block, MemoryTimeline

# c10/cuda/CUDACachingAllocator: sizes are multiples of 512 bytes; blocks up to 1 MiB are in segments of 2 MiB, under 10
# MiB in segments of 20 MiB, larger ones in their own, a multiple of 2 MiB. An expandable segment grows by pages of 2 or
# 20 MiB.
_UNIT = 512
_SMALL, _SMALL_SEGMENT = 2**20, 2 * 2**20
_LARGE, _LARGE_SEGMENT = 10 * 2**20, 20 * 2**20


class ReservedMemory(NamedTuple):
    """The peak of the bytes that an allocator reserves, and its allocated part.

    `by_stream` is the reserved bytes of each CUDA stream: memory that one has freed is not used for another.
    """

    peak: int
    allocated: int
    by_stream: dict[str, int]


@dataclass(slots=True)
class _Pool:
    """The segments of one stream and one size class. A free range is (bytes, address)."""

    is_small: bool
    expandable: bool
    reserved: int = 0
    free: list[tuple[int, int]] = field(default_factory=list)
    by_begin: dict[int, int] = field(default_factory=dict)
    by_end: dict[int, int] = field(default_factory=dict)
    segment_begins: set[int] = field(default_factory=set)
    next_address: int = 0

    def allocate(self, nbytes: int) -> tuple[int, int]:
        """Return the address and the bytes of a block, by best fit."""
        index = bisect_left(self.free, (nbytes, 0))
        if index == len(self.free):
            self._grow(nbytes)
            index = bisect_left(self.free, (nbytes, 0))
        size, address = self.free.pop(index)
        del self.by_begin[address], self.by_end[address + size]
        rest = size - nbytes
        if rest >= _UNIT if self.is_small or self.expandable else rest > _SMALL:
            self._add(address + nbytes, rest)
            size = nbytes
        return address, size

    def release(self, address: int, size: int) -> None:
        """Free a block, and merge it with free neighbours in its segment."""
        if address not in self.segment_begins and address in self.by_end:
            before = self.by_end[address]
            self._remove(before, address - before)
            address, size = before, size + address - before
        end = address + size
        if end not in self.segment_begins and end in self.by_begin:
            after = self.by_begin[end]
            self._remove(end, after)
            size += after
        self._add(address, size)

    def _grow(self, nbytes: int) -> None:
        if self.expandable:
            page = _SMALL_SEGMENT if self.is_small else _LARGE_SEGMENT
            last = self.by_end.get(self.next_address)
            missing = nbytes - (0 if last is None else self.next_address - last)
            size = -(-missing // page) * page
        elif self.is_small:
            size = _SMALL_SEGMENT
        else:
            size = _LARGE_SEGMENT if nbytes < _LARGE else -(-nbytes // _SMALL_SEGMENT) * _SMALL_SEGMENT
        self.reserved += size
        if not self.expandable:
            self.segment_begins.add(self.next_address)
        self.next_address += size
        self.release(self.next_address - size, size)

    def _add(self, address: int, size: int) -> None:
        insort(self.free, (size, address))
        self.by_begin[address] = size
        self.by_end[address + size] = address

    def _remove(self, address: int, size: int) -> None:
        del self.free[bisect_left(self.free, (size, address))]
        del self.by_begin[address]
        del self.by_end[address + size]


def reserved_memory(timeline: MemoryTimeline, *, expandable_segments: bool = False) -> ReservedMemory:
    """Return the memory that torch's caching allocator reserves on CUDA for a run, as torch.cuda.max_memory_reserved.

    Blocks are allocated and freed in the order of the timeline, by best fit, in pools of each stream: FSDP2 gathers
    parameters and reduces gradients in streams of their own. `expandable_segments` is the option of PYTORCH_ALLOC_CONF.
    Memory that exists before the run is allocated first. Not included: memory cached from earlier steps, and freeing
    cached memory when the device is full.
    """
    streams = find_buffers(timeline.trace).streams
    blocks = [block for block in timeline.blocks if block.nbytes]
    sizes = [max(-(-block.nbytes // _UNIT) * _UNIT, _UNIT) for block in blocks]
    keys = [
        ("" if block.storage is None else streams.get(block.storage, ""), size <= _SMALL)
        for block, size in zip(blocks, sizes, strict=True)
    ]
    pools = {key: _Pool(key[1], expandable_segments) for key in dict.fromkeys(keys)}
    pool_of = [pools[key] for key in keys]
    held: dict[int, tuple[int, int]] = {}
    reserved = highest = allocated = at_highest = 0
    for begins, number in _changes(blocks):
        pool, size = pool_of[number], sizes[number]
        if not begins:
            pool.release(*held.pop(number))
            allocated -= size
            continue
        reserved -= pool.reserved
        held[number] = pool.allocate(size)
        reserved += pool.reserved
        allocated += size
        if reserved > highest:
            highest, at_highest = reserved, allocated
    by_stream = Counter[str]()
    for (stream, _), pool in pools.items():
        by_stream[stream] += pool.reserved
    return ReservedMemory(highest, at_highest, dict(by_stream))


def _changes(blocks: Sequence[Block]) -> Iterator[tuple[int, int]]:
    """Yield (whether it begins, the block's number) in the order of the run; frees first at each event."""
    count = len(blocks)
    # As integers, which are sorted quickly: the event, then the two that are yielded.
    begins = [(2 * block.begin + 1) * count + number for number, block in enumerate(blocks)]
    ends = [2 * block.end * count + number for number, block in enumerate(blocks) if block.end is not None]
    for code in sorted(begins + ends):
        turn, number = divmod(code, count)
        yield turn % 2, number
