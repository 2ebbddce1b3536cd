"""Factories with arguments, folders of modules, and torch.hub folders."""

import json
from dataclasses import replace

import pytest
import torch

from fvflops.cli import main
from fvflops.sources import SourceOptions, load_model
from fvflops.zoo.gpt2 import GPT2, GPT2_124M
from fvflops.zoo.lenet5 import LeNet5
from fvflops.zoo.llama import CONFIGS, Llama

NETS = """
import torch
from torch import nn

def build(width, /, depth=2, *, act="relu", **more):
    layers = [nn.Linear(width, width) for _ in range(depth)]
    return nn.Sequential(*layers, *[nn.Linear(width, size) for size in more.values()]), torch.ones(1, width)

class Net(nn.Linear):
    def __init__(self, width: int = 3, bias: bool = True):
        super().__init__(width, 2, bias=bias)

class Configured(nn.Linear):
    def __init__(self, config):
        super().__init__(config.width, 2)

made = Net()
number = 3
"""


@pytest.fixture
def nets(tmp_path):
    path = tmp_path / "nets.py"
    path.write_text(NETS)
    return path


def count(capsys, *argv):
    assert main(["count", *map(str, argv), "--format", "json"]) == 0
    return json.loads(capsys.readouterr().out)["columns"]["flops"][""]


@pytest.mark.parametrize(
    ("arguments", "flops"),
    [
        (["width=8"], 2 * 64),
        (["width=8", "depth=3"], 3 * 64),
        (["width=8", "act=gelu", "head=5"], 2 * 64 + 40),  # a keyword of **more
    ],
)
def test_a_factory_is_called_with_arguments(capsys, nets, arguments, flops):
    options = [part for argument in arguments for part in ("--arg", argument)]
    assert count(capsys, f"{nets}:build", *options) == flops


def test_a_class_is_a_factory(capsys, nets):
    assert count(capsys, f"{nets}:Net", "--arg", "width=7", "--arg", "bias=False", "--input", "2,7") == 28


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("build", [], "nets.py:build(width, /, depth=2, *, act='relu', **more) needs width: pass --arg width=VALUE"),
        ("build", [], "or name a function that makes the object"),
        ("Configured", ["config=tiny"], "nets.py:Configured(config) reads its width: name a function that makes"),
        ("build", ["width"], "--arg width: write NAME=VALUE, such as width=64"),
        ("build", ["width=1", "width=2"], "--arg width=2: width is passed already"),
        ("Net", ["widht=3"], "Net(width=3, bias=True) has no such argument: did you mean 'width'?"),
        ("made", ["width=3"], "made is a module, not a factory: omit --arg"),
        ("number", [], "number is int: name a function that returns a torch.nn.Module, or a class"),
    ],
)
def test_wrong_arguments_are_errors_with_the_signature(capsys, nets, name, arguments, message):
    options = [part for argument in arguments for part in ("--arg", argument)]
    assert main(["count", f"{nets}:{name}", "--input", "1,3", *options]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_path_is_a_folder_to_import_from(capsys, tmp_path):
    (tmp_path / "my_nets_of_path.py").write_text(NETS)
    argv = ["my_nets_of_path:build", "--arg", "width=4", "--path", tmp_path]
    assert count(capsys, *argv) == 32
    assert main(["count", "my_nets_of_path:build", "--path", str(tmp_path / "no")]) == 2
    assert capsys.readouterr().err == f"fvflops: error: --path {tmp_path / 'no'}: there is no such folder\n"


def test_both_models_of_diff_get_arguments_also_in_a_subprocess(capsys, nets, tmp_path):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "nets.py").write_text("from old_parts import build\n")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "old_parts.py").write_text(NETS)
    argv = ["diff", f"{nets}:build", f"{tmp_path}/new/nets.py:build", "--path", f"{tmp_path}/parts"]
    assert main([*argv, "--arg", "width=8", "--arg-b", "width=16", "--format", "json"]) == 0
    report = json.dumps(json.loads(capsys.readouterr().out))
    assert "128" in report and "512" in report


def test_arguments_apply_to_the_model_that_takes_them(capsys, nets):
    assert main(["diff", f"{nets}:build", "zoo:lenet5", "--arg", "width=8"]) == 0
    assert main(["count", "x.pt2", "--arg", "width=8"]) == 2
    assert "--arg applies to zoo:NAME, timm:NAME" in capsys.readouterr().err


