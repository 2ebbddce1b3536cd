"""DistributedDataParallel's buckets: when they are reduced, by arithmetic, and their gradients, by torch's own DDP."""

import dataclasses
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fvflops import Efficiency, estimate_step, plan_step
from fvflops.devices.devices import Device
from fvflops.plan.communication import collective_of
from fvflops.plan.step_time.buckets import overlap_buckets
from fvflops.plan.step_time.calibration import PEAK, KernelTimer, Link, Network
from fvflops.plan.step_time.pass_program import Collective, Run, Wait
from fvflops.plan.step_time.step_program import read_step
from fvflops.zoo import build, llama

TOKENS = torch.ones(2, 16, dtype=torch.int64)
SMALL = 0.02  # MiB of a bucket: several in a tiny model
LAYERS, WIDTH, BATCH = 9, 64, 16
# A product of a layer takes 1 s, and other kernels no time.
DEVICE = Device("unit", matrix={"fp32": 2.0 * BATCH * WIDTH**2}, bandwidth=1e30)


def network(seconds):
    """Return a network in which an all-reduce of a layer's gradient by two ranks takes some time."""
    link = Link(4 * WIDTH**2 / seconds, 0.0)
    return Network(name="unit", gpus_per_node=8, inside=link, between=link)


def chain():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))


@pytest.fixture(scope="module")
def chained():
    """A chain of equal layers, of which a plan records four."""
    return plan_step(chain(), torch.ones(BATCH, WIDTH), mesh={"dp": 2}, microbatches=2)


def seconds(step, reduction, bucket_cap_mb=0.01):
    timer = KernelTimer(DEVICE, PEAK)
    return read_step(step.ranks, bucket_cap_mb=bucket_cap_mb).simulate(timer, network(reduction)).seconds


# Two microbatches; the first layer has no gradient of its input.
KERNELS = 2 * (LAYERS + 2 * LAYERS - 1)
# The last layer's gradient is ready after its two products in the second backward pass.
FIRST_READY = KERNELS - (2 * LAYERS - 1) + 2


def test_buckets_that_are_faster_than_layers_expose_the_last_one(chained):
    for reduction in (0.25, 1.0):  # the last bucket is ready 1 s after the one before it
        assert seconds(chained, reduction) == pytest.approx(KERNELS + reduction)


def test_on_a_slow_network_buckets_follow_each_other_from_the_first_one(chained):
    for reduction in (2.0, 5.0):
        assert seconds(chained, reduction) == pytest.approx(FIRST_READY + LAYERS * reduction)


def test_two_layers_in_a_bucket(chained):
    # 16 KiB a layer: four buckets of two layers, and the first layer alone.
    assert seconds(chained, 0.5, bucket_cap_mb=0.03) == pytest.approx(KERNELS + 0.5)
    assert seconds(chained, 4.0, bucket_cap_mb=0.03) == pytest.approx(FIRST_READY + 2 + LAYERS * 4.0)


def test_without_overlap_all_gradients_are_reduced_at_the_end(chained):
    for cap in (0, 1000, None):  # by default the first bucket has 1 MiB, more than all layers
        assert seconds(chained, 3.0, bucket_cap_mb=cap) == pytest.approx(KERNELS + LAYERS * 3.0)
    program = read_step(chained.ranks, bucket_cap_mb=0)
    kinds = {action.kind: program.programs[index] for action, index in program.ranks[0]}
    assert not any(isinstance(item, Collective) for item in kinds["backward"].items)
    assert [type(item) for item in kinds["allreduce"].items] == [Run, Collective, Wait]


LAYOUTS = {
    "replicas": ("llama_tiny", {"dp": 4}, {"microbatches": 3}),
    "tensor parallel": ("llama_tiny", {"dp": 2, "tp": 2}, {"checkpoint": "full"}),
    "context parallel": ("llama_tiny", {"dp": 2, "cp": 2}, {}),
    "pipeline": ("llama_tiny", {"pp": 2, "dp": 2}, {"microbatches": 4}),
    "stages": (8, {"pp": 2, "dp": 2}, {"microbatches": 4, "schedule": "interleaved", "stages_per_rank": 2}),
    "zero bubble": (8, {"pp": 2, "dp": 2}, {"microbatches": 4, "schedule": "zbv", "stages_per_rank": 2}),
    "experts": ("mixtral_tiny", {"dp": 4, "ep": 2}, {"microbatches": 2}),
}


def make(name):
    if isinstance(name, str):
        return build(name, device="meta")
    with torch.device("meta"):
        return llama.Llama(dataclasses.replace(llama.CONFIGS["llama_tiny"], layers=name))


@pytest.fixture(scope="module", params=LAYOUTS)
def step(request):
    name, mesh, options = LAYOUTS[request.param]
    return plan_step(make(name), TOKENS, mesh=mesh, optimizer=torch.optim.AdamW, **options)


def reductions_of(program):
    collectives = [item for item in program.items if isinstance(item, Collective)]
    return [item for item in collectives if item.call.group.axis.startswith(("dp", "edp"))]


