"""One of several processes that train by gloo with a distributed optimizer: torch's, and a small one of its own."""

from collections.abc import Callable, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import DTensor

from fvflops import record
from fvflops.plan.sharding.tensor_parallel import find_sharding, shard
from fvflops.zoo import build
from fvflops.zoo.llama import Llama, LlamaConfig
from tests.support.measured_memory import measure_steps
from tests.support.processes.memory_worker import wait_for_workers
from tests.support.processes.rank_worker import keep_stage

SIZES = {"vocab_size": 250, "layers": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}
TOKENS = torch.arange(32).reshape(2, 16) * 7 % 250
LLAMA = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, layers=2, heads=4, kv_heads=2)
ADAMW = partial(torch.optim.AdamW, fused=True)  # without temporary scalars


class Odd(nn.Module):
    """Two linear layers of 6 * 5 + 5 and 5 * 3 + 3 parameters, which no number of ranks divides."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.second(self.first(x).relu())


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and the settings of a plan."""

    make: Callable[[], nn.Module]
    inputs: tuple[torch.Tensor, ...]
    mesh: Mapping[str, int] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    gradients: str | None = None
    masters: bool = False
    sequence: bool = False
    microbatches: int = 2

    def build(self):
        torch.manual_seed(0)
        return self.make().to(self.dtype)


def make_gpt(**changes):
    return build("megatron_gpt_tiny", **{**SIZES, **changes})


def make_llama():
    return Llama(LLAMA)


GPT = (make_gpt, (TOKENS, TOKENS))
BF16 = {"dtype": torch.bfloat16, "masters": True}
# Name → the case; without a mesh all ranks are replicas.
CASES = {
    "float32": Case(partial(make_gpt, layers=6), GPT[1]),
    "bfloat16 gradients": Case(*GPT, **BF16),
    "float32 gradients": Case(*GPT, **BF16, gradients="fp32"),
    "few layers": Case(*GPT),
    "uneven": Case(Odd, (torch.ones(4, 6),), microbatches=1),
    "uneven, master weights": Case(Odd, (torch.ones(4, 6, dtype=torch.bfloat16),), **BF16, gradients="fp32"),
    "tp": Case(make_llama, (TOKENS % 64,), {"dp": 2, "tp": 2}, **BF16, gradients="fp32"),
    "tp sequence": Case(make_llama, (TOKENS % 64,), {"dp": 2, "tp": 2}, **BF16, sequence=True),
    "pp": Case(make_llama, (TOKENS % 64,), {"pp": 2, "dp": 2}, **BF16, gradients="fp32"),
}
# Those whose whole step is measured: the CPU's kernels for bfloat16 take memory of their own.
WHOLE = ("own, float32", "own, few layers", "torch, few layers")


