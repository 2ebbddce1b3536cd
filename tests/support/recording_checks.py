"""What tests of recorded training ask of a recording, and what it must not leave in torch."""

from collections import Counter, defaultdict

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis
from tests.support.installed_patches import installed

EXECUTIONS = ("real", "shapes")
X = torch.linspace(-1, 1, 12).reshape(3, 4)
BEFORE, OUTSIDE = "<before recording>", "<outside the model>"


@pytest.fixture(autouse=True)
def nothing_stays_installed():
    before = installed()
    yield
    assert installed() == before


def make_net() -> nn.Sequential:
    """Return two layers: for X, 48 and 24 multiply-adds forward, 48 and 2 × 24 backward, as X requires no gradient."""
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
