"""Model names: patterns are expanded, and a name without its source, or with the wrong one, gets a suggestion."""

import pytest

from fvflops.sources.imports import import_file
from fvflops.sources.load import suggest_models
from fvflops.sources.patterns import expand_names
from fvflops.zoo import ZOO


def test_a_pattern_selects_from_the_names_of_its_source():
    assert expand_names(["zoo:*"]) == [f"zoo:{name}" for name in ZOO]
    assert expand_names(["zoo:llama3_[48]*b", "zoo:llama3_405b"]) == ["zoo:llama3_8b", "zoo:llama3_405b"]
    assert expand_names(["zoo:llama?_tiny", "zoo:no_such", "zoo:no_such"][1:]) == ["zoo:no_such"]


def test_folders_and_files_are_matched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("b", "a", "empty"):
        (tmp_path / "models" / name).mkdir(parents=True)
    (tmp_path / "models" / "a" / "config.json").write_text("{}")
    (tmp_path / "models" / "b" / "model_index.json").write_text("{}")
    assert expand_names(["hf:models/*"]) == ["hf:models/a", "hf:models/b"]
    for name in ("x.py", "y.py", "x.pt2"):
        (tmp_path / name).touch()
    assert expand_names(["*.py:build", "*.pt2"]) == ["x.py:build", "y.py:build", "x.pt2"]


def test_a_file_of_names_has_names_patterns_and_comments(tmp_path):
    path = tmp_path / "names.txt"
    path.write_text("\ufeff# candidates\n\nzoo:lenet5\r\n  zoo:vit*  \n")
    assert expand_names([f"@{path}", "zoo:gpt2"]) == ["zoo:lenet5", "zoo:vit_b_16", "zoo:gpt2"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("zoo:resmet*", r"'zoo:resmet\*' matches none of the \d+ models of zoo, such as zoo:resnet50"),
        ("hf:nowhere/*", r"'hf:nowhere/\*' matches no folder with a config.json"),
        ("nowhere/*.py:build", "matches no file"),
        ("@missing.txt", "@missing.txt: No such file or directory"),
        ("@empty.txt", "@empty.txt names no model"),
        ("@nested.txt", "@nested.txt: '@empty.txt' names another file of names"),
        ("@.", "@.: it is a folder"),
    ],
)
def test_mistakes_are_named(text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("# nothing\n")
    (tmp_path / "nested.txt").write_text("@empty.txt\n")
    with pytest.raises(ValueError, match=message):
        expand_names([text])


def names_of(source):
    if source == "torchvision":
        raise ValueError("torchvision is not installed")
    return {"zoo": ["resnet50"], "timm": ["resnet50d"], "transformers": ["BertModel"]}.get(source, [])


def test_a_near_name_is_suggested_from_each_library_that_is_installed():
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