def cases_of(ranks):
    """Return the cases of the own optimizer, and of torch's, with some processes."""
    own = {name: case for name, case in CASES.items() if not case.mesh or ranks == 4}
    return own, {name: CASES[name] for name in ("few layers", "uneven")}


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class OwnOptimizer:
    """AdamW of one part of a buffer of all parameters, whose gradients a buffer accumulates and ranks reduce-scatter.

    With `masters` it updates float32 copies, whose gradients it clips by the norm of all ranks' parts.
    """

    def __init__(self, model, group, *, gradients=None, masters=False):
        self.group, self.ranks, self.masters = group, group.size(), masters
        views = [local(parameter.detach()) for parameter in model.parameters()]
        total = sum(view.numel() for view in views)
        padded = -(-total // self.ranks) * self.ranks
        dtype = torch.float32 if gradients == "fp32" else views[0].dtype
        self.flat, self.gradients = torch.zeros(padded, dtype=views[0].dtype), torch.zeros(padded, dtype=dtype)
        self.partial = {}
        self.offset = 0
        replaced = {id(parameter): self.move(parameter) for parameter in model.parameters()}
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    setattr(module, name, replaced[id(parameter)])
        self.part, self.gradient = (buffer.chunk(self.ranks)[group.rank()] for buffer in (self.flat, self.gradients))
        self.copy = self.inner = None

    def move(self, parameter):
        """Return a parameter with its elements in the buffer, whose gradient is added to the buffer of gradients."""
        view = local(parameter.detach())
        chunk = slice(self.offset, self.offset + view.numel())
        self.offset = chunk.stop
        moved = self.flat[chunk].view(view.shape).copy_(view)
        if isinstance(parameter, DTensor):
            moved = DTensor.from_local(moved, parameter.device_mesh, parameter.placements, run_check=False)
        moved = nn.Parameter(moved)
        moved.register_post_accumulate_grad_hook(partial(self.add, self.gradients[chunk].view(view.shape)))
        return moved

    @torch.no_grad()
    def add(self, target, parameter):
        gradient, parameter.grad = parameter.grad, None
        if local(gradient).shape != target.shape:  # whole, as of an embedding with sequence parallelism
            gradient = gradient.redistribute(placements=parameter.placements)
        target += local(gradient)
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:
            self.partial[target] = gradient.device_mesh.get_group()

    def reduce(self):
        self.gradients *= 1 / self.ranks
        dist.reduce_scatter_tensor(self.gradient, self.gradients, group=self.group)

    @torch.no_grad()
    def step(self):
        for target, group in self.partial.items():
            dist.all_reduce(target, group=group)
        if self.inner is None:
            self.copy = self.part.float() if self.masters else self.part.view(-1)
            self.inner = ADAMW([self.copy])
        self.copy.grad = self.gradient.float() if self.masters else self.gradient
        if self.masters:
            self.clip()
        self.inner.step()
        if self.masters:
            self.part.copy_(self.copy)
        self.copy.grad = None
        self.gradients.zero_()

    def clip(self):
        squared = nn.utils.get_total_norm([self.copy.grad], foreach=True).square()
        dist.all_reduce(squared, group=self.group)
        nn.utils.clip_grads_with_norm_([self.copy], 1.0, squared.sqrt(), foreach=True)

    def held(self):
        """Return kind of memory → bytes between two steps."""
        state = {id(self.copy): self.copy} if self.masters else {}
        state |= {id(value): value for value in self.inner.state[self.copy].values()}
        nbytes = sum(value.nbytes for value in state.values())
        return {"parameter": self.flat.nbytes, "gradient": self.gradients.nbytes, "optimizer state": nbytes}

    def gather(self):
        dist.all_gather_into_tensor(self.flat, self.part, group=self.group)


def make_pipeline_pass(case, mesh):
    """Return this rank's stage, and what trains it with all microbatches."""
    model, stage = case.build(), mesh.get_local_rank("pp")
    keep_stage(model, stage, (1, 1))
    place = PipelineStage(model, stage, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = ScheduleGPipe(place, case.microbatches, loss_fn=lambda result, _: result.sum(), scale_grads=False)
    tokens = case.inputs[0].repeat(case.microbatches, 1)
    return model, lambda: schedule.step(*([tokens] if stage == 0 else []), target=tokens, losses=[])


def make_pass(case, mesh):
    """Return the model of this rank, and what runs its passes."""
    if "pp" in case.mesh:
        return make_pipeline_pass(case, mesh)
    model = case.build()
    if "tp" in case.mesh:
        shard(model, mesh["tp"], find_sharding(model, sequence=case.sequence))

    def run():
        for _ in range(case.microbatches):
            model(*case.inputs).sum().backward()

    return model, run


def make_own_step(case):
    """Return the function to call before the optimizer's step, and the optimizer."""
    axes = case.mesh or {"dp": dist.get_world_size()}
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    model, run = make_pass(case, mesh)
    optimizer = OwnOptimizer(model, mesh.get_group("dp"), gradients=case.gradients, masters=case.masters)

    def passes():
        optimizer.gather()
        run()
        optimizer.reduce()

    return passes, optimizer


class TorchOptimizer(ZeroRedundancyOptimizer):
    """torch's own, of a model that DistributedDataParallel wraps."""

    def __init__(self, model):
        super().__init__(model.parameters(), ADAMW)
        self.parameters = list(model.parameters())

    def held(self):
        """Return kind of memory → bytes between two steps."""
        nbytes = sum(value.nbytes for state in self.optim.state.values() for value in state.values())
        size = sum(parameter.nbytes for parameter in self.parameters)
        return {"parameter": size, "gradient": size, "communication": size, "optimizer state": nbytes}


def make_torch_step(case):
    model = case.build()
    # Otherwise the second step makes new buckets, beside the old.
    wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = TorchOptimizer(model)

    def passes():
        optimizer.zero_grad()
        for index in range(case.microbatches):
            wrapped.require_backward_grad_sync = index == case.microbatches - 1
            wrapped(*case.inputs).sum().backward()

    return passes, optimizer


@contextmanager
def without_collectives():
    """Let the collectives of OwnOptimizer do nothing: gloo copies what it sends."""
    names = ("reduce_scatter_tensor", "all_gather_into_tensor")
    originals = [getattr(dist, name) for name in names]
    try:
        for name in names:
            setattr(dist, name, lambda *_, **options: None)
        yield
    finally:
        for name, original in zip(names, originals, strict=True):
            setattr(dist, name, original)


def describe(make_step, case, *, is_whole):
    """Return a step's Trace, what is held between steps, and the most bytes that the first two steps allocate.

    The last are of the optimizer alone, and if `is_whole` of whole steps too, without gloo's copies.
    """
    passes, optimizer = make_step(case)
    of_optimizer = []
    for _ in range(2):
        passes()
        of_optimizer += measure_steps(optimizer.step)
    held = optimizer.held()
    with record(table="exact", warn=False) as run:
        passes()
        optimizer.step()
    found = {"trace": run.trace().to_json(), "held": held, "optimizer": of_optimizer}
    if is_whole:
        del passes, optimizer
        passes, optimizer = make_step(case)
        with without_collectives():
            found["step"] = measure_steps(lambda: (passes(), optimizer.step()), 2)
    return found


def follow(make_step, case, *, is_whole):
    """Run the steps that `describe` runs, whose collectives need all ranks."""
    for context, steps in ((nullcontext(), 3), (without_collectives(), 2))[: 1 + is_whole]:
        passes, optimizer = make_step(case)
        with context:
            for _ in range(steps):
                passes()
                optimizer.step()


def main(rank, cases):
    wait_for_workers()
    ranks = dist.get_world_size()
    run = describe if rank in (0, ranks - 1) else follow
    found = {}
    for name in (name for number, name in cases if number == ranks):
        whose, _, case = name.partition(", ")
        make_step = make_own_step if whose == "own" else make_torch_step
        found[name] = run(make_step, CASES[case], is_whole=name in WHOLE)
    return found
