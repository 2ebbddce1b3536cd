"""A model is read anew where it has changed since the last time, and nothing of it is kept alive."""

import gc
import sys
import weakref
from types import ModuleType

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, TrainingStepAnalysis, parameter_count, record
from fvflops.capture.model.model_index import ModelIndex, read_modules


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.act = nn.ReLU()
        self.scale = 2

    def forward(self, x):
        return self.second(self.act(self.first(x))) * self.scale


def tie(model):
    model.second.weight = model.first.weight


def share(model):
    model.second = model.first


def rename(model):
    model.first._parameters = {"kernel": model.first._parameters["weight"], "bias": model.first._parameters["bias"]}


def swap_keys(model):
    model._modules["first"], model._modules["second"] = model._modules["second"], model._modules["first"]


def replace_by_its_like(model):
    model.first = nn.Linear(4, 4)


def replace_by_another(model):
    model.first = nn.Conv1d(4, 4, 1)


def remove(model):
    del model.act


def forget_a_child(model):
    model.act = None


def add_a_buffer(model):
    model.register_buffer("mask", torch.ones(3))


def wrap(model):
    model.first = torch.compile(model.first)


def reshape(model):
    model.first.weight.data = torch.ones(2, 8)


def freeze(model):
    model.first.weight.requires_grad_(False)


def change_a_number(model):
    model.scale = True


def change_the_class(model):
    model.act.__class__ = nn.Sigmoid


CHANGES = [
    *(tie, share, rename, swap_keys, replace_by_its_like, replace_by_another, remove),
    *(forget_a_child, add_a_buffer, wrap, reshape, freeze, change_a_number, change_the_class),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_is_read_as_one_that_was_never_read(change):
    model, fresh = Net(), Net()
    before = read_modules(model)
    change(model)
    change(fresh)
    assert read_modules(model) == read_modules(fresh)
    assert (read_modules(model) == before) == (change in (swap_keys, replace_by_its_like, wrap))
    assert ModelIndex(model).rows == ModelIndex(fresh).rows


def test_what_hangs_on_an_unchanged_model_is_read_each_time():
    model = Net()
    assert ModelIndex(model).empty and not ModelIndex(model).others
    calls = []
    handle = model.act.register_forward_hook(lambda module, *_: calls.append(module))
    hooks = model.act._forward_hooks
    assert any(value is hooks for value in ModelIndex(model).others)
    FlopCountAnalysis(model, torch.ones(1, 4)).total()
    assert calls and list(hooks) == [handle.id]


def test_resized_storages_are_read_each_time():
    model = nn.Linear(4, 4, bias=False)
    assert [row[0] for row in ModelIndex(model).rows] == [64]
    model.weight.untyped_storage().resize_(0)
    assert [row[0] for row in ModelIndex(model).rows] == [0]


@pytest.mark.parametrize("grad", [False, True])
def test_an_analysis_keeps_nothing_of_the_model_alive(grad):
    """Not even until the collector of cycles comes by."""
    model = Net().requires_grad_(grad)
    removed = weakref.ref(model.act)
    FlopCountAnalysis(model, torch.ones(1, 4)).total()
    parameter_count(model)
    gc.collect()
    gc.disable()
    try:
        FlopCountAnalysis(model, torch.ones(1, 4)).total()
        alive = weakref.ref(model)
        weights = weakref.ref(model.first.weight)
        del model.act
        assert removed() is None
        del model
        assert alive() is None and weights() is None
    finally:
        gc.enable()


def _refuse(*_):
    raise RuntimeError("modules are not to be compared")


COMPARED = {
    "equal to all": {"__eq__": lambda self, other: True, "__hash__": lambda self: 7},
    "equal by class": {"__eq__": lambda self, other: type(self) is type(other), "__hash__": lambda self: 3},
    "unhashable": {"__eq__": lambda self, other: True, "__hash__": None},
    "raising": {"__eq__": _refuse, "__hash__": _refuse},
    "by tensors": {"__eq__": lambda self, other: torch.zeros(2) == 0, "__hash__": lambda self: 1},
}


@pytest.mark.parametrize("root", [False, True], ids=["a part", "the root too"])
@pytest.mark.parametrize("kind", COMPARED)
def test_modules_are_told_apart_whatever_equals_them(kind, root, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", ModuleType("bitsandbytes"))  # whose layers are searched for
    layer = type("Layer", (nn.Linear,), COMPARED[kind])
    whole = type("Whole", (nn.Sequential,), COMPARED[kind] if root else {})
    model = whole(layer(6, 6), nn.Tanh(), layer(6, 6), layer(6, 4))
    x = torch.ones(5, 6)
    forward = {"": 480, "0": 180, "1": 0, "2": 180, "3": 120}
    for execution in ("shapes", "real"):
        assert FlopCountAnalysis(model, x, execution=execution).by_module() == forward
    step = TrainingStepAnalysis(model, x, loss=torch.sum, checkpoint=[layer])
    # The input needs no gradient.
    assert step.by_module() == {"": 2 * 180 + 3 * 180 + 3 * 120, "0": 360, "1": 0, "2": 540, "3": 360}
    with record(model) as run:
        model(x).sum().backward()
    assert run.by_module() == step.by_module()
    assert all(part._parameters["weight"].grad is not None for part in (model[0], model[2], model[3]))
