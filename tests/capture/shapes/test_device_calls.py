"""Calls of torch.cuda and torch.accelerator in a model, on a machine without CUDA."""

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, ProfileAnalysis
from fvflops.cli import format_error

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
