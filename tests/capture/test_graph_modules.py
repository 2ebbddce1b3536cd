"""Exported and traced graphs: their ops belong to the modules of the model that was exported."""

import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, TrainingStepAnalysis, record
from tests.support.old_torch import VERSION, since

X = torch.randn(2, 8)
REFUSED = "Guard failed|Expected input"  # by the program, since torch 2.9 and before


class Block(nn.Module):
    def __init__(self, act=None):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.act = nn.ReLU() if act is None else act

    def forward(self, x):
        return self.act(self.fc(x)) + x


class Net(nn.Module):
    """Calls modules again, others' modules, a module without gradients, and one of two branches."""

    def __init__(self):
        super().__init__()
        act = nn.ReLU()
        self.a, self.b = Block(act), Block(act)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 8)

    def forward(self, x, *, scale):
        x = self.a(self.b(self.a(x)))
        for layer in self.layers:
            x = layer(x)
        x = self.layers[0](x) * scale
        with torch.no_grad():
            x = self.norm(x)
        x = torch.cond(x.sum() > 0, lambda x: self.last(self.b.fc(x)), lambda x: self.a.fc(x), (x,))
        return torch.cat([x, x * 2], 1)


def export(model, args=(X,), kwargs=None, *, strict=False, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(model, args, kwargs, strict=strict, **options)


def count(model, inputs=X, **options):
    return FlopCountAnalysis(model, inputs, table="exact", warn=False, **options)


def rows(analysis):
    return {name: counts for name, counts in analysis.by_module_and_operator().items() if counts}


@pytest.mark.parametrize("execution", ["shapes", "real"])
def test_a_program_exported_by_dynamo_has_the_modules_of_the_model(execution):
    model, kwargs = Net().eval(), {"scale": torch.ones(8)}
    program = export(model, kwargs=kwargs, strict=True)
    expected = count(model, kwargs=kwargs, execution=execution)
    assert rows(expected)["a.act"] == {"relu": 48}  # three times 16, also where b calls it
    if VERSION < (2, 10):  # dynamo names a shared module by each of its names
        assert count(program, kwargs=kwargs, execution=execution).by_operator() == expected.by_operator()
        return
    for exported in (program, program.module()):
        analysis = count(exported, kwargs=kwargs, execution=execution)
        assert rows(analysis) == rows(expected)
        tree = analysis.module_tree().by_name
        assert {name: info.class_name for name, info in tree.items() if not name.startswith("layers")} == {
            "": "Net",
            **{f"{block}{name}": kind for block in "ab" for name, kind in (("", "Block"), (".fc", "Linear"))},
            "a.act": "ReLU",
            "b.act": "ReLU",
            "norm": "BatchNorm1d",
            "last": "Linear",
        }
        assert tree["b.act"].canonical == "a.act"
        assert tree["a.fc"].classes == ("torch.nn.Linear",) and len(tree["a.fc"].parameters) == 2
        assert analysis.to_dict(by="call")["module"] == expected.to_dict(by="call")["module"]
        for column in ("inputs", "outputs", "parameters"):  # of all but the root, whose results are a tuple
            assert analysis.to_dict(by="call")[column][1:] == expected.to_dict(by="call")[column][1:], column


@since(11, "torch.export refuses a branch of torch.cond that uses its module")
def test_a_program_exported_without_dynamo_has_the_names_under_which_modules_are_called():
    model, kwargs = Net().eval(), {"scale": torch.ones(8)}
    expected, analysis = count(model, kwargs=kwargs), count(export(model, kwargs=kwargs), kwargs=kwargs)
    assert analysis.total() == expected.total()
    # b calls a's activation under a name of its own, and the branches have no names.
    assert rows(analysis)["b.act"] == {"relu": 16} and rows(analysis)["a.act"] == {"relu": 32}
    same = {name for name in rows(expected) if name.startswith(("layers", "norm", "a.fc"))}
    assert {name: rows(analysis)[name] for name in same} == {name: rows(expected)[name] for name in same}


def test_decompositions_keep_the_modules():
    model = nn.Sequential(Block(), nn.LayerNorm(8), Block()).eval()
    expected = count(model)
    analysis = count(export(model).run_decompositions())
    assert analysis.macs() == expected.macs() and analysis.by_operator()["addmm"] == expected.by_operator()["linear"]
    for name in ("0.fc", "2", "2.fc"):
        assert analysis.macs(name) == expected.macs(name) > 0


@pytest.mark.parametrize("how", ["symbolic_trace", "unflatten", "module in another", "dynamic shapes"])
def test_other_graphs_have_the_modules_too(how):
    model = nn.Sequential(Block(), Block()).eval()
    if how == "symbolic_trace":
        graph = torch.fx.symbolic_trace(model)
    elif how == "unflatten":
        graph = torch.export.unflatten(export(model))
    elif how == "dynamic shapes":
        graph = export(model, dynamic_shapes=({0: torch.export.Dim("batch", min=2, max=16)},)).module()
        with pytest.raises((AssertionError, RuntimeError), match=REFUSED):
            count(graph, torch.randn(17, 8)).total()
        assert rows(count(graph, torch.randn(16, 8))) == rows(count(model, torch.randn(16, 8)))
    else:
        model, graph = nn.Sequential(model, nn.Tanh()), nn.Sequential(export(model).module(), nn.Tanh())
    assert rows(count(graph)) == rows(count(model))
    tree = count(graph).module_tree().by_name
    if how == "unflatten" and VERSION < (2, 7):
        return  # its modules do not know the classes
    assert [tree[name].class_name for name in (("0.0", "0.0.fc") if "another" in how else ("0", "0.fc"))] == [
        "Block",
        "Linear",
    ]


def test_a_graph_without_names_belongs_to_the_root():
    graph = torch.fx.symbolic_trace(lambda x: torch.relu(x) + 1)
    assert set(rows(count(graph))) == {""}


def test_a_training_step_of_a_program_is_that_of_the_model():
    model = nn.Sequential(Block(), nn.Linear(8, 2)).train()
    steps = [
        TrainingStepAnalysis(item, X, loss=lambda result: result.sum(), table="exact", warn=False)
        for item in (model, export(model).module())
    ]
    assert steps[0].by_module_and_phase() == steps[1].by_module_and_phase()
    assert steps[1].by_module_and_phase()["0.fc"]["backward"] > 0


def test_a_recording_leaves_a_graph_as_it_was():
    model = nn.Sequential(Block(), nn.Linear(8, 2))
    graph = export(model).module()
    forward, nodes = type(graph).forward, len(graph.graph.nodes)
    with record(graph, table="exact") as run:
        graph(X).sum().backward()
        inner = count(graph)  # another recording inside
        assert rows(inner) == rows(count(model))
    assert run.by_module()["0.fc"] > inner.by_module()["0.fc"]  # with the backward pass
    with pytest.raises((AssertionError, RuntimeError), match=REFUSED):
        count(graph, torch.randn(3, 8)).total()
    assert type(graph).forward is forward and "forward" not in vars(graph) and len(graph.graph.nodes) == nodes


def test_a_counted_graph_is_freed():
    graph = export(nn.Sequential(nn.Linear(8, 2))).module()
    kept = weakref.ref(graph)
    assert count(graph).total() > 0
    del graph
    gc.collect()
    assert kept() is None


def test_a_program_runs_on_its_example_inputs_or_on_others():
    program = export(nn.Sequential(nn.Linear(8, 2)), dynamic_shapes=({0: torch.export.Dim("batch", max=64)},))
    assert count(program, None).trace().info.inputs == "float32[2, 8]"
    assert count(program, torch.randn(5, 8)).macs() == 5 * 8 * 2
    program._example_inputs = None
    with pytest.raises(ValueError, match="no example inputs: pass inputs"):
        count(program, None)
