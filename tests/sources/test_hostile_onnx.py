"""ONNX files are data: names in them become no code, and they read no other file."""

import warnings

import pytest
import torch
from torch import nn

from fvflops.cli import main
from fvflops.sources import load_model
from fvflops.sources import onnx as onnx_source
from tests.support.hostile.forbidden_actions import ForbiddenAction, forbidding_actions
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas

define_torchvision_schemas()
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnx2torch")


def set_scopes(model, text):
    for node in model.graph.node:
        del node.metadata_props[:]
        for key, value in (
            ("pkg.torch.onnx.name_scopes", repr(["", text, "op"])),
            ("pkg.torch.onnx.class_hierarchy", repr(["Net", "Layer", "op"])),
        ):
            entry = node.metadata_props.add()
            entry.key, entry.value = key, value


def set_node_names(model, text):
    for node in model.graph.node:
        del node.metadata_props[:]
        node.name = f"/{text}/op"


def rename_weight(model, text):
    old = model.graph.initializer[0].name
    model.graph.initializer[0].name = text
    for node in model.graph.node:
        node.input[:] = [text if name == old else name for name in node.input]


def put_weight_elsewhere(model, text):
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = 1
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", text


@pytest.fixture
def hostile_models(tmp_path):
    """Return name → an ONNX model that would run code, or read another file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(nn.Sequential(nn.Linear(4, 3)), (torch.ones(2, 4),), tmp_path / "x.onnx", verbose=False)
    code = """training"), open("canary", "w"), getattr(self, "training"""
    models = {}
    for name, change, text in (
        ("names of modules", set_scopes, code),
        ("names of modules, over two lines", set_scopes, code.replace(", ", ",\n")),
        ("no list of modules", set_scopes, "[" * 2000),
        ("names of nodes", set_node_names, code),
        ("name of a weight", rename_weight, code),
        ("weights elsewhere", put_weight_elsewhere, "/etc/passwd"),
        ("weights above", put_weight_elsewhere, "../../../../../../etc/passwd"),
    ):
        models[name] = onnx.load(tmp_path / "x.onnx")
        change(models[name], text)
    return models


def test_hostile_onnx_is_refused(tmp_path, monkeypatch, hostile_models, capsys):
    monkeypatch.chdir(tmp_path)
    for name, model in hostile_models.items():
        path = tmp_path / "y.onnx"
        path.write_bytes(model.SerializeToString())
        with forbidding_actions(tmp_path) as seen:
            assert main(["count", str(path)]) == 2 or name == "no list of modules", name
            error = capsys.readouterr().err
            with pytest.raises(ValueError) if name != "no list of modules" else warnings.catch_warnings():
                load_model(str(path))
        assert not seen and error.count("\n") <= 1, name


def test_without_the_check_names_in_onnx_are_code(tmp_path, monkeypatch, hostile_models):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(onnx_source, "_check_names", lambda *arguments: None)
    (tmp_path / "y.onnx").write_bytes(hostile_models["names of modules"].SerializeToString())
    with forbidding_actions(tmp_path) as seen, pytest.raises(ForbiddenAction):
        subject = load_model(str(tmp_path / "y.onnx"))
        subject.model(*subject.inputs)
    assert seen
