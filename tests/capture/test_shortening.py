"""Models shortened to a few of their equal layers, and their traces, expanded, compared with full recordings."""

from functools import partial

import pytest
import torch
from torch import nn

from fvflops import record_call
from fvflops.capture.shorten import find_index_attributes, find_layer_runs, shorten
from fvflops.capture.training_step import record_step
from fvflops.trace import StopsAt
from fvflops.trace.expansion.expand import expand_layers
from fvflops.trace.expansion.layer_run import LayerRun, UnequalLayersError
from fvflops.trace.expansion.recorded_rows import are_equal_runs
from tests.support.random_cases import long_except

WIDTH, LAYERS = 8, 16
INPUTS = torch.ones(2, 3, WIDTH)


class Layer(nn.Module):
    """A residual layer, which adds to its result what else it is given."""

    def __init__(self, norm=nn.LayerNorm):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.norm = norm(WIDTH)

    def forward(self, x, *others):
        x = x + torch.relu(self.fc(self.norm(x)))
        for other in others:
            x = x + other
        return x


class Net(nn.Module):
    def __init__(self, layers=None):
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layers or [Layer() for _ in range(LAYERS)])
        self.after = nn.Linear(WIDTH, 2)

    def forward(self, x):
        return self.after(self.run(self.before(x)))

    def run(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Glued(Net):
    def run(self, x):
        for layer in self.layers:
            x = (layer(x.sin()) * torch.ones(1, 3, 1)).cos() + torch.randn(WIDTH)
        return x


class Summed(Net):
    """The results of all layers are summed in the end, last first."""

    def run(self, x):
        results = []
        for layer in self.layers:
            x = layer(x)
            results.append(x)
        total = x
        for result in reversed(results):
            total = total + result.sigmoid()
        return total


class Twice(Net):
    def run(self, x):
        return super().run(super().run(x))


class TwoLists(Net):
    def __init__(self):
        super().__init__()
        self.more = nn.Sequential(*(Layer() for _ in range(8)))

    def run(self, x):
        return self.more(super().run(x))


class Numbered(Net):
    def __init__(self):
        super().__init__()
        for index, layer in enumerate(self.layers):
            layer.fc.layer_index = index
            layer.register_forward_hook(lambda module, inputs, result: result * 2)


def freeze_half():
    net = Net()
    net.layers[: LAYERS // 2].requires_grad_(False)
    return net


def alternate():
    return Net([Layer(nn.LayerNorm if index % 2 else nn.RMSNorm) for index in range(LAYERS)])


# Model → (path, first layer in the shortened model, period, number of periods) of each run.
SHORTENED = {
    Net: [("layers", 0, 1, LAYERS)],
    Glued: [("layers", 0, 1, LAYERS)],
    Summed: [("layers", 0, 1, LAYERS)],
    Twice: [("layers", 0, 1, LAYERS)],
    TwoLists: [("layers", 0, 1, LAYERS), ("more", 0, 1, 8)],
    Numbered: [("layers", 0, 1, LAYERS)],
    freeze_half: [("layers", 0, 1, 8), ("layers", 4, 1, 8)],
    alternate: [("layers", 0, 2, 8)],
    lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))): [("", 0, 1, LAYERS)],
}


class Clipped(torch.optim.AdamW):
    """Clips the norm of all gradients, of which it makes a vector with an element for each."""

    def step(self, closure=None):
        torch.nn.utils.clip_grad_norm_(self.param_groups[0]["params"], 1.0, foreach=True)
        return super().step(closure)


STEPS = {
    "checkpointed": {"micro_batches": 2, "checkpoint": [nn.Linear], "optimizer": [torch.optim.AdamW]},
    "foreach, clipped": {"optimizer": [partial(Clipped, foreach=True)]},
    "state before": {"optimizer": [partial(torch.optim.Adagrad, lr=0.1)]},
}


def record(model, **options):
    return record_step(model, (INPUTS,), {}, stops_at=StopsAt(), loss=torch.sum, **options)


def assert_equal(expanded, full):
    """Compare all that a Trace has; its tables may be in another order."""
    assert are_equal_runs(expanded, full)
    assert expanded.modules == full.modules
    assert read_calls(expanded) == read_calls(full)
    assert read_active(expanded) == read_active(full)


def read_calls(trace):
    ops = {
        (repr(trace.signatures[item]), trace.scope_of(stack), phase): count
        for (item, stack, phase), count in trace.calls.items()
    }
    regions = {
        (repr(trace.region_signatures[item].inputs), trace.scope_of(stack), phase): count
        for (item, stack, phase), count in trace.region_calls.items()
    }
    return ops, regions


def read_active(trace):
    return {tuple(trace.regions[region] for region in trace.stacks[stack]) for stack in trace.active}


@pytest.fixture(scope="module", autouse=True)
def _warm():
    """Let torch import what it imports in a first step, whose frames keep tensors alive."""
    for options in STEPS.values():
        record(Net(), **options)


EACH = [(make, step) for make in SHORTENED for step in STEPS]


@pytest.mark.parametrize(("make", "step"), long_except([*EACH[:3], *EACH[4::4], (freeze_half, "state before")], EACH))
def test_a_step_is_that_of_the_full_model(make, step):
    model = make()
    full = record(model, **STEPS[step])
    shortened = shorten(model, (INPUTS,))
    assert [(run.path, run.start, run.period, run.count) for run in shortened.runs] == SHORTENED[make]
    short = record(model, **STEPS[step])
    expansion = shortened.expand(short)
    if make is freeze_half and step == "state before":  # the frozen layers' state is used by no call
        assert expansion is None
        return
    assert len(short.events) < len(full.events)
    assert_equal(expansion.trace, full)
    # Each recorded event is where it was, with the kind it had.
    assert [full.events[position].kind for position in expansion.positions[:-1]] == [row.kind for row in short.events]
    assert expansion.positions[-1] == len(full.events)


