"""Imports during a recording: their bodies are not recorded, and leave what they would leave without it."""

import importlib
import sys
import threading

import pytest
import torch
from torch import nn

from fvflops import record_call

BODY = """
import torch
TABLE = torch.ones(4, 4) @ torch.ones(4, 4)
LAYER = torch.nn.Linear(4, 4)
OUT = LAYER(TABLE)
NUMBERS = TABLE.numpy()
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    names = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - names:
        if name.startswith("imported_"):
            del sys.modules[name]


def count_ops(model, *inputs, **options):
    trace = record_call(model, inputs, **options)
    return sorted((trace.signatures[index].op, calls) for (index, _, _), calls in trace.calls.items())


@pytest.mark.parametrize("execution", ["shapes", "real"])
def test_a_body_is_not_recorded_and_its_constants_have_values(folder, execution):
    (folder / "imported_constants.py").write_text("from imported_inner import *\n")
    (folder / "imported_inner.py").write_text(BODY)

    def model(x):
        import imported_constants

        return x @ imported_constants.TABLE

    finders, x = list(sys.meta_path), torch.ones(2, 4)
    first = count_ops(model, x, execution=execution)
    module = sys.modules["imported_inner"]
    assert first == count_ops(model, x, execution=execution) == [("aten::matmul", 1)] or len(first) == 1
    assert type(module.TABLE) is torch.Tensor and (module.NUMBERS == 4).all() and module.OUT.shape == (4, 4)
    assert all(type(parameter) is nn.Parameter and not parameter.is_meta for parameter in module.LAYER.parameters())
    assert sys.meta_path == finders
    assert "exec_module" not in vars(module.__spec__.loader) and module.__loader__ is module.__spec__.loader


def test_an_import_that_fails_is_the_models_error_and_leaves_nothing(folder):
    (folder / "imported_wrong.py").write_text("import torch\nx = torch.ones(3)\nraise KeyError('wrong')\n")
    finders = list(sys.meta_path)
    for _ in range(2):
        with pytest.raises(KeyError, match="wrong"):
            record_call(lambda x: importlib.import_module("imported_wrong"), (torch.ones(2),))
        assert sys.meta_path == finders and not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_an_import_may_be_looked_for_reloaded_or_in_a_thread(folder):
    (folder / "imported_here.py").write_text("import torch\nVALUE = torch.zeros(3) + 1\n")
    (folder / "imported_there.py").write_text("import torch\nVALUE = torch.zeros(3) + 1\n")

    def model(x):
        assert importlib.util.find_spec("imported_here").loader.get_source("imported_here").startswith("import")
        importlib.reload(importlib.import_module("imported_here"))
        thread = threading.Thread(target=importlib.import_module, args=("imported_there",))
        thread.start()
        thread.join()
        return x * 2

    assert [op for op, _ in count_ops(model, torch.ones(3), execution="shapes")] == ["aten::mul.Tensor"]
    assert all((sys.modules[name].VALUE == 1).all() for name in ("imported_here", "imported_there"))


def test_recordings_inside_each_other_share_one_finder(folder):
    (folder / "imported_inside.py").write_text("import torch\nVALUE = torch.zeros(3) + 1\n")
    lengths = []

    def inner(x):
        lengths.append(len(sys.meta_path))
        importlib.import_module("imported_inside")
        return x * 2

    def outer(x):
        lengths.append(len(sys.meta_path))
        record_call(inner, (torch.ones(3),))
        return x * 2

    before = len(sys.meta_path)
    record_call(outer, (torch.ones(3),))
    assert lengths == [before + 1] * 2 and len(sys.meta_path) == before
