"""Master weights in float32: their bytes, and gradients that are accumulated in float32."""

from functools import partial

import pytest
import torch
from torch import nn

from fvflops import plan_rank
from fvflops.plan.added_optimizers import MasterWeights
from fvflops.zoo import build

ADAM = partial(torch.optim.AdamW, fused=True)


@pytest.mark.parametrize("float32_gradients", [False, True])
def test_mixed_precision_takes_16_or_18_bytes_a_parameter(float32_gradients):
    model = build("megatron_gpt_tiny", device="meta").half()
    tokens = torch.ones(2, 16, dtype=torch.int64)
    optimizer = partial(MasterWeights, make=ADAM, float32_gradients=float32_gradients)
    planned = plan_rank(model, (tokens, tokens), mesh={"tp": 2}, microbatches=3, optimizer=optimizer)
    timeline = planned.memory()
    held = timeline.at(len(timeline.trace.events) - 1).by_kind
    counts = 4 * len(list(model.parameters()))  # of steps
    assert held["parameter"] == 2 * planned.parameters
    assert held["gradient"] == (4 if float32_gradients else 2) * planned.parameters
    assert held["optimizer state"] == 12 * planned.parameters + counts
    # They exist before the step.
    assert timeline.at(-1).by_kind["gradient"] == held["gradient"] * float32_gradients


def test_gradients_of_all_microbatches_are_added():
    def train(float32_gradients):
        weight = nn.Parameter(torch.ones(3))
        optimizer = MasterWeights(
            [weight], partial(torch.optim.SGD, lr=0.5), max_norm=1e9, float32_gradients=float32_gradients
        )
        for factor in (1.0, 2.0):
            (factor * weight).sum().backward()
        optimizer.step()
        return weight

    assert torch.equal(train(True), train(False)) and train(True).tolist() == [-0.5] * 3
