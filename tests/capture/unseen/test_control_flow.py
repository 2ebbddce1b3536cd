"""Models whose control flow follows random draws or values of the data: each is named with its module and line."""

import inspect
import random
from random import random as draw

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fvflops import TrainingStepAnalysis, predict_memory, record, record_call
from fvflops.capture.restore.global_state import extreme_draws, seeded
from fvflops.trace import Trace

READ = "# read"  # marks the line that a note names


class Layers(nn.Module):
    """Layers, and generators of its own."""

    def __init__(self, layers=3):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.head = nn.Linear(4, 4)
        self.numpy_generator = numpy.random.default_rng(0)
        self.python_generator = random.Random(0)
        self.torch_generator = torch.Generator().manual_seed(0)
        self.scale = nn.Parameter(torch.ones(()))


def model_of(forward):
    """Return layers that a function calls, in a class of its name."""
    return type(forward.__name__, (Layers,), {"forward": forward})()


def torch_layer_drop(self, x):
    for layer in self.layers:
        if torch.rand([]) > 0.5:  # read
            x = layer(x)
    return self.head(x)


def python_layer_drop(self, x):
    for layer in self.layers:
        if random.random() > 0.5:  # read
            x = layer(x)
    return self.head(x)


def imported_layer_drop(self, x):
    for layer in self.layers:
        x = x if draw() > 0.5 else layer(x)  # read
    return self.head(x)


def numpy_stochastic_depth(self, x):
    depth = numpy.random.randint(1, 4)  # read
    for layer in self.layers[:depth]:
        x = layer(x)
    return self.head(x)


def numpy_generator_skip(self, x):
    skipped = self.numpy_generator.random(3) < 0.5  # read
    for layer, skip in zip(self.layers, skipped, strict=True):
        x = x if skip else layer(x)
    return self.head(x)


def python_generator_route(self, x):
    return self.python_generator.choice(self.layers)(x)  # read


def torch_generator_route(self, x):
    chosen = torch.randint(3, (), generator=self.torch_generator)
    return self.layers[chosen.item()](x)  # read


def shuffled_order(self, x):
    order = torch.randperm(3).tolist()  # read
    return self.layers[order[0]](x)


def bernoulli_gate(self, x):
    gate = torch.empty(()).bernoulli_(0.5)
    return self.layers[0](x) if gate else x  # read


def sampled_branch(self, x):
    branch = int(torch.multinomial(torch.tensor([0.2, 0.3, 0.5]), 1))  # read
    return self.layers[branch](x)


def random_crop(self, x):
    rows = max(1, int(random.uniform(0.3, 1) * len(x)))  # read
    return self.head(x[:rows])


def early_exit(self, x):
    for layer in self.layers:
        x = layer(x)
        if x.softmax(-1).max() > 0.4:  # read
            break
    return x


def iterated(self, x):
    for _ in range(5):
        before, x = x, self.layers[0](x).tanh()
        if (x - before).norm().item() < 0.1:  # read
            break
    return x


def routed_by_value(self, x):
    experts = self.head(x).argmax(-1)
    for expert, layer in enumerate(self.layers):
        rows = torch.nonzero(experts == expert)  # read
        x = x.index_add(0, rows[:, 0], layer(x[rows[:, 0]]))
    return x


def pruned_tokens(self, x):
    return self.head(x[x.sum(-1) > 0])  # read


def selected_scores(self, x):
    return torch.masked_select(x, self.head(x) > 0)  # read


def distinct_codes(self, x):
    codes = torch.unique(x.round(), dim=0)  # read
    return self.head(codes)


def exported_to_numpy(self, x):
    lengths = self.head(x).detach().numpy()[:, 0]  # read
    return x if lengths[0] > 0 else self.layers[0](x)


def fixed_point(self, x):
    y = self.head(x)
    return y if torch.equal(x, y) else self.layers[0](y)  # read


def halting(self, ids):
    x = F.embedding(ids, self.head.weight)
    for layer in self.layers:
        x = layer(x)
        if bool((x.mean() > 0).item()):  # read
            return x
    return x


def branch_of_cond(self, x):
    y = self.head(x)
    return torch.cond(y.sum() > 0, self.layers[0], self.layers[1], (y,))  # read


