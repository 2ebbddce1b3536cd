"""The work of one of four processes that talk by gloo: training steps in each layout, by torch's own classes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules

from fvflops import record
from fvflops.plan.parallel_axes import dense_axes
from fvflops.plan.pipeline_schedules import SCHEDULES, stages_of_rank
from fvflops.plan.pipeline_stages import divide_layers
from fvflops.plan.sharding.expert_parallel import divide as divide_experts
from fvflops.plan.sharding.expert_parallel import make_expert_mesh, shard_experts_fully, without_experts
from fvflops.plan.sharding.fully_sharded import find_blocks
from fvflops.plan.sharding.tensor_parallel import find_sharding, shard
from fvflops.zoo.llama import Llama, LlamaConfig
from tests.support.processes.rank_worker import keep_stage

RANKS = 4
COMPARED = (0, RANKS - 1)  # with plans
BATCH, LENGTH, LAYERS = 2, 16, 4
TOKENS = torch.ones(BATCH, LENGTH, dtype=torch.int64)  # of a microbatch
CONFIG = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, layers=LAYERS, heads=4, kv_heads=2)

# Name → the mesh (a smaller one than all ranks is there several times) and the options of plan_rank.
CASES = {
    "accumulation": ({"fsdp": 2}, {"microbatches": 3}),
    "accumulation, one reduction": ({"fsdp": 2}, {"microbatches": 3, "reduce_each_microbatch": False}),
    "gathered once": ({"fsdp": 2}, {"microbatches": 2, "reshard_after_forward": False}),
    "hybrid": ({"dp": 2, "fsdp": 2}, {"microbatches": 2}),
    "stages": ({"pp": 2, "fsdp": 2}, {"microbatches": 4}),
    "stages, gathered again": ({"pp": 2, "fsdp": 2}, {"microbatches": 3, "reshard_after_forward": True}),
    "stages, mixed precision": (
        {"pp": 2, "fsdp": 2},
        {"microbatches": 2, "precision": "bf16-mixed", "schedule": "gpipe"},
    ),
    "sequence parallel stages": ({"pp": 2, "tp": 2}, {"microbatches": 2, "sequence_parallel": True}),
    "four stages": ({"pp": 4}, {"microbatches": 5, "stage_layers": [1, 1, 1, 1]}),
    "interleaved": ({"pp": 2, "fsdp": 2}, {"microbatches": 4, "schedule": "interleaved"}),
    "interleaved sequences": ({"pp": 2, "tp": 2}, {"microbatches": 2, "sequence_parallel": True, "stages_per_rank": 2}),
    "zero bubble": ({"pp": 2, "fsdp": 2}, {"microbatches": 4, "schedule": "zero-bubble"}),
    "zero bubble in a V": ({"pp": 2, "fsdp": 2}, {"microbatches": 4, "schedule": "zbv"}),
    "dual pipe": ({"pp": 2}, {"microbatches": 4, "schedule": "dualpipev"}),
}


@dataclass(frozen=True, slots=True)
class Family:
    """Models of one class: how one is built, its number of layers, and how it is reduced to a stage."""

    build: Callable[[], nn.Module]
    layers: int
    keep_stage: Callable[[nn.Module, int, Sequence[int]], None] = keep_stage


LLAMA = Family(lambda: Llama(CONFIG), LAYERS)


def make_mesh(mesh):
    """Return torch's mesh of the axes except the experts'; process groups are made once."""
    dense = dense_axes(mesh)
    copies = RANKS // torch.Size(dense.values()).numel()
    return connect((copies, *dense.values()), ("copy", *dense))


@cache
def connect(sizes, axes):
    return init_device_mesh("cpu", sizes, mesh_dim_names=axes)


def divide(model, mesh, device_mesh, options):
    experts = None
    if "tp" in mesh:
        sharding = find_sharding(model, sequence=options.get("sequence_parallel", False))
        shard(model, device_mesh["tp"], without_experts(model, sharding, mesh))
    if "ep" in mesh:
        each = RANKS // mesh.get("pp", 1)
        for first in range(0, RANKS, each):  # a process group is made by all ranks
            if first <= dist.get_rank() < first + each:
                experts = divide_experts(model, device_mesh, mesh, rank=dist.get_rank())
            else:
                make_expert_mesh(mesh, first)
    if "fsdp" in mesh:
        axes = ("dp", "fsdp") if "dp" in mesh else ("fsdp",)
        policy = MixedPrecisionPolicy()
        if options.get("precision") == "bf16-mixed":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        again = options.get("reshard_after_forward", "pp" not in mesh)
        if experts is not None:
            shard_experts_fully(experts, reshard_after_forward=again)
        for block in (block for block in find_blocks(model) if not isinstance(block, nn.Identity)):  # of another stage
            fully_shard(block, mesh=device_mesh[axes], reshard_after_forward=again, mp_policy=policy)
        fully_shard(model, mesh=device_mesh[axes], reshard_after_forward=None if again else False, mp_policy=policy)
    return model


def make_step(family, mesh, options):
    device_mesh = make_mesh(mesh)
    microbatches = options.get("microbatches", 1)
    torch.manual_seed(0)
    if "pp" in mesh:
        return make_pipeline_step(family, mesh, device_mesh, options, microbatches)
    model = family.build()
    family.keep_stage(model, 0, (family.layers,))
    divide(model, mesh, device_mesh, options)

    def step():
        model.zero_grad()
        for index in range(microbatches):
            if not options.get("reduce_each_microbatch", True):
                model.set_requires_gradient_sync(index == microbatches - 1)
            model(TOKENS).sum().backward()

    return step


def make_pipeline_step(family, mesh, device_mesh, options, microbatches):
    name = options.get("schedule", "interleaved" if "stages_per_rank" in options else "1f1b")
    per_rank = SCHEDULES[name].stages_per_rank or 2
    count, rank = mesh["pp"] * per_rank, device_mesh.get_local_rank("pp")
    modules, stages = [], []
    for index in stages_of_rank(name, rank, mesh["pp"], per_rank):
        model = family.build()
        family.keep_stage(model, index, options.get("stage_layers") or divide_layers(family.layers, count))
        modules.append(divide(model, mesh, device_mesh, options))
        stages.append(PipelineStage(modules[-1], index, count, torch.device("cpu"), group=device_mesh.get_group("pp")))
    schedule = getattr(schedules, SCHEDULES[name].torch_class)(
        stages if SCHEDULES[name].stages_per_rank != 1 else stages[0],
        microbatches,
        loss_fn=lambda result, _: result.sum(),
        scale_grads=False,
    )
    tokens = TOKENS.repeat(microbatches, 1)
    # A part of the sequence does not show the length of the whole.
    keywords = {"length": LENGTH} if options.get("sequence_parallel") else {}

    def step():
        for model in modules:
            model.zero_grad()
        if any(stage.is_first for stage in stages):
            schedule.step(tokens, target=tokens, losses=[], **keywords)
        else:
            schedule.step(target=tokens, losses=[], **keywords)

    return step


def record_step(family, mesh, options):
    """Return the Trace of a training step, None on ranks that no plan is compared with."""
    step = make_step(family, mesh, options)
    step()  # finds out shapes, and warms up
    if dist.get_rank() not in COMPARED:
        step()
        return None
    with record(table="exact", warn=False) as run:
        step()
    return run.trace()


def main(rank, names):
    traces = {name: record_step(LLAMA, *CASES[name]) for name in names}
    return {name: trace.to_json() for name, trace in traces.items() if trace is not None}
