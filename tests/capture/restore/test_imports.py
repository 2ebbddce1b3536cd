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
Loader = type(torch.__loader__)  # of source files
VALUE = "import torch\nVALUE = torch.zeros(3) + 1\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("imported_")]:
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

    first = count_ops(model, torch.ones(2, 4), execution=execution)
    module = sys.modules["imported_inner"]
    assert first == count_ops(model, torch.ones(2, 4), execution=execution) and len(first) == 1
    assert type(module.TABLE) is torch.Tensor and (module.NUMBERS == 4).all() and module.OUT.shape == (4, 4)
    assert all(type(parameter) is nn.Parameter and not parameter.is_meta for parameter in module.LAYER.parameters())
    assert "exec_module" not in vars(Loader)


def test_a_body_that_another_loader_runs_is_not_recorded(folder, monkeypatch):
    class Rewriting(Loader):
        def exec_module(self, module):  # as pytest's loader, which does not call Python's
            exec(self.get_code(module.__name__), vars(module))

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            file = folder / f"{name}.py"
            loader = Rewriting(name, str(file))
            return importlib.machinery.ModuleSpec(name, loader) if file.exists() else None

    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    (folder / "imported_rewritten.py").write_text(VALUE)
    before = vars(importlib._bootstrap)["_load_unlocked"]
    counted = count_ops(lambda x: importlib.import_module("imported_rewritten").VALUE * x, torch.ones(3))
    assert counted == [("aten::mul.Tensor", 1)] and (sys.modules["imported_rewritten"].VALUE == 1).all()
    assert vars(importlib._bootstrap)["_load_unlocked"] is before


def test_an_import_that_fails_is_the_models_error_and_leaves_nothing(folder):
    (folder / "imported_wrong.py").write_text("import torch\nx = torch.ones(3)\nraise KeyError('wrong')\n")
    for _ in range(2):
        with pytest.raises(KeyError, match="wrong"):
            record_call(lambda x: importlib.import_module("imported_wrong"), (torch.ones(2),))
        assert "exec_module" not in vars(Loader)
        assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_an_import_may_be_looked_for_reloaded_or_in_a_thread(folder):
    for name in ("imported_here", "imported_there"):
        (folder / f"{name}.py").write_text(VALUE)

    def model(x):
        assert importlib.util.find_spec("imported_here").loader.get_source("imported_here").startswith("import")
        importlib.reload(importlib.import_module("imported_here"))
        thread = threading.Thread(target=importlib.import_module, args=("imported_there",))
        thread.start()
        thread.join()
        return x * 2

    assert count_ops(model, torch.ones(3), execution="shapes") == [("aten::mul.Tensor", 1)]
    assert all((sys.modules[name].VALUE == 1).all() for name in ("imported_here", "imported_there"))


def test_a_body_is_run_once_in_recordings_inside_each_other(folder):
    (folder / "imported_inside.py").write_text(VALUE)
    x = torch.ones(3)

    def outer(x):
        record_call(lambda x: importlib.import_module("imported_inside").VALUE * x, (x,))
        return importlib.import_module("imported_inside").VALUE * x

    assert count_ops(outer, x, execution="shapes") == [("aten::mul.Tensor", 1)]
    assert (sys.modules["imported_inside"].VALUE == 1).all()


def test_a_loader_of_a_class_that_extends_pythons_runs_bodies_unrecorded(folder):
    (folder / "imported_checked.py").write_text(VALUE)

    class Checked(Loader):
        def exec_module(self, module):
            super().exec_module(module)

    load = Checked("imported_checked", str(folder / "imported_checked.py")).exec_module
    module = type(sys)("imported_checked")
    assert count_ops(lambda x: load(module) or x * 2, torch.ones(3)) == [("aten::mul.Tensor", 1)]
    assert (module.VALUE == 1).all()
