"""The sweep over a library's models: its names, ways of building for real execution, and what it reports."""

import pytest
import torch
from torch import nn

from fvflops.sweep import ModelCount
from tests.support.models.quick_weights import quick_weights
from tests.support.tools import load_tool

libraries = load_tool("sweeping.libraries")

SCAN = ModelCount("timm:scan", flops=1, execution="real", unsupported="aten::x ×2; unseen::f ×1 in 'scan' at net.py:42")


@pytest.fixture
def tool():
    return load_tool("sweep.py")


def test_unseen_work_is_said(tool):
    plain = ModelCount("timm:plain", flops=1, execution="real", unsupported="aten::x ×1")
    text = tool.describe([plain, SCAN], 1.0, 2)
    assert "2 models: 2 counted; 0 in shape execution, 2 in real execution" in text
    assert "unseen work: in 1 models" in text
    assert "  unseen in timm:scan: unseen::f ×1 in 'scan' at net.py:42" in text
    assert "  unsupported aten::x: in 2 models" in text


def test_names_are_chosen_by_what_follows_their_source(tool):
    names = ["timm:vit_a", "timm:resnet", "timm:vit_b"]
    assert tool.choose(names, "vit*") == ["timm:vit_a", "timm:vit_b"]
    with pytest.raises(ValueError, match=r"--only 'bert\*' matches none of the 3 models"):
        tool.choose(names, "bert*")


def test_every_model_type_of_transformers_has_a_class():
    names = libraries.list_names("transformers")
    assert len(names) == len(set(names)) > 400
    assert {"transformers:BertModel", "transformers:LlamaModel", "transformers:CLIPModel"} <= set(names)


@pytest.mark.parametrize(
    ("name", "shape"), [("timm:resnet18", (1, 3, 128, 128)), ("timm:vit_tiny_patch16_224", (1, 3, 224, 224))]
)
def test_real_execution_takes_smaller_images_where_the_model_does(name, shape):
    _, (image,) = libraries.make_factory(name, "quick")()
    assert image.shape == shape


def test_the_smallest_configuration_of_transformers_has_two_layers():
    model, inputs = libraries.make_factory("transformers:BertModel", "tiny")()
    assert model.config.num_hidden_layers == 2
    assert inputs["input_ids"].shape[-1] == 32


def test_another_table_than_that_of_the_file_is_refused(tool, tmp_path, capsys):
    path = tmp_path / "rows.csv"
    path.write_text("a,b\n")
    assert tool.main(["timm", "--only", "resnet18", "--out", str(path)]) == 2
    assert "rows.csv is not from a sweep by this version of fvflops" in capsys.readouterr().err


def test_quick_weights_are_random_and_leave_torch_as_it_was():
    before = torch.Tensor.normal_
    with quick_weights():
        weight = nn.init.trunc_normal_(torch.empty(300, 100))
    assert torch.Tensor.normal_ is before and "erfinv_" not in vars(torch.Tensor)
    assert weight.isfinite().all() and len(weight.unique(dim=0)) == 300
