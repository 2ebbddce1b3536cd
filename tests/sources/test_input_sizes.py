"""Sizes and dtype of default inputs, chosen by --batch, --seq, --image-size and --dtype."""

import json

import pytest
import torch

from fvflops import FlopCountAnalysis
from fvflops.cli import main
from fvflops.sources import SourceOptions, load_model

FACTORY = """
import torch
from torch import nn


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.project = nn.Linear(8, 4)
        self.conv = nn.Conv2d(3, 5, 3, padding=1)

    def forward(self, ids, images):
        return self.project(self.embed(ids)), self.conv(images)


class Positions(nn.Module):
    def __init__(self):
        super().__init__()
        self.position_embedding = nn.Embedding(16, 8)

    def forward(self, ids):
        return self.position_embedding(torch.arange(ids.shape[1]))


def pair():
    return Pair(), (torch.tensor([[7, 8, 9]]), torch.rand(1, 3, 10, 12))


def positions():
    return Positions(), (torch.ones(1, 4, dtype=torch.int64),)


def vector():
    return nn.Linear(4, 2), torch.rand(4)


def without_inputs():
    return nn.Linear(4, 2)
"""


@pytest.fixture
def factory(tmp_path):
    path = tmp_path / "sized_models.py"
    path.write_text(FACTORY)
    return str(path)


def shapes_of(name, **options):
    loaded = load_model(name, SourceOptions(device=None if ".py" in name else "meta", **options))
    values = [*loaded.inputs, *loaded.kwargs.values()]
    return [tuple(value.shape) for value in values]


def count(name, **options):
    loaded = load_model(name, SourceOptions(device="meta", **options))
    return FlopCountAnalysis(loaded.model.eval(), loaded.inputs, kwargs=loaded.kwargs, warn=False).total()


@pytest.mark.parametrize(
    ("name", "options", "shapes"),
    [
        ("zoo:gpt2", {"batch": 3, "seq": 20}, [(3, 20)]),
        ("zoo:resnet50", {"batch": 2, "image_size": (96, 64)}, [(2, 3, 96, 64)]),
        ("torchvision:resnet18", {"batch": 2, "image_size": (64, 64)}, [(2, 3, 64, 64)]),
        ("torchvision:vit_b_16", {"image_size": (64, 64)}, [(1, 3, 64, 64)]),
        ("torchvision:maxvit_t", {"image_size": (448, 448)}, [(1, 3, 448, 448)]),
        ("timm:resnet18", {"batch": 2, "image_size": (64, 96)}, [(2, 3, 64, 96)]),
        ("timm:vit_tiny_patch16_224", {"image_size": (64, 96)}, [(1, 3, 64, 96)]),
        ("timm:swin_tiny_patch4_window7_224", {"image_size": (448, 224)}, [(1, 3, 448, 224)]),
        ("transformers:GPT2Model", {"batch": 2, "seq": 24}, [(2, 24), (2, 24)]),
        ("transformers:T5Model", {"seq": 24}, [(1, 24)] * 4),
        ("transformers:ViTModel", {"batch": 2, "image_size": (64, 64)}, [(2, 3, 64, 64)]),
    ],
)
def test_default_inputs_have_the_chosen_sizes(name, options, shapes):
    loaded = load_model(name, SourceOptions(device="meta", **options))
    values = [value for value in (*loaded.inputs, *loaded.kwargs.values()) if isinstance(value, torch.Tensor)]
    assert [tuple(value.shape) for value in values] == shapes
    FlopCountAnalysis(loaded.model.eval(), loaded.inputs, kwargs=loaded.kwargs, warn=False).total()


@pytest.mark.parametrize("name", ["zoo:resnet50", "zoo:gpt2", "timm:resnet18", "transformers:BertModel"])
def test_a_batch_costs_as_many_times_one_sample(name):
    assert count(name, batch=3) == 3 * count(name)


def test_a_detector_s_batch_is_its_list_of_images():
    loaded = load_model("torchvision:ssdlite320_mobilenet_v3_large", SourceOptions(batch=2, image_size=(64, 96)))
    (images,) = loaded.inputs
    assert [tuple(image.shape) for image in images] == [(3, 64, 96)] * 2


