"""The memory of a rank of a plan: hand counts, what torch's allocator reserves, and what processes allocate."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fvflops import TrainingStepAnalysis, plan_rank, predict_memory, record_call
from fvflops.plan.memory.cuda_allocator import reserved_memory
from fvflops.plan.memory.storage_lifetimes import Block, MemoryTimeline
from fvflops.zoo import build
from tests.support.models.mixed_precision_adam import MixedPrecisionAdam
from tests.support.old_torch import needs
from tests.support.processes.rank_memory import compare_ranks

ITEM = 4  # bytes of a float
BATCH, WIDTH, LAYERS, RESULT = 3, 8, 4, 4
BLOCK = ITEM * (WIDTH * WIDTH + WIDTH)  # bytes of a linear layer
HEAD = ITEM * (WIDTH * RESULT + RESULT)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, RESULT)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return self.head(x)


def plan(mesh, **options):
    with torch.device("meta"):
        model = Stack()
    return plan_rank(model, (torch.ones(BATCH, WIDTH),), mesh=mesh, **options)


def first_op(timeline, phase):
    return next(at for at, event in enumerate(timeline.trace.events) if (event.kind, event.phase) == ("op", phase))


@pytest.mark.parametrize("ranks", [2, 4])
def test_fsdp_holds_its_shards_and_gathers_one_block_at_a_time(ranks):
    timeline = plan({"fsdp": ranks}).memory()
    assert timeline.at(-1).by_kind["parameter"] == (LAYERS * BLOCK + HEAD) // ranks
    # When the next block is gathered: the root's parameters, which stay gathered, the buffer and the copy of the last
    # block, and this block's. The last block's copy is freed when its forward returns, and its buffer after the next
    # copy is made, in torch 2.15 before.
    forward = timeline.curve("communication")[: first_op(timeline, "backward")]
    assert max(forward) == HEAD + (2 if torch.__version__ >= "2.15" else 3) * BLOCK
    gradients = timeline.at(len(timeline.trace.events) - 1).by_kind["gradient"]
    assert gradients == (LAYERS * BLOCK + HEAD) // ranks


def test_tensor_parallelism_holds_its_shards():
    tokens = torch.ones(2, 16, dtype=torch.int64)
    planned = plan_rank(build("llama_tiny", device="meta"), (tokens,), mesh={"tp": 2}, optimizer=torch.optim.AdamW)
    timeline = planned.memory()
    counts = 4 * sum(1 for _ in build("llama_tiny", device="meta").parameters())  # of steps
    assert max(timeline.curve("parameter")) == planned.parameter_bytes
    assert max(timeline.curve("optimizer state")) == 2 * planned.parameter_bytes + counts
    # A collective waits, and is not another copy.
    assert {block.op for block in timeline.blocks}.isdisjoint(
        {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}
    )


def test_the_optimizer_updates_shards_on_an_emulated_device():
    tokens = torch.ones(2, 16, dtype=torch.int64)
    model = build("llama_tiny", device="meta")
    kinds = []
    for device in ("cpu", "cuda"):
        planned = plan_rank(model, (tokens,), mesh={"tp": 2}, optimizer=MixedPrecisionAdam, device=device)
        timeline = planned.memory(granularity=1)
        assert timeline.device == {"cpu": "cpu", "cuda": "cuda:0"}[device]
        kinds.append({kind: max(timeline.curve(kind)) for kind in ("parameter", "optimizer state")})
    # Of float parameters the copy is a view.
    nbytes = planned.parameter_bytes
    assert kinds[0] == kinds[1] == {"parameter": nbytes, "optimizer state": 2 * nbytes}


def test_context_parallel_recomputation_gathers_again():
    tokens = torch.ones(2, 16, dtype=torch.int64)
    model = build("llama_tiny", device="meta")
    planned = plan_rank(model, (tokens,), mesh={"cp": 2}, checkpoint=["layers.0"])
    phases = {phase: volume.calls for phase, volume in planned.communication().by_phase().items()}
    assert phases["recompute"] == 2 and phases["forward"] == 4  # keys and values, of two layers


def test_ddp_adds_buckets_as_large_as_the_gradients():
    planned = plan({"dp": 4})
    single = plan({"tp": 1}).memory()
    assert planned.memory().peak == single.peak + LAYERS * BLOCK + HEAD
    assert planned.estimated_memory == ("DDP buckets, as large as the gradients",)
    assert planned.memory().at_peak().by_module["layers.0"] == single.at_peak().by_module["layers.0"] + BLOCK


def test_the_buckets_of_a_ddp_model_are_communication_buffers():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(Stack())
        step = TrainingStepAnalysis(model, torch.ones(BATCH, WIDTH), loss=torch.sum)
        kinds = predict_memory(step).at_peak().by_kind
    finally:
        dist.destroy_process_group()
    assert kinds["communication"] == kinds["parameter"] == LAYERS * BLOCK + HEAD


def test_estimated_accumulation_is_that_of_recorded_microbatches():
    tokens = torch.ones(2, 64, dtype=torch.int64)
    model = build("llama_tiny", device="meta")
    options = {"loss": torch.sum, "optimizer": torch.optim.AdamW}
    planned = plan_rank(model, (tokens,), mesh={"tp": 1}, microbatches=2, **options).memory()
    recorded = predict_memory(TrainingStepAnalysis(model, tokens, micro_batches=2, **options))
    assert planned.peak == pytest.approx(recorded.peak, rel=0.01)
    assert planned.by_phase()["optimizer"] == recorded.by_phase()["optimizer"]


def test_a_plan_of_one_rank_is_a_step():
    x = torch.ones(BATCH, WIDTH)
    with torch.device("meta"):
        model = Stack()
    step = TrainingStepAnalysis(model, x, loss=torch.sum, optimizer=torch.optim.AdamW)
    planned = plan({"tp": 1}, optimizer=torch.optim.AdamW, loss=torch.sum)
    assert planned.memory().peak == predict_memory(step).peak
    assert planned.memory(first_step=True).peak == predict_memory(step, first_step=True).peak


def test_processes_allocate_what_is_predicted():
    cases = [({"fsdp": 2}, "AdamW"), ({"tp": 2}, "AdamW")]
    for case, ranks in zip([*cases, "mixed precision"], compare_ranks(2, cases), strict=True):
        for steps in ranks:
            for predicted, measured in steps:
                assert predicted == pytest.approx(measured, rel=0.05), (case, ranks)


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
