"""Master weights in float32: their bytes, and gradients that are accumulated in float32."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from fvflops import plan_rank
from fvflops.plan.added_optimizers import MasterWeights
from fvflops.plan.sharding.optimizer_shards import GradientBuffers
from fvflops.zoo import build

ADAM = partial(torch.optim.AdamW, fused=True)


@pytest.mark.parametrize("gradient_dtype", [None, "fp32"])
def test_mixed_precision_takes_16_or_18_bytes_a_parameter(gradient_dtype):
    model = build("megatron_gpt_tiny", device="meta").half()
    tokens = torch.ones(2, 16, dtype=torch.int64)
    options = {"optimizer": partial(MasterWeights, make=ADAM), "gradient_dtype": gradient_dtype}
    planned = plan_rank(model, (tokens, tokens), mesh={"tp": 2}, microbatches=3, **options)
    timeline = planned.memory()
    held = timeline.at(len(timeline.trace.events) - 1).by_kind
    counts = 4 * len(list(model.parameters()))  # of steps
    assert held["parameter"] == 2 * planned.parameters
    assert held["gradient"] == (4 if gradient_dtype else 2) * planned.parameters
    assert held["optimizer state"] == 12 * planned.parameters + counts
    # They exist before the step.
    assert timeline.at(-1).by_kind["gradient"] == held["gradient"] * bool(gradient_dtype)


def test_gradients_of_all_microbatches_are_added():
    def train(buffers):
        weight = nn.Parameter(torch.ones(3))
        optimizer = MasterWeights([weight], partial(torch.optim.SGD, lr=0.5), max_norm=1e9)
        with buffers([weight]):
            for factor in (1.0, 2.0):
                (factor * weight).sum().backward()
            optimizer.step()
        assert not hasattr(weight, "main_grad") and not weight._post_accumulate_grad_hooks
        return weight

    in_buffers = train(partial(GradientBuffers, dtype=torch.float32))
    assert torch.equal(in_buffers, train(nullcontext)) and in_buffers.tolist() == [-0.5] * 3
