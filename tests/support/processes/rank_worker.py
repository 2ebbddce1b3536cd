"""The work of one of two processes that talk by gloo: each way of sharing a model, recorded twice, and gathered."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from fvflops import load_table, record_call
from fvflops.plan.rank_model import ShardedSequence
from fvflops.plan.sharding.tensor_parallel import find_sharding, shard
from fvflops.plan.trace_changes import gather
from fvflops.zoo import build

RANKS = 2
MICROBATCHES = 2
TOKENS = torch.ones(2, 16, dtype=torch.int64)
FEATURES = torch.ones(4, 6)


class Normalised(nn.Module):
    """Two linear layers around a norm that has buffers: 6 * 5 + 5, 5 + 5, and 5 * 3 parameters."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 3, bias=False)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Wide(nn.Module):
    """A linear layer whose weight is too large to keep its numbers in a run by shapes, should they be known."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 200_000, bias=False), nn.ReLU(), nn.Linear(200_000, 2)])

    forward = Normalised.forward


def replicate(model):
    # record_call looks into what DistributedDataParallel wraps: a function keeps it.
    wrapped = nn.parallel.DistributedDataParallel(model)
    return lambda x: wrapped(x)


def shard_fully(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # FSDP2's own choice would be a GPU, where there is one
    for block in model.layers:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def split(model, sequence=False):
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    shard(model, mesh, find_sharding(model, sequence=sequence))
    return model


def share_sequence(model):
    wrapped = nn.parallel.DistributedDataParallel(model)

    def run(tokens):
        with ShardedSequence(dist.group.WORLD):
            return wrapped(tokens)

    return run


def keep_stage(model, stage, counts):
    """Reduce a Llama, in place, to one of its stages."""
    start = sum(counts[:stage])
    model.layers = model.layers[start : start + counts[stage]]
    for name in (*(["embed_tokens"] if stage > 0 else []), *(["norm", "lm_head"] if stage < len(counts) - 1 else [])):
        setattr(model, name, nn.Identity())


def run_stage(model):
    """Return a function that runs two microbatches through this rank's half of a model."""
    stage = dist.get_rank()
    keep_stage(model, stage, (1, 1))
    hidden = torch.empty(1, 16, 64, requires_grad=True)
    place = PipelineStage(
        model,
        stage,
        RANKS,
        torch.device("cpu"),
        input_args=TOKENS[:1] if stage == 0 else hidden,
        output_args=torch.empty(1, 16, 256) if stage else hidden,
    )
    schedule = ScheduleGPipe(place, MICROBATCHES, loss_fn=lambda result, _: result.sum(), scale_grads=False)

    def step(tokens):
        model.zero_grad()
        if stage == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=tokens, losses=[])
        return torch.zeros((), requires_grad=True)  # the schedule has gone back already

    return step


# What is run → (the model, how the ranks share it, what goes in).
CASES = {
    "dp": (lambda: build("llama_tiny"), replicate, TOKENS),
    "dp buffers": (Normalised, replicate, FEATURES),
    "fsdp": (lambda: build("llama_tiny"), shard_fully, TOKENS),
    "fsdp uneven": (Normalised, shard_fully, FEATURES),
    "fsdp wide": (Wide, shard_fully, FEATURES),
    "tp": (lambda: build("llama_tiny"), split, TOKENS),
    "tp sequence": (lambda: build("llama_tiny"), lambda model: split(model, sequence=True), TOKENS),
    "cp": (lambda: build("llama_tiny"), share_sequence, TOKENS),
    "pp": (lambda: build("llama_tiny"), run_stage, TOKENS),
}


def record(model, inputs, execution="real"):
    return record_call(
        model,
        (inputs,),
        loss=lambda result: result.sum() if result.ndim else result,
        execution=execution,
        stops_at=load_table("exact").stops_at,
    )


def train(model, inputs):
    result = model(inputs)
    result.sum().backward()
    model.zero_grad()  # what is there already would be added to
    return result


def main(rank):
    found = {}
    for name, (make, share, inputs) in CASES.items():
        torch.manual_seed(0)
        model = share(make())
        steps = [gather(record(model, inputs)) for _ in range(2)]
        texts = [{rank: trace.to_json() for rank, trace in step.traces.items()} for step in steps]
        if not name.startswith(("dp", "cp", "pp")):  # what DistributedDataParallel does in C++ needs numbers
            before = train(model, inputs)
            alone = gather(record(model, inputs, "shapes"), dst=0)
            assert (alone is None) == (rank != 0)
            assert torch.equal(train(model, inputs), before), name
            texts.append({rank: trace.to_json() for rank, trace in alone.traces.items()} if rank == 0 else {})
        found[name] = texts
    return found if rank == 0 else None
