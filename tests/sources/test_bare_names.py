"""Suggestions for a model's name without its source."""

from fvflops.sources.bare_names import suggest_models


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
