"""The measured training runs: their fields, checked against each other and against figures computed by hand."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from fvflops.devices.devices import load_devices
from fvflops.plan.step_time.calibration import load_efficiencies
from tests.support.tools import load_tool

RUNS = load_tool("training_runs.rows").read_runs()


def test_every_row_is_read_and_is_of_a_known_device_and_software():
    assert Counter(run.publisher for run in RUNS if run.seconds != float("inf")) == {
        "vTrain": 325,
        "layout": 151,  # of 371, the others ran out of memory
        "MPT": 70,
        "BigScience": 23,
        "NVIDIA": 13,
        "torchtitan": 9,
        "InternEvo": 7,
        "Megatron": 5,
        "Korthikanti": 5,
        "KempnerForge": 4,
        "IBM": 3,
        "Llama": 2,
    }
    assert {run.device for run in RUNS} <= {device.name for device in load_devices()}
    assert {run.software for run in RUNS} == {name for name in load_efficiencies() if name != "fractions of peaks"}


def test_layouts_divide_models():
    for run in RUNS:
        assert run.config.heads % run.mesh.get("tp", 1) == 0, run
        assert run.stage_layers is None or sum(run.stage_layers) == run.config.layers, run
        if run.publisher == "vTrain":
            assert run.config.vocab_multiple == 128 * run.mesh.get("tp", 1), run


def test_models_have_the_parameters_of_their_names():
    stated = {
        "llama2-7b": 6.74e9,
        "llama2-13b": 13.0e9,
        "llama2-70b": 69.0e9,
        "llama3-8b": 8.03e9,
        "llama3.1-8b": 8.03e9,
        "llama3.1-70b": 70.6e9,
        "llama3.1-405b": 405.9e9,
        "llama3 7b": 8.03e9,
        "llama3 13b": 14.84e9,
        "internlm-7b": 7.3e9,
        "nemotron4-15b": 15.6e9,
        "nemotron4-340b": 341e9,
        "nemotron-340b": 341e9,
        "gpt3-5b": 5.05e9,
        "gpt 22B": 22.1e9,
        "gpt 175B": 174.6e9,
        "gpt 530B": 529.6e9,
        "gpt 1T": 1008e9,
        # Their vocabulary of 128,000 adds a billion or more to the names' figures.
        "llama-13B": 14.0e9,
        "llama-30B": 33.8e9,
        "llama-65B": 66.9e9,
        "mpt 350m": 355_985_408,
    }
    by_name = {run.name: run for run in RUNS}
    for name, expected in stated.items():
        config = by_name[name].config
        runs = [replace(by_name[name], config=replace(config, layers=layers)) for layers in (1, 2)]
        one, two = (sum(map(torch.numel, run.build_model().parameters())) for run in runs)
        assert one + (config.layers - 1) * (two - one) == pytest.approx(expected, rel=5e-3), name


def test_the_best_layouts_of_the_study_have_the_stated_mfu():
    stated = {"llama-13B": 0.6966049821464876, "llama-30B": 0.5826552023281465, "llama-65B": 0.5846558753289711}
    best = dict.fromkeys(stated, 0.0)
    for run in RUNS:
        if run.publisher == "layout" and run.sequence == 2048:
            config = run.config
            layer = 4 * config.hidden_size**2 + 3 * config.hidden_size * config.intermediate_size
            parameters = config.layers * layer + 2 * config.vocab_size * config.hidden_size
            tokens = run.micro_batch * run.microbatches * run.replicas * run.sequence
            flops = (6 * parameters + 12 * config.layers * config.hidden_size * run.sequence) * tokens
            best[run.name] = max(best[run.name], flops / (run.seconds * run.gpus * 312e12))
    assert best == pytest.approx(stated, rel=0.003)


def test_a_step_takes_as_long_as_its_rate_says():
    run = next(run for run in RUNS if run.name == "gpt 1.7b")
    # 96 * 512 * 2048 * 24 * 2304^2 * (1 + 2048 / (6 * 2304) + 51,200 / (16 * 24 * 2304)), over 32 GPUs at 137 TFLOP/s
    factor = 1 + 2048 / (6 * 2304) + 51_200 / (16 * 24 * 2304)
    assert (run.mesh, run.micro_batch, run.microbatches) == ({"dp": 32}, 16, 1)
    assert run.seconds == pytest.approx(96 * 512 * 2048 * 24 * 2304**2 * factor / (32 * 137e12))
    titan = next(run for run in RUNS if run.source == "torchtitan 2024-12")
    assert titan.seconds == pytest.approx(2 * 8192 / 5762)  # tokens of a rank, and a second
