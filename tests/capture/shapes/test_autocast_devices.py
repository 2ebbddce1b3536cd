"""Autocast casts weights and inputs that are not on the run's device, such as those on the meta device."""

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(x)


@pytest.mark.parametrize("inner", [True, False], ids=["in the model", "around it"])
@pytest.mark.parametrize("inputs", ["cpu", "meta"])
@pytest.mark.parametrize("weights", ["cpu", "meta"])
def test_a_linear_layer_in_autocast_has_operands_in_its_dtype(weights, inputs, inner):
    model = (Inner() if inner else nn.Linear(4, 4)).to(weights)
    before = dict(model.named_parameters())
    with torch.autocast("cpu", torch.bfloat16, enabled=not inner):
        analysis = FlopCountAnalysis(model, torch.ones(2, 4, device=inputs), execution="shapes")
        (call,) = (call for call in analysis.op_calls() if call.name == "linear")
    assert [text.partition("[")[0] for text in call.inputs] == ["bfloat16"] * 3
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
