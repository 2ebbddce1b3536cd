"""What torch's caching allocator reserves: hand-made runs, by the rules of CUDACachingAllocator.cpp."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from fvflops import plan_rank, record_call
from fvflops.plan.memory.cuda_allocator import reserved_memory
from fvflops.plan.memory.storage_lifetimes import Block, MemoryTimeline
from fvflops.zoo import build
from tests.support.old_torch import needs

MIB = 2**20


def run(*blocks):
    trace = record_call(torch.relu, (torch.ones(2),))
    events = [event for event in trace.events if event.kind == "op"] * (1 + max(begin for _, begin, _ in blocks))
    rows = tuple(Block(None, round(size * MIB), "temporary", "", "", begin, end) for size, begin, end in blocks)
    return MemoryTimeline("cuda:0", 512, rows, Counter(), replace(trace, events=events))


CASES = {
    # Blocks of 10 MiB and more have a segment each, a multiple of 2 MiB; smaller ones share 20 MiB. A segment that
    # grows has pages of 20 MiB.
    "segments": ([(30.5, 0, None), (9, 1, None), (9, 2, None)], 32 + 20, 60),
    "small": ([(0.5, 0, None), (0.5, 1, None), (1, 2, None), (1, 3, None)], 4, 4),
    # The freed 30 MiB are used for 20, and of the rest for 8; 40 MiB do not fit there.
    "split": ([(30, 0, 1), (20, 2, None), (8, 3, None), (40, 4, None)], 30 + 40, 80),
    # Freed neighbours are one range: only segments that grow have room for 40 MiB.
    "merged": ([(20, 0, 2), (20, 1, 2), (40, 3, None)], 80, 40),
    # A segment that grows uses the free memory at its end.
    "grown": ([(20, 0, None), (20, 1, 2), (40, 3, None)], 20 + 20 + 40, 60),
    # A hole before memory in use stays.
    "hole": ([(20, 0, 2), (20, 1, None), (40, 3, None)], 80, 80),
}


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_placed_by_best_fit(name):
    blocks, segments, expandable = CASES[name]
    timeline = run(*blocks)
    assert reserved_memory(timeline).peak == segments * MIB
    assert reserved_memory(timeline, expandable_segments=True).peak == expandable * MIB


@needs("plan and sharded memory")
def test_streams_have_memory_of_their_own():
    tokens = torch.ones(1, 64, dtype=torch.int64)
    model = build("llama_tiny", device="meta", hidden_size=512, intermediate_size=1024)
    planned = plan_rank(model, tokens, mesh={"fsdp": 2}, device="cuda", optimizer=torch.optim.AdamW)
    timeline = planned.memory()
    reserved = reserved_memory(timeline)
    assert set(reserved.by_stream) == {"", "all-gather", "reduce-scatter"}
    assert sum(reserved.by_stream.values()) >= reserved.peak > timeline.peak
    # Gradients are reduced to memory that no other stream frees.
    assert reserved.by_stream["reduce-scatter"] >= max(timeline.curve("gradient"))
