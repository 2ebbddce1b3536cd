"""The work of one of two processes that train by gloo, of which one alone counts a step by shapes meanwhile."""

import pytest
import torch
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

from fvflops import TrainingStepAnalysis

RANKS = 2
WRAPPERS = {
    "plain": {},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
    "bucket views": {"gradient_as_bucket_view": True},
    "replicate": {},
}
# What needs all ranks in its first step, which is not to be counted then.
REFUSED = {
    "static graph": r"static_graph=True.*run one step before counting",
    "replicate": r"replicate\(model\) does in the first forward pass; run one forward pass before counting",
}


def train(rank: int, name: str, before: int, *, counted: bool) -> list[torch.Tensor]:
    """Return what a model holds after some steps, `before` of them before one process counts one more."""
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    wrap = replicate if name == "replicate" else DistributedDataParallel
    model = wrap(inner, bucket_cap_mb=1e-4, **WRAPPERS[name])  # several buckets
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    torch.manual_seed(1 + rank)
    x = torch.randn(5, 6)

    def step():
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        optimizer.step()

    for _ in range(before):
        step()
    if counted and rank == before % RANKS:
        analysis = TrainingStepAnalysis(model, x, loss=torch.sum, optimizer=optimizer, micro_batches=2)
        if name in REFUSED and not before:
            with pytest.raises(ValueError, match=REFUSED[name]):
                analysis.total()
        else:
            assert analysis.macs(phase="forward") == 2 * 5 * (6 * 8 + 8 * 4)
    for _ in range(3):
        step()
    return [*inner.state_dict().values(), *(parameter.grad for parameter in inner.parameters())]


def main(rank: int) -> None:
    for name in WRAPPERS:
        for before in range(3):
            counted, plain = (train(rank, name, before, counted=counted) for counted in (True, False))
            assert all(map(torch.equal, counted, plain)), (name, before)
