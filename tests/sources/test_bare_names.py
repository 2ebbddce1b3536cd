"""Suggestions for a model's name without its source, or with the wrong one."""

import pytest

from fvflops.sources.imports import import_file
from fvflops.sources.load import suggest_models


def names_of(source):
    if source == "torchvision":
        raise ValueError("torchvision is not installed")
    return {"zoo": ["resnet50"], "timm": ["resnet50d"], "transformers": ["BertModel"]}.get(source, [])


def test_a_near_name_is_suggested_from_each_library_that_is_installed():
    assert suggest_models("resnet50", names_of) == ": did you mean zoo:resnet50?"
    assert suggest_models("resnet5O", names_of) == ": did you mean zoo:resnet50?"
    assert suggest_models("BertModel", names_of) == ": did you mean transformers:BertModel?"
    assert suggest_models("ResNet50", names_of) == ": did you mean zoo:resnet50?"
    assert suggest_models("nothing", names_of) == ""


def test_a_folder_with_a_configuration_is_one_of_hugging_face(tmp_path):
    assert suggest_models(str(tmp_path), names_of) == ""
    (tmp_path / "config.json").write_text("{}")
    assert suggest_models(str(tmp_path), names_of) == f": did you mean hf:{tmp_path}?"


def test_a_class_of_a_module_here_wants_a_colon(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "net.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert suggest_models("models.net.Net", names_of) == ": did you mean models.net:Net?"


def test_a_file_that_imports_relatively_is_named_as_a_module(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "net.py").write_text("from .layers import Block")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"it imports relatively: write models\.net:FACTORY"):
        import_file("models/net.py")
