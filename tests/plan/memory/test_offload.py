"""Memory of a step whose optimizer, gradients or activations are on the host: as torch's and DeepSpeed's."""

import json

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu

from fvflops import TrainingStepAnalysis, plan_rank, predict_memory
from fvflops.cli import main
from fvflops.plan.added_optimizers import MasterWeights
from fvflops.plan.memory.offload import host_gradients
from fvflops.zoo import build
from tests.support.models.parts import Parts

BOTH = ("optimizer", "gradients")


def adamw(parameters):
    return MasterWeights(parameters, torch.optim.AdamW)


def plan(**options):
    tokens = torch.ones(1, 16, dtype=torch.int64)
    return plan_rank(build("llama_tiny", device="meta").bfloat16(), tokens, optimizer=adamw, **options)


@pytest.mark.parametrize("ranks", [1, 4])
def test_states_are_those_of_deepspeeds_formulas(ranks):
    """ZeRO-2 with offload: 2 bytes a parameter on each GPU, 16 a parameter of the rank's share on the host."""
    zero = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2")
    mesh = {"fsdp": ranks} if ranks > 1 else {"dp": 1}
    kept, sent = (plan(mesh=mesh, offload=offload) for offload in ((), BOTH))
    plain, offloaded = kept.memory(granularity=1), sent.memory(granularity=1)
    parameters = kept.model_parameters
    host, gpu = zero.estimate_zero2_model_states_mem_needs(
        parameters, num_gpus_per_node=ranks, cpu_offload=True, additional_buffer_factor=1
    )
    by_kind = offloaded.at(-1).by_kind
    share = 1 / ranks if ranks > 1 else 1
    assert by_kind["parameter"] == pytest.approx(gpu * share, rel=0.01)  # FSDP2 shards what ZeRO-2 keeps whole
    assert set(by_kind) <= {"parameter", "buffer", "input", "communication"}
    recorded = kept.recorded_memory()
    state = sum(block.nbytes for block in plain.blocks if block.kind == "optimizer state" and block.end is None)
    on_host = state + host_gradients(recorded)
    assert on_host * ranks == pytest.approx(host, rel=0.01)
    assert plain.peak - offloaded.peak > 0.9 * state


def perceptron():
    layers = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()]
    return nn.Sequential(*layers)


def test_activations_are_on_the_device_as_with_save_on_cpu():
    class Offloading(Parts):
        def forward(self, x):
            with save_on_cpu():
                return self.body(x)

    def predict(model, *offload):
        step = TrainingStepAnalysis(model.to("meta"), torch.ones(512, 64), loss=torch.sum, device="cuda")
        return predict_memory(step, granularity=1, offload=offload)

    def first(timeline, phase):
        return next(index for index, event in enumerate(timeline.trace.events) if event.phase == phase)

    plain, offloaded, recorded = (
        predict(perceptron()),
        predict(perceptron(), "activations"),
        predict(Offloading(body=perceptron())),
    )
    before = [timeline.at(first(timeline, "backward")).by_kind["activation"] for timeline in (offloaded, recorded)]
    assert before[1] - 4 <= before[0] <= before[1] < plain.at(first(plain, "backward")).by_kind["activation"] / 100
    # torch brings back the weights that it has saved, too; they are parameters, which are on the device anyway.
    assert recorded.peak - 64 * 64 * 4 <= offloaded.peak <= recorded.peak < plain.peak


def test_checkpoints_offloaded_are_on_the_device_one_layer_at_a_time():
    options = {"mesh": {"dp": 1}, "checkpoint": "full"}
    peaks = [
        plan(**options, offload=offload).memory().peak for offload in ((), ("activations",), (*BOTH, "activations"))
    ]
    assert peaks[0] >= peaks[1] > peaks[2]


def test_the_commands_say_what_is_where(capsys):
    model = ("zoo:llama_tiny", "--input", "1,16:int64", "--device", "H100")
    for command in (("memory", *model, "--no-savings"), ("plan", *model, "--mesh", "fsdp=2")):
        assert main([*command, "--offload", "optimizer", "--offload", "gradients"]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "offload: optimizer, gradients" in text and "n the host: " in text and "of transfers to the host" in text
        assert main([*command, "--offload", "gradients"]) == 2
        assert "gradients are offloaded with the optimizer" in capsys.readouterr().err
    needed = []
    for offload in ((), ("--offload", "optimizer")):
        assert main(["plan", *model, "--mesh", "fsdp=2", *offload, "--format", "json"]) == 0
        needed.append(json.loads(capsys.readouterr().out)["ranks"][0]["peak_memory"])
    assert needed[1] < needed[0]
