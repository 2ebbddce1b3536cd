"""Twins of module trees: by what is known of modules with the same attributes, and read module by module."""

import copy
import enum
import pickle

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, load_table
from fvflops.capture.model.first_read import FirstRead
from fvflops.capture.model.model_index import ModelIndex, read_modules
from fvflops.capture.model.read_module_tree import class_facts, read_tree
from fvflops.sources.meta import build_on_meta
from fvflops.trace import ModuleTree
from fvflops.zoo import ZOO
from tests.support.models.parts import Applied


class Kind(enum.IntEnum):
    LARGE = 3


class Described(nn.Module):
    """Public and private attributes of many types."""

    def __init__(self):
        super().__init__()
        self.kind = Kind.LARGE
        self.sizes = (1, (2, 3))
        self.flags = (True, 1.5, "text")
        self.size = torch.Size([2, 3])
        self.items = [1, 2, 3]
        self.nested = [1, [2]]
        self.names = {"a": 1}
        self.dtype = torch.float16
        self._private = 5
        self.weight = nn.Parameter(torch.empty(2, 3, dtype=torch.complex64), requires_grad=False)
        self.register_parameter("bias", None)
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool), persistent=False)
        self.register_buffer("nothing", None)
        self.child = None
        self.register_module("missing", None)

    def extra_repr(self):
        """Return a text that depends on an attribute that a module tree does not contain."""
        return f"{self.items}"


class Shared(nn.Module):
    """A module under several names, tied weights, and torch's classes with texts of their own."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = self.first
        self.third = nn.Sequential(nn.Linear(4, 4), self.first, nn.LayerNorm((4,)), nn.LayerNorm(4, bias=False))
        self.third[0].weight = self.first.weight
        self.list = nn.ParameterList([torch.empty(2), torch.empty(3)])
        self.pads = nn.ModuleDict({"a": nn.Conv2d(2, 2, 3, padding="same"), "b": nn.Conv2d(2, 2, (3, 1), padding=1)})
        self.odd = nn.AvgPool2d((True, 1))  # equal to (1, 1), and shown differently
        self.even = nn.AvgPool2d((1, 1))
        self.described = Described()


def overridden():
    model = nn.Sequential(nn.ReLU(), nn.ReLU())
    model[1].extra_repr = lambda: "mine"
    return model


def raising():
    model = nn.Sequential(nn.Dropout(0.1), nn.Dropout(0.1))
    del model[1].inplace  # its extra_repr raises
    return model


MODELS = {
    "described": Described,
    "shared": Shared,
    "overridden": overridden,
    "raising": raising,
    "compiled": lambda: nn.Sequential(torch.compile(nn.Linear(2, 2)), nn.ReLU()),
    "scripted": lambda: nn.Sequential(torch.jit.script(nn.Linear(2, 2)), nn.ReLU()),
    "encoder": lambda: nn.TransformerEncoderLayer(8, 2),
    "lstm": lambda: nn.LSTM(4, 8, 2, bidirectional=True, proj_size=2),
    **{name: ZOO[name].build for name in ("lenet5", "resnet50", "vit_b_16", "llama_tiny")},
}


@pytest.mark.parametrize("name", MODELS)
def test_trees_are_those_read_module_by_module(name):
    model = MODELS[name]() if name in ("compiled", "scripted") else build_on_meta(MODELS[name])
    index = ModelIndex(model)
    expected = read_tree(index.owner, index.names)
    assert index.tree.encode() == expected.encode()
    assert list(index.tree.by_name.items()) == list(expected.by_name.items())
    for _ in range(3):  # from the second time on with a cached layout
        assert read_modules(model) == expected


@pytest.mark.parametrize("name", MODELS)
def test_contents_are_those_of_a_cached_layout(name):
    model = MODELS[name]() if name in ("compiled", "scripted") else build_on_meta(MODELS[name])
    first, _, cached = ModelIndex(model), ModelIndex(model), ModelIndex(model)
    for attribute in ("modules", "tensors", "others", "empty", "keys", "values", "mappings"):
        before, after = list(getattr(first, attribute)), list(getattr(cached, attribute))
        if attribute in ("others", "empty"):
            before, after = sorted(before, key=id), sorted(after, key=id)
        assert list(map(id, before)) == list(map(id, after)), attribute
    for attribute in ("sizes", "rows", "metadata", "requires_grad", "devices", "regions"):
        assert getattr(first, attribute) == getattr(cached, attribute), attribute


def test_only_plain_models_are_read_by_attributes():
    assert FirstRead(Shared()).is_plain
    assert not FirstRead(MODELS["scripted"]()).is_plain


def test_trees_are_as_before_the_run():
    def forward(self, x):
        self.calls += 1
        self.linear.in_features = 7
        return self.linear(x)

    model = Applied(forward, calls=0, linear=nn.Linear(3, 2))
    tree = FlopCountAnalysis(model, torch.ones(1, 3)).trace().modules
    assert tree.root.attributes["calls"] == 0
    assert tree.by_name["linear"].attributes["in_features"] == 3
    assert tree.by_name["linear"].extra_repr == "in_features=3, out_features=2, bias=True"
    assert (model.calls, model.linear.in_features) == (0, 3)


def test_trees_are_plain_data_that_outlives_the_model():
    model = Shared()
    tree = read_modules(model)
    twin = read_tree(model, ModelIndex(model).names)
    del model
    for duplicate in (pickle.loads(pickle.dumps(tree)), copy.deepcopy(tree), ModuleTree.decode(tree.encode())):
        assert duplicate == twin
        assert isinstance(duplicate.by_name, dict)


def test_a_model_counted_once_is_counted_as_one_counted_often():
    table = load_table("exact")
    model, other = (build_on_meta(ZOO["resnet50"].build).eval() for _ in range(2))
    image = torch.zeros(1, 3, 64, 64)
    often = [FlopCountAnalysis(model, image, table=table) for _ in range(3)]
    once = FlopCountAnalysis(other, image, table=table)
    assert [analysis.by_module() for analysis in often] == [once.by_module()] * 3
    assert often[2].trace().to_json() == once.trace().to_json()


class Marker:
    """A base without a forward, as fully_shard puts before a module's class."""


class Marked(Marker, nn.Linear):
    pass


def test_a_base_without_a_forward_does_not_hide_the_class_whose_forward_runs():
    assert class_facts(Marked)[0] == (f"{__name__}.Marked", "torch.nn.Linear")
