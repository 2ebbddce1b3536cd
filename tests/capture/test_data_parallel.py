"""Steps by shapes of models that are wrapped for data parallelism, or whose weights are elsewhere, and what is left."""

import logging
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from fvflops import FlopCountAnalysis, TrainingStepAnalysis, record
from fvflops.capture.run import ExecutionError
from tests.support.models.parts import Applied
from tests.support.old_torch import VERSION
from tests.support.processes.data_parallel_worker import RANKS
from tests.support.processes.start import run_ranks

X = torch.ones(5, 6)
MACS = 5 * (6 * 8 + 8 * 4)  # of `net` in its forward


@pytest.fixture(scope="module", autouse=True)
def alone():
    """A group of one process, in which each wrapper synchronises with itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        dist.destroy_process_group()


def net(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Linear(width, 4))


def compressed():
    model = DistributedDataParallel(net())
    model.register_comm_hook(None, fp16_compress_hook)
    return model


def sharded():
    model = net()
    mesh = init_device_mesh("cpu", (1,))  # FSDP2's own choice would be a GPU, where there is one
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


WRAPPED = {
    "DDP": lambda: DistributedDataParallel(net()),
    "DDP, static graph": lambda: DistributedDataParallel(net(), static_graph=True),
    "DDP, unused parameters": lambda: DistributedDataParallel(net(), find_unused_parameters=True),
    "DDP, bucket views": lambda: DistributedDataParallel(net(), gradient_as_bucket_view=True),
    "DDP, a hook of its own": compressed,
    "DDP in a model": lambda: nn.Sequential(DistributedDataParallel(net())),
    "DataParallel": lambda: nn.DataParallel(net()),
    "FSDP": lambda: FullyShardedDataParallel(net(), device_id=torch.device("cpu")),
    "FSDP2": sharded,
    "replicate": lambda: replicate(net()),
}


def phases(run):
    return {phase: sum(counts.values()) for phase, counts in run.by_phase().items() if sum(counts.values())}


def step(model, optimizer):
    optimizer.zero_grad()
    model(X).sum().backward()
    optimizer.step()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapped_models_step_by_shapes_is_the_real_one(name):
    if name == "FSDP2" and VERSION < (2, 7):
        pytest.skip("FSDP2 of this torch asks a CPU for the streams of a GPU")
    model = WRAPPED[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    counted = TrainingStepAnalysis(model, X, loss=torch.sum, optimizer=optimizer, table="exact")
    by_shapes = phases(counted)
    with record(model, table="exact", execution="shapes") as run:
        step(model, optimizer)
    assert phases(run) == by_shapes
    with record(model, table="exact") as run:
        step(model, optimizer)
    assert phases(run) == by_shapes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("before", [0, 1, 2])
def test_buckets_too_large_to_be_computed_stay_real(before):
    def train(counted):
        torch.manual_seed(0)
        # More elements in a bucket than a shape run computes.
        model = DistributedDataParallel(nn.Sequential(nn.Linear(6, 1100), nn.Linear(1100, 1100), nn.Linear(1100, 4)))
        optimizer = torch.optim.SGD(model.parameters(), 1e-6)
        for number in range(before + 3):
            if counted and number == before:
                for _ in range(2):
                    TrainingStepAnalysis(model, X, loss=torch.sum, optimizer=optimizer).total()
            step(model, optimizer)
        return [*model.parameters(), *(parameter.grad for parameter in model.parameters())]

    assert all(map(torch.equal, train(True), train(False)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_replicated_model_trains_on_as_if_never_counted(before):
    def train(counted):
        model = replicate(net())
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for number in range(before + 3):
            if counted and number == before:
                for execution in ("shapes", "real"):
                    assert FlopCountAnalysis(model, X, execution=execution).macs() == MACS
                training = TrainingStepAnalysis(model, X, loss=torch.sum)
                assert [training.macs(phase=phase) for phase in ("forward", "backward")] == [MACS, 2 * MACS - 5 * 6 * 8]
                assert hasattr(replicate.state(model), "_ddp") == (before > 0)
            step(model, optimizer)
        return [*model.state_dict().values(), *(parameter.grad for parameter in model.parameters())]

    assert all(map(torch.equal, train(True), train(False)))


def test_a_group_of_one_communicates_with_nobody():
    def forward(self, x):
        sizes = [torch.empty(1, dtype=torch.int64)]
        dist.all_gather(sizes, torch.tensor([x.shape[0]]))
        return x.repeat(int(sizes[0]), 1) @ x.T

    for execution in ("shapes", "real"):
        assert FlopCountAnalysis(Applied(forward), X, execution=execution).macs() == (5 * 5) * 6 * 5


def test_one_rank_that_counts_leaves_the_others_in_step():
    run_ranks("data_parallel_worker", RANKS, timeout=120)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_an_offloaded_model_is_counted_as_the_model_that_it_is(kind, tmp_path):
    accelerate = pytest.importorskip("accelerate")
    device = torch.device("cpu")
    model = net().eval()
    expected = model(X)
    if kind == "cpu":
        accelerate.cpu_offload(model, execution_device=device)
    else:
        accelerate.disk_offload(model, str(tmp_path), execution_device=device)
    for execution in ("auto", "shapes", "real"):
        assert FlopCountAnalysis(model, X, execution=execution).macs() == MACS
    training = TrainingStepAnalysis(model, X, loss=torch.sum)
    assert [training.macs(phase=phase) for phase in ("forward", "backward")] == [MACS, 2 * MACS - 5 * 6 * 8]
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert torch.equal(model(X), expected)


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(10, 6, sparse=True, mode="sum")

    def forward(self, ids):
        return self.bag(ids)


REFUSED = {
    "a sparse gradient": (
        lambda: nn.Sequential(nn.Embedding(10, 6, sparse=True)),
        torch.tensor([[1, 2], [1, 3]]),
        torch.optim.SGD,
    ),
    "a sparse gradient of bags": (Bag, torch.tensor([[1, 2], [1, 3]]), torch.optim.SGD),
    "Adafactor": (net, X, torch.optim.Adafactor),
    "transformers' Adafactor": (net, X, None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_shapes_do_not_do_is_refused_with_what_to_do(name):
    make, x, maker = REFUSED[name]
    if maker is None:
        maker = pytest.importorskip("transformers.optimization").Adafactor
    model = make()
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(ExecutionError, match=r"cannot be run in shape execution.*a real step with fvflops\.record"):
        TrainingStepAnalysis(model, x, loss=torch.sum, optimizer=maker).total()
    optimizer = maker(model.parameters())
    with (
        pytest.raises(Exception, match=r'cannot be run in shape execution.*use execution="real"'),
        record(model, execution="shapes"),
    ):
        model(x).sum().backward()
        optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    with record(model, table="exact") as run:
        model(x).sum().backward()
        optimizer.step()
    real = phases(run)
    assert real["optimizer"]
    if name == "Adafactor":
        # Its numbers change nothing in what is computed.
        assumed = partial(TrainingStepAnalysis, assume={"aten::_local_scalar_dense": 1.0}, table="exact")
        assert phases(assumed(make(), x, loss=torch.sum, optimizer=maker))["optimizer"] == real["optimizer"]
