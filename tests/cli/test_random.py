"""Commands on a model with random control flow: notes, the same result each time, and `--repeat`."""

import json
import re

import pytest
import torch

from fvflops.capture.restore.global_state import seeded
from tests.support.reports.report_formats import output_of

MODEL = """
import random
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, python=False):
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(6)), nn.Linear(8, 8)
        self.draw = random.random if python else lambda: torch.rand(())
    def forward(self, x):
        for layer in self.layers:
            if self.draw() < 0.5:
                continue
            x = layer(x)
        return self.head(x)

def net():
    return Net()

def python():
    return Net(python=True)
"""
LINE = "layer_drop.py:13"
NOTE = f"Random: Python read a random draw in Net at {LINE}. Another draw may cost more or less."
ARGUMENTS = ("--input", "4,8", "--train")
# FLOPs of a layer on 4 rows.
LAYER = 4 * 8 * 8


@pytest.fixture(params=("net", "python"))
def model(request, tmp_path, monkeypatch):
    (tmp_path / "layer_drop.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    return f"layer_drop.py:{request.param}"


def sentences(text):
    return " ".join(text.split())


def test_two_counts_agree_and_name_the_line(model, capsys):
    arguments = ("count", model, *ARGUMENTS, "--backward", "--build-on", "meta")
    first = output_of(capsys, *arguments)
    assert NOTE in sentences(first) and output_of(capsys, *arguments) == first
    about = json.loads(output_of(capsys, *arguments, "--format", "json"))["about"]
    assert about["random"] == f"Net at {LINE}" and "data_dependent" not in about


def test_repeat_gives_the_minimum_mean_and_maximum_of_the_draws(tmp_path, monkeypatch, capsys):
    (tmp_path / "layer_drop.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    arguments = ("count", "layer_drop.py:net", *ARGUMENTS, "--format", "json")
    costs = [json.loads(output_of(capsys, *arguments))["columns"]["flops"][""]]
    for seed in range(1, 4):
        with seeded(seed):
            costs.append(LAYER * (1 + sum(bool(torch.rand(()) >= 0.5) for _ in range(6))))
    about = json.loads(output_of(capsys, *arguments, "--repeat", "4"))["about"]
    mean = f"{sum(costs) / 4:,.1f}".removesuffix(".0")
    assert about["draws"] == f"4 draws: minimum {min(costs):,}, mean {mean}, maximum {max(costs):,} FLOPs"


def test_every_command_says_that_control_flow_is_random(model, capsys):
    check = ("check", model, *ARGUMENTS, "--budget", "budget.yaml")
    output_of(capsys, *check, "--update")
    plan = ("plan", model, "--input", "4,8", "--mesh", "dp=2")
    commands = (
        check,
        ("memory", model, "--input", "4,8", "--no-savings"),
        plan,
        ("scale", model, "--vary", "batch=1..4", "--input", "batch,8", "--train"),
    )
    for command in commands:
        assert NOTE in sentences(output_of(capsys, *command)), command
        data = json.loads(output_of(capsys, *command, "--format", "json"))
        data = data.get("tables", data)
        assert LINE in json.dumps(data["random"]) and "data_dependent" in data, command
    assert NOTE in sentences(output_of(capsys, *plan, "--device", "H100"))


def test_memory_is_of_the_largest_run_and_repeats(model, capsys):
    text = sentences(output_of(capsys, "memory", model, "--input", "512,8", "--no-savings", "--repeat", "3"))
    peaks = re.search(r"Peak memory of 3 draws: minimum ([\d,]+), mean [\d,.]+, maximum ([\d,]+) bytes\.", text)
    assert peaks is not None
    least, most = (int(number.replace(",", "")) for number in peaks.groups())
    data = json.loads(output_of(capsys, "memory", model, "--input", "512,8", "--no-savings", "--format", "json"))
    assert least < most <= data["tables"]["peak"]["rows"][0]["bytes"]
    assert "with the lowest draws" in text and "with the highest draws" in text