def test_sizes_of_the_zoo_are_arguments():
    for name, option, expected in (
        ("lenet5", "classes=7", lambda: LeNet5(classes=7)),
        ("llama_tiny", "layers=1", lambda: Llama(replace(CONFIGS["llama_tiny"], layers=1))),
        ("gpt2", "layers=2", lambda: GPT2(replace(GPT2_124M, layers=2))),
    ):
        model = load_model(f"zoo:{name}", SourceOptions(args=(option,), device="meta")).model
        with torch.device("meta"):
            other = expected()
        assert [tensor.shape for tensor in model.parameters()] == [tensor.shape for tensor in other.parameters()]
        assert len(list(model.parameters())) > 0


def test_settings_of_transformers_are_arguments(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    args = ("num_hidden_layers=2", "hidden_act=relu", "attn_implementation=eager")
    expected = transformers.BertConfig(num_hidden_layers=2, hidden_act="relu").to_dict()
    settings = {"model_type": "bert", "hidden_act": "silu", "architectures": ["BertModel"]}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    for name in ("transformers:BertModel", f"hf:{tmp_path}"):
        model = load_model(name, SourceOptions(args=args, device="meta", seq=4)).model
        found = model.config.to_dict()
        assert len(model.encoder.layer) == 2 and model.config._attn_implementation == "eager"
        assert {key: found[key] for key in expected if key != "architectures"} == {
            key: value for key, value in expected.items() if key != "architectures"
        }


def test_a_size_is_varied_beside_fixed_arguments(capsys, nets):
    argv = ["scale", f"{nets}:build", "--arg", "width=4", "--vary", "depth=1..6", "--format", "json"]
    assert main(argv) == 0
    assert "16" in capsys.readouterr().out
    assert main([*argv, "--arg", "depth=3"]) == 2
    assert "--arg depth: --vary depth sets it: omit one" in capsys.readouterr().err


def test_libraries_pass_arguments_to_their_constructors():
    from tests.support.schemas.torchvision_schemas import define_torchvision_schemas

    define_torchvision_schemas()
    subject = load_model("timm:resnet18", SourceOptions(args=("num_classes=7", "in_chans=1"), device="meta"))
    assert subject.model.fc.out_features == 7 and subject.inputs[0].shape == (1, 1, 224, 224)
    subject = load_model("torchvision:resnet18", SourceOptions(args=("num_classes=7",), device="meta"))
    assert subject.model.fc.out_features == 7
    with pytest.raises(ValueError, match=r"torchvision:resnet18 with --arg num_clases=7: .*num_clases"):
        load_model("torchvision:resnet18", SourceOptions(args=("num_clases=7",)))
    with pytest.raises(ValueError, match="--arg pretrained: timm:resnet18 is built with pretrained=False"):
        load_model("timm:resnet18", SourceOptions(args=("pretrained=True",)))


HUB = """
dependencies = ["torch", {dependency!r}]
from hub_parts import Net

def net(pretrained=True, width=4):
    if pretrained:
        raise RuntimeError("this would download weights")
    return Net(width, width)
"""


@pytest.fixture
def hub(tmp_path):
    (tmp_path / "hubconf.py").write_text(HUB.format(dependency="torch"))
    (tmp_path / "hub_parts.py").write_text("from torch.nn import Linear as Net\n")
    return tmp_path


def test_an_entry_point_of_a_torch_hub_folder_is_a_factory_without_weights(hub):
    ours = load_model(f"torchhub:{hub}:net", SourceOptions(args=("width=6",), inputs=("1,6",))).model
    theirs = torch.hub.load(str(hub), "net", source="local", pretrained=False, width=6)
    assert [item.shape for item in ours.parameters()] == [item.shape for item in theirs.parameters()]


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("{hub}:nett", (), "hubconf.py has no 'nett': the nearest is 'net'"),
        ("{hub}:net", ("pretrained=True",), "is built with pretrained=False: omit it"),
        ("{hub}:net", ("widht=3",), "did you mean 'width'?"),
        ("{hub}/no:net", (), "only local folders are loaded, not repositories"),
        ("net", (), "names no entry point: write torchhub:FOLDER:ENTRYPOINT"),
    ],
)
def test_a_wrong_entry_point_is_an_error_that_says_what_to_do(hub, name, args, message):
    with pytest.raises(ValueError) as caught:
        load_model(f"torchhub:{name.format(hub=hub)}", SourceOptions(args=args))
    assert message in str(caught.value)


def test_a_missing_package_of_a_torch_hub_folder_is_named(hub):
    (hub / "hubconf.py").write_text(HUB.format(dependency="no_such_package_here"))
    with pytest.raises(ValueError, match="needs no_such_package_here: pip install no_such_package_here"):
        load_model(f"torchhub:{hub}:net")