def test_a_shortened_model_is_restored():
    model = Numbered()
    tensors = [(name, id(tensor)) for name, tensor in model.named_parameters()]
    shortened = shorten(model, (INPUTS,))
    # The first two and the last two layers, which count themselves as a shallow model's do.
    assert [layer.fc.layer_index for layer in model.layers] == [0, 1, 2, 3]
    assert [id(tensor) for tensor in model.layers.parameters()][-4:] == [key for _, key in tensors[-6:-2]]
    assert [name for name, _ in shortened.repeat(model.named_parameters())] == [name for name, _ in tensors]
    shortened.restore()
    assert [(name, id(tensor)) for name, tensor in model.named_parameters()] == tensors
    assert [layer.fc.layer_index for layer in model.layers] == list(range(LAYERS))


def test_a_model_inside_another_is_expanded():
    model = Net()
    outer = nn.ModuleDict({"stage": model})
    full = record_call(model_of(outer), (INPUTS,))
    shortened = shorten(model, (INPUTS,))
    expansion = shortened.expand(record_call(model_of(outer), (INPUTS,)), below="stage")
    assert_equal(expansion.trace, full)


def model_of(outer):
    outer.forward = lambda x: outer["stage"](x)
    return outer


def every_third(net, x):
    for index, layer in enumerate(net.layers):
        x = layer(x * 2 if index % 3 == 0 else x)
    return x


def deep(net, x):
    for index, layer in enumerate(net.layers):
        x = layer(x * 2 if index > 5 else x)
    return x


def skip_one(net, x):
    results = [x, x]
    for layer in net.layers:
        results.append(layer(results[-1], results[-2]))
    return results[-1]


def mirror(net, x):
    results = []
    for index, layer in enumerate(net.layers):
        x = layer(x, *(results[LAYERS - 1 - index : LAYERS - index] if index >= LAYERS // 2 else ()))
        results.append(x)
    return x


def stacked(net, x):
    results = []
    for layer in net.layers:
        x = layer(x)
        results.append(x)
    return torch.stack(results).mean(0)


def scaled(net, x):
    return Net.run(net, x / len(net.layers))


def test_an_error_in_expanding_is_logged_as_a_warning(monkeypatch, caplog):
    monkeypatch.setattr("fvflops.capture.shorten.Shortened.expand", lambda self, trace: trace.no_such_field)
    model = Net()
    assert shorten(model, (INPUTS,)) is None
    assert len(model.layers) == LAYERS
    assert [(item.levelname, "no_such_field" in item.getMessage()) for item in caplog.records] == [("WARNING", True)]


@pytest.mark.parametrize("run", [every_third, deep, skip_one, mirror, stacked, scaled])
def test_code_that_treats_equal_layers_unequally_is_not_shortened(run):
    model = type("Unequal", (Net,), {"run": run})()
    assert find_layer_runs(model)
    assert shorten(model, (INPUTS,)) is None
    assert len(model.layers) == LAYERS


def tie(net):
    net.layers[3].fc.weight = net.layers[7].fc.weight


def share(net):
    for layer in net.layers:
        layer.norm = net.layers[0].norm


def scale(net):
    for index, layer in enumerate(net.layers):
        layer.norm.eps = 1e-5 * (index + 1)


def count_by_buffer(net):
    for index, layer in enumerate(net.layers):
        layer.register_buffer("index", torch.tensor(index))


def count_by_list(net):
    for index, layer in enumerate(net.layers):
        layer.sizes = [index]


@pytest.mark.parametrize("change", [share, scale, count_by_buffer, count_by_list])
def test_layers_that_share_or_differ_form_no_run(change):
    model = Net()
    change(model)
    assert find_layer_runs(model) == []


def test_tied_layers_end_a_run():
    model = Net([Layer() for _ in range(20)])
    tie(model)
    assert [(run.start, run.count) for run in find_layer_runs(model)] == [(8, 12)]


def test_marked_layers_differ_from_others():
    model = Net()
    marked = {id(layer) for layer in model.layers[::2]}
    assert [(run.period, run.count) for run in find_layer_runs(model, marked)] == [(2, 8)]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (nn.Linear(2, 2), nn.Linear(2, 2, bias=False)),
        (nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64)),
        (nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)),
        (nn.Dropout(0.1), nn.Dropout(0.2)),
        (nn.Dropout(), nn.Dropout().eval()),
        (nn.Sequential(nn.ReLU()), nn.Sequential(nn.GELU())),
        (nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU(), nn.ReLU())),
    ],
)
def test_layers_are_unequal_if_their_calls_may_differ(first, second):
    assert find_index_attributes(first, second, 1) is None
    assert find_index_attributes(first, first, 1) == frozenset()


def test_unequal_steps_are_not_expanded():
    model = Net()
    shortened = shorten(model, (INPUTS,))
    assert shortened.expand(record(model, checkpoint=["layers.1"])) is None
    assert shortened.expand(record(model).aggregate()) is None
    with pytest.raises(UnequalLayersError, match="equal"):
        expand_layers(record(model, checkpoint=["layers.1"]), LayerRun("layers", 0, 1, LAYERS))
