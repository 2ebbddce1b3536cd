"""Whether a prediction fits on a device, and what would make it fit."""

from functools import partial

import pytest
import torch
from torch import nn

from fvflops import TrainingStepAnalysis, memory_savings, predict_memory
from fvflops.features.memory.fit import MemoryAllowance, fits

MODEL = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Softmax(-1)) for _ in range(4)))
STEP = TrainingStepAnalysis(MODEL, torch.ones(64, 8), loss=torch.sum)


def test_what_does_not_fit_is_over_by_its_bytes_and_its_allowance():
    memory = predict_memory(STEP)
    plain, generous = (
        fits(memory, "a card", memory.peak, allowance=allowance)
        for allowance in (None, MemoryAllowance(fragmentation=0.1, outside=100))
    )
    assert plain and plain.over == plain.allowance == 0
    assert not generous and generous.over == generous.allowance == round(0.1 * memory.peak) + 100
    with pytest.raises(ValueError, match="must not be negative"):
        MemoryAllowance(outside=-1)


def test_the_changes_are_those_with_which_it_fits():
    memory = predict_memory(STEP)
    changes = memory_savings(STEP).changes
    enough = changes[-1].peak
    fit = fits(memory, "a card", enough, savings=partial(memory_savings, STEP))
    assert fit.changes == changes and fit.best is None
    assert f"Fits with {changes[0].change} {changes[0].name}" in list(fit.describe())[1]
    small = fits(memory, "a card", 1, savings=partial(memory_savings, STEP))
    assert not small.changes and small.best.peak == min(change.peak for change in changes)
    assert small.over == memory.peak - 1


def test_savings_are_not_sought_for_what_fits():
    memory = predict_memory(STEP)
    assert fits(memory, "a card", 2 * memory.peak, savings=lambda: pytest.fail("not needed"))
