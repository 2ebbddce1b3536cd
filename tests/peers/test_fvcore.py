"""fvcore itself, run beside `table="fvcore"`: numbers, keys and texts are equal, but for a short list."""

import logging
import warnings
from collections import Counter

import pytest
import torch
from fvcore import nn as fvcore
from fvcore.nn import jit_analysis
from torch import nn

import fvflops
from tests.support.models.parts import Applied
from tests.support.models.whole_models import MODELS, USUAL, build_case
from tests.support.random_cases import long_except
from tests.support.reports.fvcore_text import print_as_fvcore

# Model, the minimal reproduction → (why, what differs). Nothing else may differ, and each of these must.
KNOWN_DIFFERENCES = {
    "unused": (
        "fvcore traces a graph, from which torch drops ops whose results nobody uses; they run, so fvflops counts them",
        frozenset(
            {
                *("total", "by_operator", "by_module", "by_module_and_operator", "caller", "uncalled_modules"),
                *("activations", "activations total", "flop_count_str", "flop_count_table"),
                *("flop_count_str with activations", "flop_count_table with activations"),
            }
        ),
    ),
    "small_einsum": (
        "fvcore makes einsum's flops a float, which it prints as 24.0 where they are at most 100; fvflops prints 24",
        frozenset({"flop_count_str", "flop_count_str with activations"}),
    ),
}


def call(function, *args, **kwargs):
    return function(*args, **kwargs)


def measure(library, model, inputs, **options):
    """Return everything that fvcore's face says of a model, from fvcore or from fvflops."""
    flops = library.FlopCountAnalysis(model, inputs, **options)
    activations = library.ActivationCountAnalysis(model, inputs, **options)
    write = print_as_fvcore if library is fvcore else call
    measured = {
        "total": flops.total(),
        "by_operator": flops.by_operator(),
        "by_module": flops.by_module(),
        "by_module_and_operator": flops.by_module_and_operator(),
        "uncalled_modules": flops.uncalled_modules(),
        "activations": activations.by_module_and_operator(),
        "activations total": activations.total(),
        "parameter_count": dict(library.parameter_count(model)),
        "flop_count_str": library.flop_count_str(flops),
        "flop_count_table": write(library.flop_count_table, flops),
        "flop_count_str with activations": library.flop_count_str(flops, activations),
        "flop_count_table with activations": write(
            library.flop_count_table, flops, max_depth=5, activations=activations, show_param_shapes=False
        ),
        "parameter_count_table": write(library.parameter_count_table, model),
    }
    measured["caller"] = flops.copy().ancestor_mode("caller").by_module() if library is fvflops else None
    if library is fvcore:
        measured["caller"] = library.FlopCountAnalysis(model, inputs).ancestor_mode("caller").by_module()
    return measured


def differences(ours, theirs):
    """Return what differs, by name; both sides must say the same things."""
    assert ours.keys() == theirs.keys()
    return {name: (ours[name], theirs[name]) for name in theirs if ours[name] != theirs[name]}