class Nested(Layers):
    """The module that reads is not the root."""

    def __init__(self):
        super().__init__()
        self.encoder = model_of(torch_layer_drop)

    def forward(self, x):
        return self.head(self.encoder(x))


RANDOM = (
    *(torch_layer_drop, python_layer_drop, imported_layer_drop, numpy_stochastic_depth, numpy_generator_skip),
    *(python_generator_route, torch_generator_route, shuffled_order, bernoulli_gate, sampled_branch, random_crop),
)
DATA = (
    *(
        early_exit,
        iterated,
        routed_by_value,
        pruned_tokens,
        selected_scores,
        distinct_codes,
        exported_to_numpy,
        fixed_point,
    ),
    *(halting, branch_of_cond),
)


def inputs_of(forward):
    with seeded(5):
        return torch.arange(3) if forward is halting else torch.randn(6, 4)


def line_of(forward):
    """Return the file and number of the marked line of a forward."""
    lines, first = inspect.getsourcelines(forward)
    (offset,) = (index for index, line in enumerate(lines) if line.rstrip().endswith(READ))
    return f"tests/capture/unseen/test_control_flow.py:{first + offset}"


def reads(trace):
    return trace.info.random, trace.info.data_dependent


@pytest.mark.parametrize("execution", ("auto", "real"))
@pytest.mark.parametrize("forward", RANDOM, ids=lambda item: item.__name__)
def test_random_control_flow_is_named_with_its_line_for_every_draw(forward, execution):
    model, x = model_of(forward).eval(), inputs_of(forward)
    for seed in range(3):
        with seeded(seed):
            before = random.getstate(), torch.get_rng_state()
            trace = record_call(model, (x,), execution=execution)
            assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
        assert reads(trace) == ((f"{forward.__name__} at {line_of(forward)}",), ())
        assert Trace.from_json(trace.to_json()).info == trace.info


@pytest.mark.parametrize("forward", DATA, ids=lambda item: item.__name__)
def test_data_dependent_control_flow_is_named_with_its_line(forward):
    trace = record_call(model_of(forward).eval(), (inputs_of(forward),), execution="real")
    assert reads(trace) == ((), (f"{forward.__name__} at {line_of(forward)}",))


@pytest.mark.parametrize("forward", (early_exit, pruned_tokens), ids=lambda item: item.__name__)
def test_data_dependence_is_named_after_the_fallback_to_real_execution(forward):
    trace = record_call(model_of(forward), (inputs_of(forward),))
    assert trace.info.execution == "real" and trace.info.data_dependent == (
        f"{forward.__name__} at {line_of(forward)}",
    )


def test_a_module_that_reads_is_named():
    trace = record_call(Nested(), (inputs_of(Nested),))
    assert trace.info.random == (f"'encoder' at {line_of(torch_layer_drop)}",)


def test_a_recorded_program_names_what_its_model_reads_but_not_what_the_program_does():
    model, x = model_of(early_exit), inputs_of(early_exit)
    with record(model) as run:
        loss = model(x).sum()
        loss.backward()
        assert loss.item() and float(x[0, 0])
    assert reads(run.trace()) == ((), (f"early_exit at {line_of(early_exit)}",))


def test_a_merged_trace_has_the_reads_of_all_steps():
    class Alternating(Layers):
        def forward(self, x, looks):
            return self.head(x) if looks and self.head(x).sum() > 0 else x

    model, x = Alternating(), inputs_of(Alternating)
    with record(model) as run:
        for looks in (False, True):
            model(x, looks)
            run.step()
    first, second = (trace.info.data_dependent for trace in run.steps)
    assert not first and run.trace().info.data_dependent == second and len(second) == 1


@pytest.mark.parametrize("forward", (torch_layer_drop, python_layer_drop), ids=lambda item: item.__name__)
def test_a_training_step_names_random_control_flow(forward):
    step = TrainingStepAnalysis(
        model_of(forward).train(), inputs_of(forward), loss=torch.sum, optimizer=torch.optim.AdamW
    )
    assert reads(step.trace()) == ((f"{forward.__name__} at {line_of(forward)}",), ())


