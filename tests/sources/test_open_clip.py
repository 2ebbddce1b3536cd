"""Models of open_clip against the costs that the project publishes."""

import logging

import pytest

from fvflops import FlopCountAnalysis, parameter_count
from fvflops.sources import SourceOptions, load_model
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas

define_torchvision_schemas()
pytest.importorskip("open_clip", reason="open_clip is not installed")


# github.com/mlfoundations/open_clip, docs/model_profile.csv: millions of parameters, and GFLOPs with 2 for a MAC.
@pytest.mark.parametrize(
    ("name", "parameters", "gflops"),
    [
        ("RN50", 102.01, 18.18),
        ("ViT-B-32", 151.28, 14.78),
        ("ViT-L-14", 427.62, 175.33),
        ("convnext_base", 151.52, 36.67),
        ("ViT-B-16-SigLIP", 203.16, 46.44),
    ],
)
def test_costs_are_those_published(name, parameters, gflops, caplog):
    subject = load_model(f"open_clip:{name}", SourceOptions(device="meta"))
    flops = FlopCountAnalysis(subject.model, subject.inputs, kwargs=subject.kwargs, warn=False)
    assert parameter_count(subject.model)[""] / 1e6 == pytest.approx(parameters, abs=0.006)
    assert 2 * flops.total() / 1e9 == pytest.approx(gflops, rel=0.01)


@pytest.mark.parametrize("option", [{"args": ("force_image_size=96",)}, {"image_size": (96, 96)}])
def test_arguments_are_those_of_create_model(option):
    options = SourceOptions(device="meta", **option)
    subject = load_model("open_clip:ViT-B-32", options)
    assert subject.kwargs["image"].shape == (1, 3, 96, 96)
    assert subject.kwargs["text"].shape == (1, 77)


def test_the_programs_logging_stays_as_it_is():
    handlers = list(logging.getLogger().handlers)
    load_model("open_clip:ViT-S-32-alt", SourceOptions(device="meta"))
    assert logging.getLogger().handlers == handlers


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("ViT-B-33", (), "open_clip has no 'ViT-B-33': the nearest are 'ViT-B-32'"),
        ("ViT-B-32", ("pretrained=openai",), "--arg pretrained: open_clip:ViT-B-32 is built with pretrained=None"),
        ("roberta-ViT-B-32", (), "roberta-base, whose configuration is not in the local cache: download it first by"),
    ],
)
def test_a_wrong_model_is_an_error_that_says_what_to_do(name, args, message, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(ValueError) as caught:
        load_model(f"open_clip:{name}", SourceOptions(device="meta", args=args))
    assert message in str(caught.value)