def test_inputs_of_a_factory_keep_their_values(factory):
    name = f"{factory}:pair"
    assert shapes_of(name, batch=2, seq=5, image_size=(4, 6)) == [(2, 5), (2, 3, 4, 6)]
    ids, _ = load_model(name, SourceOptions(batch=2, seq=5)).inputs
    assert ids.tolist() == [[7, 8, 9, 7, 8]] * 2
    assert load_model(f"{factory}:vector", SourceOptions(batch=6)).inputs.shape == (6,)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "zoo:resnet50",
            {"seq": 3},
            r"--seq does not apply to the default inputs of zoo:resnet50 \(float32\[1, 3, 224",
        ),
        ("zoo:gpt2", {"image_size": (8, 8)}, "--image-size does not apply to the default inputs of zoo:gpt2"),
        (
            "zoo:gpt2",
            {"batch": 2, "inputs": ("1,8:int64",)},
            "--batch sets the size of default inputs: omit it, or --input",
        ),
        (
            "zoo:gpt2",
            {"seq": 2000},
            r"--seq 2000: GPT2 has positions for 1024 tokens only \(wpe\): pass at most --seq 1024",
        ),
        ("zoo:gpt2", {"dtype": "int8"}, "--dtype must be one of fp64, fp32"),
        ("torchvision:vit_b_16", {"image_size": (64, 32)}, "--image-size 64x32: torchvision:vit_b_16 accepts square"),
        (
            "transformers:ViTModel",
            {"seq": 8},
            r"--seq does not apply to the default inputs of ViTModel \(pixel_values=",
        ),
    ],
)
def test_a_size_that_does_not_apply_is_an_error(name, options, message):
    with pytest.raises(ValueError, match=message):
        load_model(name, SourceOptions(device="meta", **options))


def test_sizes_that_a_factory_does_not_have_are_errors(factory):
    with pytest.raises(ValueError, match=r"--seq does not apply to the default inputs of .*vector"):
        load_model(f"{factory}:vector", SourceOptions(seq=3))
    with pytest.raises(ValueError, match="positions for 16 tokens only"):
        load_model(f"{factory}:positions", SourceOptions(seq=17))
    with pytest.raises(ValueError, match="has no default input shapes: pass --input"):
        load_model(f"{factory}:without_inputs", SourceOptions(batch=3))


def test_rotary_positions_have_no_limit():
    config = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
    config |= {"vocab_size": 100, "max_position_embeddings": 64}
    assert count("transformers:LlamaModel", seq=100, config=json.dumps(config)) > 0
    loaded = load_model("transformers:LlamaModel", SourceOptions(config=json.dumps(config), device="meta"))
    assert loaded.kwargs["input_ids"].shape == (1, 64)  # without --seq no more than the positions


@pytest.mark.parametrize("name", ["zoo:resnet50", "transformers:ViTModel"])
def test_a_dtype_casts_weights_and_inputs(name):
    loaded = load_model(name, SourceOptions(device="meta", dtype="bfloat16"))
    tensors = [*loaded.model.parameters(), *loaded.inputs, *loaded.kwargs.values()]
    assert {tensor.dtype for tensor in tensors if tensor.is_floating_point()} == {torch.bfloat16}


def test_every_command_casts_by_one_option(capsys):
    peaks = {}
    for dtype in ("fp32", "bf16"):
        assert main(["count", "zoo:lenet5", "--dtype", dtype, "--batch", "4", "--format", "json"]) == 0
        assert (
            dtype.replace("fp", "float").replace("bf", "bfloat")
            in json.loads(capsys.readouterr().out)["about"]["inputs"]
        )
        assert main(["memory", "zoo:lenet5", "--dtype", dtype, "--batch", "4", "--format", "json"]) == 0
        peaks[dtype] = capsys.readouterr().out
    assert peaks["fp32"] != peaks["bf16"]


def test_a_revision_and_a_saved_trace(capsys, tmp_path):
    path = tmp_path / "trace.json"
    assert main(["count", "zoo:lenet5", "--format", "trace", "--output", str(path)]) == 0
    budget = ["--budget", str(tmp_path / "b.yaml"), "--update"]
    assert main(["check", str(path), "--batch", "2", *budget]) == 2
    assert "contains its inputs: omit --batch" in capsys.readouterr().err
    assert main(["diff", "zoo:lenet5", str(path), "--batch", "2", "--format", "csv"]) == 0
