"""A rank of some that train side by side under gloo, with a planted defect or without, and the trace of its steps."""

from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.planted.cpu_defects import Step, run, train


def reduce_one_by_one(model):
    """Average gradients after the backward pass, beside no compute."""
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)


def gather():
    """Gather parameters before the step, as without prefetching."""
    own = torch.ones(2**20)
    for _ in range(6):
        dist.all_gather([torch.empty_like(own) for _ in range(dist.get_world_size())], own)


def reduce_loss(model):
    dist.all_reduce(torch.ones(1))


def wait_for(slow: int) -> Step:
    """Return what takes longer on one rank, and waits for it on the others."""
    x = torch.ones(768, 768)

    def step():
        for _ in range(12 if dist.get_rank() == slow else 1):
            x @ x
        dist.all_reduce(torch.ones(1))

    return step


# Case → code of the finding, "" for none, and what a step does beside training.
CASES = {
    "all-reduce after the backward pass": (
        "exposed_all_reduce",
        lambda: train(after=reduce_one_by_one, shape=(1, 64), width=512),
    ),
    "all-gather before the forward pass": ("exposed_all_gather", lambda: train(before=gather, shape=(1, 64))),
    "late rank": ("straggler", lambda: train(before=wait_for(1), shape=(1, 64))),
    "clean": ("", lambda: train(after=reduce_loss, shape=(2, 300), width=512)),
}


def prepare() -> None:
    import torch._dynamo  # noqa: F401  which an optimizer imports at its first use


def main(rank: int, folder: str, case: str) -> None:
    run(CASES[case][1], Path(folder, f"rank{rank}.json"))