def test_buckets_are_the_plans_reductions_and_follow_the_last_backward_pass_of_each_stage(step):
    program = read_step(step.ranks, bucket_cap_mb=SMALL)
    for plan, actions in zip(step.ranks, program.ranks, strict=True):
        planned, divided = Counter(), Counter()
        for signature, _, times in plan.step.added():
            call = collective_of(signature)
            if call is not None and call.group.axis.startswith(("dp", "edp")):
                planned[str(call.group)] += times * call.payload
        last = {action.stage: action for action, _ in actions if action.kind in ("backward", "weight_backward")}
        for action, index in actions:
            reductions = reductions_of(program.programs[index])
            assert bool(reductions) == (action in last.values()), action
            for item in reductions:
                divided[str(item.call.group)] += item.call.payload
            waits = [item.number for item in program.programs[index].items if isinstance(item, Wait)]
            assert waits[len(waits) - len(reductions) :] == [item.number for item in reductions]
            if reductions:
                assert len(reductions) > len({item.call.group for item in reductions})
        assert divided == planned and planned


def test_overlap_takes_at_most_the_time_without_it_and_at_least_that_of_kernels_and_of_buckets(step):
    """On a network without latency, where more buckets take no longer."""
    efficiency = Efficiency(matmul=0.5, bandwidth=0.5)
    for bandwidth in (1e9, 1e10, 1e11):
        links = Link(bandwidth, 0.0)
        options = {
            "device": "H100",
            "efficiency": efficiency,
            "network": Network(name="", gpus_per_node=8, inside=links, between=links),
        }
        after, beside = (estimate_step(step, bucket_cap_mb=cap, **options) for cap in (0, SMALL))
        assert max(beside.kernels, *beside.communication.values()) < beside.seconds
        if len(step.ranks) == 1:  # a stage sends to the one before it when its buckets are reduced
            assert beside.seconds < after.seconds
        assert beside.kernels == pytest.approx(after.kernels)
        assert beside.communication == pytest.approx(after.communication)


def test_fused_modules_stay_one_kernel():
    step = plan_step(build("llama_tiny", device="meta"), TOKENS, mesh={"dp": 2})
    plain, beside = (
        read_step(step.ranks, fused=["fvflops.zoo.llama.RMSNorm"], bucket_cap_mb=cap) for cap in (0, SMALL)
    )

    def launched(program):
        return Counter(
            part.launches[index]
            for part in program.programs
            for item in part.items
            if isinstance(item, Run)
            for index in item.items
        )

    assert launched(plain) == launched(beside)


class Unordered(nn.Module):
    """Layers that are called in another order than their parameters', one of them twice."""

    def __init__(self):
        super().__init__()
        self.last, self.first, self.twice = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x):
        return self.last(self.twice(self.norm(self.twice(self.first(x)))))


class Tied(nn.Module):
    """Logits by the weight of the embedding, whose gradient is ready last."""

    def __init__(self):
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(256, 32), nn.Linear(32, 32)
        self.head = nn.Linear(32, 256, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.hidden(self.embedding(tokens)))


MODELS = {
    "chain": (chain, torch.ones(4, WIDTH)),
    "wide": (lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), torch.ones(4, 512)),
    "unordered": (Unordered, torch.ones(4, 32)),
    "llama": (lambda: build("llama_tiny"), TOKENS),
    "tied": (Tied, TOKENS),
}


def buckets_of_ddp(model, inputs, bucket_cap_mb):
    """Return the parameters' names in each bucket of torch's DDP, in a group of one process.

    Buckets do not depend on the number of replicas. The first step has one bucket.
    """
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb)
        buckets = []

        def keep(state, bucket):
            buckets.append([names[id(parameter)] for parameter in bucket.parameters()])
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        wrapped.register_comm_hook(None, keep)
        for _ in range(2):
            buckets.clear()
            wrapped(inputs).sum().backward()
        return buckets
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("bucket_cap_mb", [None, 0.02, 0.2])
@pytest.mark.parametrize("name", MODELS)
def test_buckets_are_those_of_ddp(name, bucket_cap_mb):
    make_model, inputs = MODELS[name]
    torch.manual_seed(0)
    (plan,) = plan_step(make_model(), inputs, mesh={"dp": 2}).ranks
    passes = {action.kind: plan.step.pass_of(action) for action in plan.step.actions}
    gradients = passes["allreduce"].gradients
    calls = overlap_buckets(passes["backward"], "allreduce", gradients, bucket_cap_mb)
    in_order = (collective_of(signature) for events in sorted(calls) for signature, _, _ in calls[events])
    sizes = {gradient.parameter: gradient.spec.nbytes for gradient in gradients}
    buckets = buckets_of_ddp(make_model(), inputs, bucket_cap_mb)
    assert [call.payload for call in in_order if call] == [sum(map(sizes.get, bucket)) for bucket in buckets]


@pytest.mark.parametrize("cap", [-1, float("nan"), True, "25"])
def test_a_size_that_buckets_cannot_have(chained, cap):
    with pytest.raises(ValueError, match=r"bucket_cap_mb is the MiB of a bucket of gradients, .*; got "):
        estimate_step(chained, device=DEVICE, efficiency=PEAK, network=network(1.0), bucket_cap_mb=cap)


def test_the_report_says_when_gradients_are_reduced(chained):
    for cap, text in ((None, "25 MiB (the first: 1 MiB) during"), (0.5, "0.5 MiB during"), (0, "after the backward")):
        estimate = estimate_step(chained, device=DEVICE, efficiency=PEAK, network=network(1.0), bucket_cap_mb=cap)
        assert any("DDP reduces" in line and text in line for line in estimate.assumptions)