@pytest.fixture(autouse=True)
def quiet():
    logging.disable(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def one_graph(monkeypatch):
    """Let fvcore trace a model once: its graph is the same for every analysis, and takes longest."""
    trace, graphs = jit_analysis._get_scoped_trace_graph, {}

    def trace_once(model, inputs, aliases):
        if (model, inputs) not in graphs:
            graphs[model, inputs] = trace(model, inputs, aliases)
        return graphs[model, inputs]

    monkeypatch.setattr(jit_analysis, "_get_scoped_trace_graph", trace_once)


@pytest.mark.parametrize("name", long_except(USUAL, MODELS))
def test_all_that_fvcore_says_is_equal(name, one_graph):
    model, inputs = build_case(name)
    found = differences(measure(fvflops, model, inputs, table="fvcore"), measure(fvcore, model, inputs))
    _, expected = KNOWN_DIFFERENCES.get(name, ("", frozenset()))
    assert found.keys() == expected, {what: found[what] for what in found.keys() ^ expected if what in found}


def test_the_known_differences_are_few():
    assert len(KNOWN_DIFFERENCES) <= 10
    assert KNOWN_DIFFERENCES.keys() <= MODELS.keys()
    assert len(MODELS) >= 25


def test_the_comparison_sees_a_difference():
    model, inputs = build_case("toy")
    theirs = measure(fvcore, model, inputs)
    wrong = dict(theirs, total=theirs["total"] + 1, flop_count_str=theirs["flop_count_str"] + " ")
    assert differences(wrong, theirs).keys() == {"total", "flop_count_str"}


def test_the_unsupported_ops_are_those_of_fvcore():
    model, inputs = build_case("torchvision:mobilenet_v3_small")
    ours = fvflops.FlopCountAnalysis(model, inputs, table="fvcore")
    theirs = fvcore.FlopCountAnalysis(model, inputs)
    assert ours.total() == theirs.total()
    assert ours.unsupported_ops() == theirs.unsupported_ops()
    assert ours.unsupported_ops("features.4") == theirs.unsupported_ops("features.4")


@pytest.mark.parametrize("function", ["flop_count", "activation_count"])
def test_the_functions_return_what_fvcores_do(function):
    model, inputs = build_case("zoo:lenet5")
    ours, theirs = getattr(fvflops, function)(model, inputs), getattr(fvcore, function)(model, inputs)
    assert ours[0] == theirs[0] and type(ours[0]) is type(theirs[0])
    assert sum(ours[1].values()) == sum(theirs[1].values())


def test_handles_of_fvcore_run_unmodified():
    """fvcore's own handles, and handles in the manner of published ones, give the same numbers in both."""
    from fvcore.nn import jit_handles

    def softmax(inputs, outputs):
        assert inputs[1].toIValue() == -1 and not inputs[1].isCompleteTensor()
        return torch.Size(inputs[0].type().sizes()).numel() * 3

    def einsum(inputs, outputs):
        names = {value.debugName() for value in inputs[1].node().inputs()}
        assert len(names) == 2
        return {"mine": sum(value.type().dim() for value in inputs[1].node().inputs())}

    def forward(self, x):
        x = self.conv(x).softmax(-1)
        return torch.einsum("nchw,ncgw->nhg", x, x + 1)

    handles = {
        "aten::_convolution": jit_handles.generic_activation_jit("counted"),
        "aten::softmax": softmax,
        "aten::einsum": lambda inputs, outputs: Counter(einsum(inputs, outputs)),
    }
    results = []
    for library in (fvflops, fvcore):
        analysis = library.FlopCountAnalysis(
            Applied(forward, conv=nn.Conv2d(3, 4, 3)), (torch.ones(1, 3, 8, 8),)
        ).set_op_handle(**handles)
        results.append(analysis.by_module_and_operator())
    assert results[0] == results[1]
    assert results[0][""] == {"counted": 144, "softmax": 432, "mine": 8}


def test_an_autograd_function_is_opaque_and_can_have_a_handle():
    class Swish(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            return torch.mm(x, weight)

        @staticmethod
        def backward(ctx, grad):
            return grad, None

    def handle(inputs, outputs):
        return sum(torch.Size(value.type().sizes()).numel() for value in inputs if value.isCompleteTensor())

    model, x = Applied(lambda self, x: Swish.apply(self.fc(x), self.fc.weight), fc=nn.Linear(4, 4)), torch.ones(2, 4)
    ours = fvflops.FlopCountAnalysis(model, x, table="fvcore")
    theirs = fvcore.FlopCountAnalysis(model, x)
    assert ours.total() == theirs.total() == 32
    assert ours.unsupported_ops() == theirs.unsupported_ops() == {"prim::PythonOp.Swish": 1}
    assert fvflops.FlopCountAnalysis(model, x).total() == 32 + 32
    ours.set_op_handle("prim::PythonOp.Swish", handle)
    theirs.set_op_handle("prim::PythonOp.Swish", handle)
    assert ours.by_operator() == theirs.by_operator() == {"linear": 32, "PythonOp.Swish": 24}


def test_ancestor_modes_differ_on_a_shared_module_as_in_fvcore():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.own = nn.Linear(4, 4)
            self.twin = self.own
            self.borrower = Applied(lambda self, x: self.borrowed[0](x), borrowed=[self.own])

        def forward(self, x):
            return self.borrower(self.twin(x))

    model, x = Net(), torch.ones(1, 4)
    results = {}
    for mode in ("owner", "caller"):
        ours = fvflops.FlopCountAnalysis(model, x, table="fvcore").ancestor_mode(mode)
        theirs = fvcore.FlopCountAnalysis(model, x).ancestor_mode(mode)
        assert ours.by_module() == theirs.by_module()
        assert ours.canonical_module_name("twin") == theirs.canonical_module_name("twin") == "own"
        results[mode] = ours.by_module()
    assert results["owner"]["borrower"] == 0 and results["caller"]["borrower"] == 16
