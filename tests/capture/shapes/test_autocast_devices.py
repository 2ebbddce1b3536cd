"""Autocast of missing devices, and calls that wait for one or ask it something."""

from collections import Counter

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, ProfileAnalysis, TrainingStepAnalysis, plan_rank
from fvflops.cli import format_error
from tests.support.models.parts import Applied, Parts
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
    def forward(self, x):
        with torch.autocast("cuda", torch.bfloat16):
            return x.sum(), x.sum(0), x.cumsum(0), x.cumprod(0)

    calls = FlopCountAnalysis(Applied(forward), torch.ones(4, dtype=dtype), device="cuda").op_calls()
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


WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
SKIPPED = {
    "synchronize": lambda: torch.cuda.synchronize(),
    "accelerator": lambda: torch.accelerator.synchronize(),
    "set_device": lambda: torch.cuda.set_device(0),
    "statistics": lambda: torch.cuda.reset_peak_memory_stats(),
    "nvtx": lambda: (torch.cuda.nvtx.range_push("layer"), torch.cuda.nvtx.mark("x"), torch.cuda.nvtx.range_pop()),
}
QUERIES = {
    "capability": lambda: torch.cuda.get_device_capability(),
    "stream": lambda: torch.cuda.Stream(),
    "event": lambda: torch.cuda.Event(),
    "index": lambda: torch.cuda.current_device(),
    "tensor": lambda: torch.ones(2, device="cuda"),
}


def error_of(call):
    try:
        call()
    except (AssertionError, RuntimeError, AttributeError) as error:
        return type(error)
    return None


class Net(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.layer, self.call = nn.Linear(4, 2), call

    def forward(self, x):
        self.call()
        return self.layer(x)


@WITHOUT_CUDA
@pytest.mark.parametrize(
    "options", [{}, {"device": "cuda"}, {"execution": "real"}], ids=["shapes", "as on CUDA", "real"]
)
@pytest.mark.parametrize("name", SKIPPED)
def test_waiting_for_a_missing_device_is_skipped_while_a_model_is_counted(name, options):
    before = error_of(SKIPPED[name])
    assert before or torch.version.cuda  # CUDA's builds of torch have NVTX without a GPU
    assert FlopCountAnalysis(Net(SKIPPED[name]), torch.ones(1, 4), **options).total() == 8
    assert error_of(SKIPPED[name]) is before


@WITHOUT_CUDA
@pytest.mark.parametrize("name", QUERIES)
def test_asking_a_missing_device_is_an_error_that_says_what_to_do(name, caplog):
    if name == "event" and torch.version.cuda:
        pytest.skip("CUDA's builds of torch make an event without a GPU")
    with pytest.raises((AssertionError, RuntimeError)) as caught:
        FlopCountAnalysis(Net(QUERIES[name]), torch.ones(1, 4)).total()
    (note,) = getattr(caught.value, "__notes__", None) or [record.getMessage() for record in caplog.records]
    assert note.startswith('fvflops: raised by Net on float32[1, 4]; this machine has no CUDA: device="cuda" simulates')
    assert "; this machine has no CUDA: --device cuda simulates tensors" in format_error(caught.value)


@WITHOUT_CUDA
def test_a_measured_run_skips_no_call():
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA driver"):
        ProfileAnalysis(Net(torch.cuda.synchronize), torch.ones(1, 4)).total()
