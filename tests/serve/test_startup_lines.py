"""Bytes of a cached token, weights and memory against what engines printed at start in public reports."""

import csv
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml

from fvflops.devices.devices import find_device
from fvflops.serve.cache_size import sequence_bytes
from fvflops.serve.record_serving import record_serving
from fvflops.serve.serving_layout import ServingLayout
from fvflops.serve.serving_memory import find_memory
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas
from tests.support.serving.language_models import transformers

_FOLDER = Path(__file__).parents[1] / "data" / "serving_startup"
_MODELS = yaml.safe_load((_FOLDER / "models.yaml").read_text())
with (_FOLDER / "startup_lines.csv").open() as file:
    _LINES = list(csv.DictReader(file))
_GIB = 2**30


@cache
def _serving(name):
    define_torchvision_schemas()
    entry = _MODELS[name]
    model_class = getattr(transformers, entry["class"])
    with torch.device("meta"):
        model = model_class(model_class.config_class(**entry["options"])).eval()
    return record_serving(model, name)


def _label(line):
    return f"{line['engine']}-{line['model']}-{line['tokens']}"


def test_at_least_ten_reports():
    assert len(_LINES) >= 10
    assert all(line["address"].startswith("http") for line in _LINES)


@pytest.mark.parametrize("line", _LINES, ids=_label)
def test_bytes_of_a_token(line):
    # One token is kept by all layers, also by those with a window.
    layers = _serving(line["model"]).cache
    expected = sequence_bytes(layers, 1, float(line["element"]), ranks=int(line["tensor"]))
    assert float(line["cache_gib"]) * _GIB / int(line["tokens"]) == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("line", [line for line in _LINES if line["activations_gib"]], ids=_label)
def test_tokens_that_fit_from_the_account_of_memory(line):
    serving = _serving(line["model"])
    weights = ServingLayout(tensor=int(line["tensor"])).weight_bytes(serving)
    used = weights + (float(line["activations_gib"]) + float(line["other_gib"])) * _GIB
    left = float(line["utilisation"]) * float(line["total_gib"]) * _GIB - used
    token = sequence_bytes(serving.cache, 1, float(line["element"]), ranks=int(line["tensor"]))
    # 0.01 GiB of each printed figure is rounded, which shows where little is left.
    assert left / token == pytest.approx(int(line["tokens"]), rel=0.02)


# No layout has weights in float32.
_PROFILED = [line for line in _LINES if line["version"] == "0.19.0" and line["element"] != "4"]


@pytest.mark.parametrize("line", _PROFILED, ids=_label)
def test_memory_of_the_cache_is_found_without_a_profiled_step(line):
    """vLLM 0.19.0 on an H100 runs a step of 8,192 tokens and samples for 1,024 sequences."""
    serving = _serving(line["model"])
    device = replace(find_device("H100"), memory=float(line["total_gib"]) * _GIB)
    utilisation = float(line["utilisation"])
    found = find_memory(serving, ServingLayout(), device, length=8192, utilisation=utilisation, step_sequences=1024)
    assert found.cache == pytest.approx(float(line["cache_gib"]) * _GIB, rel=0.02)
    assert found.weights == pytest.approx(float(line["weights_gib"]) * _GIB, rel=0.03)
