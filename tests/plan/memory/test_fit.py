"""Whether memory fits a device."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fvflops import TrainingStepAnalysis, find_device, plan_rank, predict_memory, search_layouts
from fvflops.cli import main
from fvflops.plan.memory.step_settings import Verdict
from fvflops.plan.step_time.step_time_report import judge

GB = 10**9


@pytest.mark.parametrize(
    ("needed", "memory", "reserve", "fits", "expected"),
    [
        (80 * GB, 80e9, 0, True, "Fits: 80 GB of 80 GB. 0 B are left on a card."),
        (60 * GB, 80e9, GB, True, "Fits: 60 GB of 80 GB. 19 GB are left on a card, where 1 GB are set aside for NCCL"),
        (80 * GB, 80e9, GB, False, "Does not fit: 80 GB of 80 GB. That is 1 GB too much for a card, where 1 GB are "),
        (81 * GB, 80e9, 0, False, "Does not fit: 81 GB of 80 GB. That is 1 GB too much for a card. Try less."),
        (81 * GB, None, 0, None, "Needs 81 GB: the memory of a card is not known. Try less."),
    ],
)
def test_a_verdict(needed, memory, reserve, fits, expected):
    verdict = Verdict(needed, "a card", memory, reserve, "NCCL" if reserve else "", "Try less.")
    assert verdict.fits is fits and str(verdict).startswith(expected)
    data = verdict.encode()
    assert (data["text"], data["fits"], data["needed"], data["memory"]) == (str(verdict), fits, needed, memory)
    assert str(Verdict(81 * GB)) == "Needs 81 GB: no device is named."


def test_a_device_of_unknown_memory_says_in_which_sizes_it_is_made():
    text = str(judge(GB, find_device("V100"), {}))
    assert text.endswith("is not known. It is made with 16 and with 32 GB, which have names of their own.")
    assert str(judge(GB, find_device("V100 16GB"), {}, advice="Try less.")).startswith("Fits: 1 GB of 16.9 GB.")


def test_tensors_that_fit_without_cached_blocks_are_said():
    text = str(Verdict(81 * GB, "a card", 80e9, GB, tensors=79 * GB))
    assert "The tensors alone, 79 GB, fit: if torch's allocator frees cached blocks in time, the step" in text
    assert "tensors" not in str(Verdict(81 * GB, "a card", 80e9, 2 * GB, tensors=79 * GB))


class _Rerun(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("model", "checkpoint", "expected"),
    [(_Rerun(), [], "the model's own"), (_Rerun().layer, [], "none"), (_Rerun().layer, ["0"], "Linear × 1")],
)
def test_checkpoints_of_the_model_itself_are_named(model, checkpoint, expected):
    x = torch.ones(2, 8, requires_grad=True)
    step = TrainingStepAnalysis(model, x, loss=torch.sum, checkpoint=checkpoint)
    assert predict_memory(step).settings["checkpointing"] == expected
    plan = plan_rank(model, x, mesh={"dp": 2}, loss=torch.sum, checkpoint=checkpoint)
    assert plan.memory().settings["checkpointing"] == expected


@pytest.mark.parametrize(("model", "expected"), [(_Rerun(), "the model's own"), (_Rerun().layer, "none")])
def test_a_search_names_checkpoints_of_the_model_itself(model, expected):
    few = {"tp": [1], "pp": [1], "micro-batch": [1], "dp": [1], "checkpoint": ["full", "none"]}
    search = search_layouts(
        model, torch.ones(1, 8), gpus=2, global_batch=2, device="H100", loss=torch.sum, choices=few, jobs=1
    )
    settings = {result.candidate.checkpoint: search.settings_of(result.candidate) for result in search.results}
    assert {name: found["checkpointing"] for name, found in settings.items()} == {"none": expected, "full": "full"}
    assert ("checkpointing: the model's own" in " ".join(str(search).split())) is (expected != "none")


def test_a_plan_without_an_optimizer_says_so(capsys):
    for options, expected in ((["--optimizer", "none"], True), ([], False)):
        assert main(["plan", "zoo:llama_tiny", "--mesh", "fsdp=2", *options]) == 0
        assert ("No optimizer is included." in capsys.readouterr().out) is expected
