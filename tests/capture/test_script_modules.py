"""TorchScript: its ops belong to its submodules, although its interpreter calls them."""

import io
from collections import Counter

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, TrainingStepAnalysis, record, record_call
from tests.support.models.parts import Parts

X = torch.randn(2, 8)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.act = nn.ReLU()

    def forward(self, x):
        return self.act(self.fc(x)) + x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Block(), Block()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.norm = nn.BatchNorm1d(8)
        self.calls = 0

    def helper(self, x):
        return self.b(x)

    def forward(self, x):
        self.calls += 1
        x = self.a(self.helper(self.a(x)))
        for layer in self.layers:
            x = layer(x)
        if x.size(0) > 1:
            x = self.layers[0](x)
        return self.norm(x)


class Data(Parts):
    """Control flow that depends on values."""

    def forward(self, x):
        steps = int(x.abs().sum() > 0) + 2
        for _ in range(steps):
            x = self.block(x)
        return x


def count(model, **options):
    return FlopCountAnalysis(model, X, table="exact", warn=False, **options)


def rows(analysis):
    return {name: counts for name, counts in analysis.by_module_and_operator().items() if counts}


def compile_model(model, how):
    if how == "script":
        return torch.jit.script(model)
    traced = torch.jit.trace(model, X)
    if how == "trace":
        return traced
    buffer = io.BytesIO()
    torch.jit.save(traced, buffer)
    buffer.seek(0)
    return torch.jit.load(buffer)


@pytest.mark.parametrize("execution", ["shapes", "real"])
@pytest.mark.parametrize("how", ["script", "trace", "load"])
def test_ops_belong_to_the_submodules(how, execution):
    model = Net().eval()
    expected, analysis = count(model, execution=execution), count(compile_model(model, how), execution=execution)
    assert rows(analysis) == rows(expected)
    assert analysis.uncalled_modules() <= {"layers"}
    tree = analysis.module_tree().by_name
    assert tree["a.fc"].class_name == "Linear" and tree["a.fc"].classes == ("torch.nn.Linear",)
    shapes = [(call.module, call.inputs, call.outputs) for call in analysis.module_calls()]
    assert shapes == [(call.module, call.inputs, call.outputs) for call in expected.module_calls()]


def test_a_script_inside_a_model_has_its_path():
    model = nn.Sequential(Net(), nn.Linear(8, 2)).eval()
    assert rows(count(nn.Sequential(torch.jit.script(model[0]), model[1]))) == rows(count(model))


def test_a_script_with_data_dependent_control_flow_runs_with_values(caplog):
    analysis = count(torch.jit.script(Data(block=Block())))
    assert analysis.trace().info.execution == "real"
    assert analysis.by_operator("block.fc")["linear"] == 3 * count(nn.Linear(8, 8)).total()


def test_a_training_step_of_a_script_is_that_of_the_model():
    model = nn.Sequential(Block(), nn.Linear(8, 2)).train()
    steps = [
        TrainingStepAnalysis(item, X, loss=lambda result: result.sum(), table="exact", warn=False)
        for item in (model, torch.jit.script(model))
    ]
    assert steps[0].by_module_and_phase() == steps[1].by_module_and_phase()
    assert steps[1].by_module_and_phase()["0.fc"]["backward"] > 0


@pytest.mark.parametrize("execution", ["shapes", "real"])
def test_the_constants_of_a_frozen_script_are_no_unseen_work(execution):
    frozen = torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval()))
    flops = FlopCountAnalysis(frozen, X, execution=execution)
    assert (flops.total(), flops.unsupported_ops()) == (128, Counter())


def test_a_count_leaves_a_script_as_it_was():
    script = torch.jit.script(Net().train())
    before = {name: tensor.clone() for name, tensor in script.state_dict().items()}
    graph = str(script.graph)
    for execution in ("shapes", "real"):
        count(script, execution=execution).total()
    assert script.calls == 0 and str(script.graph) == graph
    assert all(torch.equal(tensor, before[name]) for name, tensor in script.state_dict().items())
    with record(script) as run:  # here the script itself runs, and changes
        script(X)
    assert script.calls == 1 and set(+run.by_module()) == {""}


def test_a_script_without_weights_is_counted_and_left_as_it_was():
    script = compile_model(nn.Sequential(Block(), nn.Linear(8, 2)), "load")
    buffer = io.BytesIO()
    torch.jit.save(script, buffer)
    buffer.seek(0)
    on_meta = torch.jit.load(buffer, map_location="meta")
    steps = [
        TrainingStepAnalysis(item, X, loss=lambda result: result.sum(), table="exact", warn=False)
        for item in (script, on_meta)
    ]
    for _ in range(2):
        assert steps[0].by_module_and_phase() == steps[1].by_module_and_phase()
        assert {(type(tensor), tensor.device.type) for tensor in on_meta.parameters()} == {(torch.Tensor, "meta")}
        steps[1] = steps[1].copy(on_meta, X)


def test_weights_of_a_script_are_the_models_and_no_inputs():
    model = Net().eval()
    eager, scripted = count(model).trace(), count(torch.jit.script(model)).trace()
    assert Counter(item.origin for item in scripted.storages) == Counter(item.origin for item in eager.storages)


@pytest.mark.parametrize("execution", ["real", "shapes"])
def test_a_script_counts_as_written_however_often_it_has_run(execution):
    @torch.jit.script
    def function(x):
        return torch.relu(x @ x.mT) * 2

    def ops():
        x = torch.rand(3, 4, requires_grad=True)
        trace = record_call(lambda x: function(function(x)), (x,), loss=torch.sum, execution=execution)
        return [trace.signatures[event.item].op for event in trace.events if event.kind == "op"]

    first = ops()
    assert first.count("aten::threshold_backward") == 2  # the optimised graph has gt, _to_copy and mul
    for _ in range(3):
        function(torch.rand(3, 4, requires_grad=True)).sum().backward()
    assert ops() == first == ops()
    assert torch._C._get_graph_executor_optimize()
