"""What tests of recorded training ask of a recording, and what it must not leave in torch."""

from collections import Counter, defaultdict

import pytest
import torch
from torch import nn
from torch._ops import HigherOrderOperator
from torch.optim import optimizer as optimizers
from torch.utils import checkpoint as checkpointing
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fvflops import FlopCountAnalysis

EXECUTIONS = ("real", "shapes")
X = torch.linspace(-1, 1, 12).reshape(3, 4)
BEFORE, OUTSIDE = "<before recording>", "<outside the model>"


def installed():
    """Return all that a recording puts in the place of something of torch's."""
    hook, frame = checkpointing._recomputation_hook, checkpointing._CheckpointFrame
    dynamo = torch.__dict__.get("_dynamo")
    return [
        nn.Module._call_impl,
        nn.Module.compile,
        torch.compile,
        vars(torch.autograd.function._SingleLevelFunction).get("apply"),
        torch.autograd._engine_run_backward,
        [frame.__init__, hook.__init__, vars(hook).get("__enter__"), vars(hook).get("__exit__")],
        checkpointing.CheckpointFunction.backward,
        HigherOrderOperator.__call__,
        [*optimizers._global_optimizer_pre_hooks, *optimizers._global_optimizer_post_hooks],
        list(map(id, _get_current_dispatch_mode_stack())),
        "default" if dynamo is None else dynamo.eval_frame._stance.stance,
    ]


@pytest.fixture(autouse=True)
def nothing_stays_installed():
    before = installed()
    yield
    assert installed() == before


def make_net() -> nn.Sequential:
    """Return two layers: for X, 48 and 24 multiply-adds forward, 48 and 2 × 24 backward, as X wants no gradient."""
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def macs_by_phase(run: FlopCountAnalysis) -> dict[str, int]:
    sums = Counter()
    for entry in run.counts().entries:
        sums[entry.phase] += entry.macs
    return dict(+sums)


def macs_by_owner(run: FlopCountAnalysis) -> dict[str, dict[str, int]]:
    """Return module → phase → multiply-adds of its own, without its submodules'."""
    sums = defaultdict(Counter)
    for entry in run.counts().entries:
        if entry.macs:
            sums[entry.scope[-1] if entry.scope else ""][entry.phase] += entry.macs
    return {name: dict(phases) for name, phases in sums.items()}


def ops_by_place(run: FlopCountAnalysis) -> Counter[tuple[str, ...]]:
    """Return (owner, phase, op, parameter group) → calls."""
    calls = Counter()
    for entry in run.counts().entries:
        calls[entry.scope[-1] if entry.scope else "", entry.phase, entry.op, entry.group] += entry.calls
    return calls


def check_sums(run: FlopCountAnalysis) -> None:
    """Check that the phases add up to the total and that no module has more than the one that holds it."""
    phases = {phase: sum(labels.values()) for phase, labels in run.by_phase().items()}
    by_module = run.by_module_and_phase()
    assert phases == {phase: flops for phase, flops in by_module[""].items() if flops}
    assert sum(phases.values()) == run.total() > 0
    for name, counts in by_module.items():
        parent = by_module[name.rpartition(".")[0]]
        assert all(flops <= parent[phase] for phase, flops in counts.items()), name
