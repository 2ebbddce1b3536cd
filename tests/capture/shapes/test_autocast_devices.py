"""Autocast casts weights and inputs that are not on the run's device, such as those on the meta device."""

from collections import Counter

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, TrainingStepAnalysis, plan_rank
from tests.support.models.parts import Parts
from tests.support.old_torch import needs


class Inner(Parts):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(x)


@pytest.mark.parametrize("inner", [True, False], ids=["in the model", "around it"])
@pytest.mark.parametrize("inputs", ["cpu", "meta"])
@pytest.mark.parametrize("weights", ["cpu", "meta"])
def test_a_linear_layer_in_autocast_has_operands_in_its_dtype(weights, inputs, inner):
    model = (Inner(layer=nn.Linear(4, 4)) if inner else nn.Linear(4, 4)).to(weights)
    before = dict(model.named_parameters())
    with torch.autocast("cpu", torch.bfloat16, enabled=not inner):
        analysis = FlopCountAnalysis(model, torch.ones(2, 4, device=inputs), execution="shapes")
        (call,) = (call for call in analysis.op_calls() if call.name == "linear")
    assert [text.partition("[")[0] for text in call.inputs] == ["bfloat16"] * 3
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


class LanguageModel(nn.Module):
    """Has its own loss, as nanoGPT's."""

    def __init__(self):
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(100, 32), nn.LayerNorm(32), nn.Linear(32, 100)

    def forward(self, tokens):
        logits = self.head(self.norm(self.embedding(tokens)))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def test_cross_entropy_in_autocast_for_cuda_has_log_probabilities_in_bfloat16_and_its_mean_in_float32():
    """CUDA's autocast does not convert cross_entropy_loss, which asks log_softmax for its input's dtype, but nll_loss.

    GPT-2 (16 × 1,024 tokens, fused AdamW) on an H200 peaked at 17.21 GB, with its logits of 1.65 GB kept by the loop;
    log probabilities in float32 would be 1.65 GB more, a loss in bfloat16 3.3 GB less.
    """
    with torch.device("meta"):
        model, tokens = LanguageModel(), torch.zeros(2, 8, dtype=torch.long)
    step = TrainingStepAnalysis(model, tokens, loss=lambda result: result[1], device="cuda", autocast=torch.bfloat16)
    inputs = {call.name: call.inputs[0].partition("[")[0] for call in step.op_calls()}
    assert (inputs["_log_softmax"], inputs["nll_loss_forward"]) == ("bfloat16", "float32")


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float64, torch.bfloat16])
def test_autocast_for_cuda_sums_in_float32_what_is_of_a_lower_precision(dtype):
    class Sums(nn.Module):
        def forward(self, x):
            with torch.autocast("cuda", torch.bfloat16):
                return x.sum(), x.sum(0), x.cumsum(0), x.cumprod(0)

    calls = FlopCountAnalysis(Sums(), torch.ones(4, dtype=dtype), device="cuda").op_calls()
    expected = {torch.bool: torch.int64, torch.bfloat16: torch.float32}.get(dtype, dtype)
    found = [call.outputs[0].partition("[")[0] for call in calls]
    assert found == [str(expected).removeprefix("torch.")] * 4


@needs("plan and sharded memory")
@pytest.mark.parametrize("mesh", [{"dp": 1}, {"pp": 1}])
def test_a_rank_computes_in_the_autocast_of_its_device(mesh):
    with torch.device("meta"):
        model, tokens = LanguageModel(), torch.zeros(2, 8, dtype=torch.long)
    options = {"loss": lambda result: result[1], "device": "cuda"}
    step = TrainingStepAnalysis(model, tokens, autocast=torch.bfloat16, **options)
    plan = plan_rank(model, tokens, mesh=mesh, precision="bf16-mixed", **options)
    found = [
        Counter((call.name, *(text.partition("[")[0] for text in call.inputs)) for call in analysis.op_calls())
        for analysis in (step, FlopCountAnalysis.from_trace(plan.recorded))
    ]
    assert found[0] == found[1]