def noise(model, x):
    hidden = F.dropout(model.head(x) + torch.randn(4), 0.5, True)
    return torch.where(torch.rand(4) > 0.5, hidden, F.gumbel_softmax(hidden))


def masks(model, ids):
    mask = ids > 0
    if mask.all() or int(ids.max()) > 2 or (ids == 1).sum().item():
        ids = ids[mask.nonzero()[:, 0]]
    lengths = (mask.float() * 2).sum().item(), ids.float().mul(torch.tensor(0.5)).tolist()
    packed = nn.utils.rnn.pack_padded_sequence(torch.zeros(1, 3, 4), torch.tensor([2]), batch_first=True)
    return F.embedding(ids, model.head.weight) * len(lengths) + packed.data.sum()


def state(model, x):
    return model.head(x) * model.scale.item() if (model.head.weight.abs() >= 0).all() else x


def printed(model, x):
    y = model.head(x)
    assert f"{y}" and repr(y)
    return torch.distributions.Normal(y, y.exp()).rsample()


ENCODER = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2, enable_nested_tensor=False)


def causal(model, x):
    return ENCODER(model.head(x)[None], mask=x @ x.T)


def switched_off(model, x):
    positions = F.dropout(torch.arange(4.0), 0.5, training=False)
    return model.head(x) if positions.max() > 2 else x


@pytest.mark.parametrize("execution", ("auto", "real"))
@pytest.mark.parametrize(
    "forward", (noise, masks, state, printed, causal, switched_off), ids=lambda item: item.__name__
)
def test_what_control_flow_does_not_follow_is_no_note(forward, execution):
    class Model(Layers):
        def forward(self, x):
            return forward(self, x)

    x = torch.tensor([0, 2, 1]) if forward is masks else inputs_of(Model)
    assert reads(record_call(Model().eval(), (x,), execution=execution)) == ((), ())


def test_a_run_without_draws_is_recorded_once():
    calls = []

    class Counted(Layers):
        def forward(self, x):
            calls.append(len(calls))
            return torch_layer_drop(self, x)

    record_call(Counted(), (inputs_of(Counted),))
    assert len(calls) == 1


class MixedLayerDrop(Layers):
    """Layers kept by low and by high draws are not told apart: with one polarity the peak is of all layers."""

    def __init__(self, drawn, probability):
        super().__init__(8)
        self.drawn, self.probability = drawn, probability

    def forward(self, x):
        for layer in self.layers:
            if self.drawn() >= self.probability:
                x = layer(x).relu()
        return self.head(x)


@pytest.mark.parametrize(
    "drawn", (lambda: torch.rand(()), random.random, numpy.random.rand), ids=("torch", "python", "numpy")
)
def test_memory_is_that_of_the_run_that_keeps_most(drawn):
    x = torch.ones(64, 4)
    peaks = [
        predict_memory(TrainingStepAnalysis(MixedLayerDrop(drawn, chance), x, loss=torch.sum)).peak
        for chance in (0.0, 0.5, 1.0)
    ]
    assert peaks[0] == peaks[1] > peaks[2]
    prediction = predict_memory(TrainingStepAnalysis(MixedLayerDrop(drawn, 0.5), x, loss=torch.sum))
    assert "with the highest draws" in prediction.trace.about["peaks"] and "Peak memory: the largest" in str(prediction)


@pytest.mark.parametrize("high", (False, True))
def test_extreme_draws_end(high):
    before = random.getstate(), torch.get_rng_state(), numpy.random.get_state()[1].tolist()
    with extreme_draws(high=high):
        floats = [
            random.random(),
            numpy.random.rand(),
            float(torch.rand(())),
            float(torch.rand((), dtype=torch.double)),
        ]
        assert all(value > 0.9999 if high else value < 0.0001 for value in floats)
        assert bool(torch.bernoulli(torch.tensor(0.01))) is not high
        values = {random.normalvariate(0, 1) for _ in range(500)} | {numpy.random.gamma(0.5) for _ in range(500)}
        assert len(values) > 100
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == (before[0], before[2])
    assert torch.equal(torch.get_rng_state(), before[1])
