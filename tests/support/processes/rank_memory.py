"""Compare the planned memory of each rank with what processes that train together by gloo allocate."""

import torch

from fvflops import plan_rank
from fvflops.zoo.llama import Llama
from tests.support.processes.memory_worker import CONFIG, OPTIMIZERS, TOKENS, cross_entropy
from tests.support.processes.start import run_ranks


def compare_ranks(processes, cases):
    """Return (predicted, measured) bytes of the first and the second step, less parameters and inputs.

    For each case, a mesh and the name of an optimizer, a list of each rank's steps, predicted by `plan_rank`; then the
    list of FSDP2 with mixed precision and checkpoints, predicted by each rank from its sharded model.
    """
    measured = run_ranks("memory_worker", processes, cases)
    planned = [
        [_pairs(_predict(mesh, optimizer, rank), measured[rank][0][index]) for rank in range(processes)]
        for index, (mesh, optimizer) in enumerate(cases)
    ]
    return [*planned, [compared for _, compared in measured]]


def _pairs(predicted, measured):
    return list(zip(predicted, measured, strict=True))


def _predict(mesh, optimizer, rank):
    with torch.device("meta"):
        model = Llama(CONFIG)
    plan = plan_rank(model, (TOKENS,), mesh=mesh, rank=rank, optimizer=OPTIMIZERS[optimizer], loss=cross_entropy)
    first, later = plan.memory(first_step=True), plan.memory()
    return first.peak - first.baseline, later.peak - first.baseline
