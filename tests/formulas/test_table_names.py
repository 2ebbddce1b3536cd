"""The names in a table: what must exist, what may come later, and that an error cuts what it replays."""

import importlib
import sys

import pytest
import torch

from fvflops.formulas import TableError
from tests.support.table_folder import TableFolder


@pytest.fixture
def load(tmp_path):
    return TableFolder(tmp_path)


def test_what_may_be_loaded_later_is_not_refused(load):
    table = load(
        "zero_flop: [mylib::scan, fusion::mm, torchvision::later]\nmodules:\n  mine.Net: {macs: 1}\n  Net: {macs: 1}\n"
        "  __main__.Net: {macs: 1}\n  torch.LSTM: {macs: 1}"
    )
    assert len(table.modules) == 4


def test_a_class_in_a_submodule_that_is_not_imported_yet(load, tmp_path, monkeypatch):
    package = tmp_path / "early"
    package.mkdir()
    for name in ("__init__", "late"):
        (package / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(sys.modules, "early", importlib.import_module("early"))
    assert load("modules:\n  early.late.Net: {macs: 1}").modules
    for name in ("early.never.Net", "early.Net"):
        with pytest.raises(TableError, match=f"no module class is named {name}: did you mean"):
            load(f"modules:\n  {name}: {{macs: 1}}")
    assert "early.late" not in sys.modules


def test_a_namespace_that_arrives_is_known_from_then_on(load):
    with pytest.raises(TableError, match="did you mean aten::"):
        load("zero_flop: [atenn::arrived]")
    with torch.library._scoped_library("atenn", "DEF") as library:
        library.define("arrived(Tensor x) -> Tensor")
        assert load("ops:\n  atenn::arrived: {flops: numel(x)}").row("atenn::arrived").flops == "numel(x)"
        with pytest.raises(TableError, match="did you mean x"):
            load("ops:\n  atenn::arrived: {flops: numel(xx)}")


def test_a_class_of_the_programs_own(load):
    class Encoder(torch.nn.Module):
        pass

    home = Encoder.__module__
    assert load(f"modules:\n  {home}.Encoder: {{macs: 1}}").modules
    with pytest.raises(TableError, match=f"did you mean {home}.Encoder"):
        load(f"modules:\n  {home}.Encodr: {{macs: 1}}")


LONG = "x" * 900_000
LONG_MISTAKES = {
    "a list": f"zero_flop: {LONG}",
    "a mapping": f"ops: {LONG}",
    "a row": f"ops:\n  aten::mm: {LONG}",
    "an op": f"zero_flop: [{LONG}]",
    "a key": f"? {LONG}\n: 1",
    "a key of a row": f"ops:\n  aten::mm:\n    ? {LONG}\n    : 1",
    "an op of a row": f"ops:\n  ? {LONG}\n  : zero_flop",
    "a module": f"modules:\n  ? {LONG}\n  : {{macs: 1}}",
    "a tag": f"description: !{LONG} 1",
    "an anchor": f"description: &{LONG} 1",
    "an alias": f"description: *{LONG}",
    "multiply_add": f"multiply_add: {LONG}",
    "opaque": f"opaque: {LONG}",
    "extends": f"extends: {LONG}",
    "label": f"ops:\n  aten::mm: {{macs: 1, label: {LONG}}}",
    "use": f"ops:\n  aten::mm: {{use: {LONG}}}",
    "macs": f"ops:\n  aten::mm: {{macs: {LONG}}}",
    "shapes": f"ops:\n  aten::mm: {{shapes: {LONG}, macs: 1}}",
    "shapes by name": f"ops:\n  aten::mm: {{shapes: {{self: {LONG}}}, macs: 1}}",
    "example": f"ops:\n  aten::mm: {{macs: 1, example: {LONG}}}",
}


@pytest.mark.parametrize("name", LONG_MISTAKES)
def test_a_message_does_not_replay_a_whole_file(load, tmp_path, name):
    with pytest.raises(TableError) as caught:
        load(LONG_MISTAKES[name])
    assert len(str(caught.value).removeprefix(str(tmp_path))) < 800
