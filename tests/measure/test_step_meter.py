"""StepMeter against `record` on the same steps, and what it must leave alone."""

import copy
import html
import io
import logging
import math
import re
import time
import weakref
from functools import partial
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from fvflops import (
    Device,
    StepMeter,
    TrainingStepAnalysis,
    UtilisationError,
    estimate_step,
    mfu,
    plan_step,
    predict_memory,
    record,
)
from fvflops.measure.profile_analysis import ProfileAnalysis
from fvflops.measure.step_meter import step_costs
from fvflops.measure.step_meter.clock import Clock
from fvflops.measure.step_meter.step_costs import SizeFamilies
from fvflops.measure.step_meter.step_figures import StepCost, StepFigures, sum_ranks
from fvflops.trace import TraceError
from fvflops.units import format_percent, format_seconds, format_share, format_short
from tests.support.models.parts import Applied
from tests.support.old_torch import VERSION
from tests.support.processes.meter_worker import RANKS, STEPS, WIDTH, rows_of
from tests.support.processes.start import run_ranks

T = 10**12
CHIP = Device("chip", matrix={"fp32": 1000 * T, "bf16": 2000 * T})


class Net(nn.Module):
    """Two layers, the second of which can be checkpointed or depend on values."""

    def __init__(self, *, checkpointed=False, data_dependent=False):
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)
        self.checkpointed, self.data_dependent = checkpointed, data_dependent

    def forward(self, x):
        hidden = self.first(x).relu()
        if self.data_dependent:
            hidden = hidden[hidden.sum(1) > -math.inf]
            if hidden[0, 0].item() > 1e9:
                raise AssertionError("not reached")
        if self.checkpointed:
            return checkpoint(lambda h: self.second(functional.gelu(self.second(h) @ self.second.weight)), hidden)
        return self.second(hidden)


@pytest.fixture
def counted(monkeypatch):
    """List that gets an item for each count."""
    counted, count_call = [], step_costs.count_call
    monkeypatch.setattr(step_costs, "count_call", lambda *args: counted.append(1) or count_call(*args))
    return counted


def meter_steps(models, steps, **options):
    """Return the figures of steps, and of each what `record` counts in an equal step without a meter."""
    expected = []
    for step in copy.deepcopy(steps) if isinstance(steps, list) else steps:
        with record(None, warn=False) as run:
            step()
        expected.append(run)
    return meter_of(steps, *models, device=CHIP, **options).steps, expected


def meter_of(steps, *models, device=CHIP, **options):
    """Return a meter after steps."""
    with StepMeter(*models, device=device, **options) as meter:
        for step in steps:
            with meter.step():
                step()
    return meter


def check(models, steps, **options):
    """Assert that model FLOPs are the recording's in forward and backward."""
    figures, expected = meter_steps(models, steps, **options)
    assert len(figures) == len(steps)
    for one, run in zip(figures, expected, strict=True):
        assert one.macs == run.macs(phase="forward") + run.macs(phase="backward")
        assert one.hardware_flops >= one.model_flops >= 2 * one.macs > 0
        assert one.mfu == pytest.approx(one.model_flops / one.seconds / (1000 * T))
        assert one.tflops_per_device == pytest.approx(one.model_flops / one.seconds / 1e12)
    return figures


def backward_of(model, rows):
    return lambda: model(torch.ones(rows, 16)).sum().backward()


def meter_rows(model, *rows, device=CHIP):
    """Return a meter after a step of each number of rows."""
    return meter_of([backward_of(model, one) for one in rows], model, device=device)


def test_steps_of_several_shapes_cost_what_a_recording_counts():
    model = Net()
    figures = check([model], [backward_of(model, rows) for rows in (4, 8, 4, 16, 8)])
    assert [one.macs for one in figures] == [rows * (16 * 32 * 2 + 32 * 4 * 3) for rows in (4, 8, 4, 16, 8)]
    assert [one.step for one in figures] == [1, 2, 3, 4, 5]


def test_micro_batches_frozen_parameters_and_evaluation_within_a_step():
    model = Net()

    def step():
        model.first.requires_grad_(False)
        backward_of(model, 4)()
        model.first.requires_grad_(True)
        for rows in (4, 4, 6):
            backward_of(model, rows)()
        with torch.no_grad():
            model(torch.ones(32, 16))

    check([model], [step, step])


def test_a_call_without_backward_counts_forward_alone():
    model = Net()
    figures = check(
        [model], [lambda: model(torch.ones(4, 16)), backward_of(model, 4), lambda: model(torch.ones(4, 16))]
    )
    assert figures[0].macs == figures[2].macs < figures[1].macs


def test_a_generator_and_a_discriminator():
    generator, discriminator = nn.Linear(8, 16), Net()

    def step():
        fake = generator(torch.ones(4, 8))
        discriminator(fake.detach()).sum().backward()
        discriminator(torch.ones(4, 16)).sum().backward()
        discriminator(fake).sum().backward()

    check([generator, discriminator], [step, step])


def test_the_optimizers_of_a_generator_and_a_discriminator_are_hardware_flops_of_the_steps_that_they_make():
    generator, discriminator = nn.Linear(8, 16), Net()
    optimizers = [torch.optim.AdamW(generator.parameters()), torch.optim.SGD(discriminator.parameters(), momentum=0.9)]

    def step(both):
        fake = generator(torch.ones(4, 8))
        discriminator(fake).sum().backward()
        for optimizer in optimizers if both else optimizers[1:]:
            optimizer.step()
            optimizer.zero_grad()

    step(True)  # which makes the states
    with record(None, table="exact") as run:
        step(True)
        run.step()
        step(False)
        run.step()
    updates = [count.by_phase["optimizer"] for count in run.per_step().each]
    steps = [partial(step, both) for both in (True, False, True)]
    meter = meter_of(steps, generator, discriminator, optimizer=optimizers, table="exact")
    assert updates[0] > updates[1] > 0
    assert [one.hardware_flops - one.model_flops for one in meter.steps] == [updates[0], updates[1], updates[0]]


def test_parameters_that_thaw_in_the_midst_and_an_evaluation_between():
    model = Net()
    macs = []
    with StepMeter(model, device=CHIP) as meter:
        for number in range(6):
            model.first.requires_grad_(number >= 3)
            with meter.step():
                backward_of(model, 4)()
            with torch.no_grad():
                model.eval()(torch.ones(64, 16))
            model.train()
            macs.append(meter.last.macs)
    assert macs == [4 * (16 * 32 + 2 * 32 * 4)] * 3 + [4 * (2 * 16 * 32 + 3 * 32 * 4)] * 3


def test_a_model_in_another_counts_once():
    inner = nn.Linear(16, 16)
    outer = nn.Sequential(inner, nn.Linear(16, 4))
    check([inner, outer], [backward_of(outer, 4), backward_of(inner, 4)])


def test_only_outputs_with_gradients_have_a_backward_pass():
    heads = {"one": nn.Linear(16, 4), "two": nn.Linear(16, 4)}
    model = Applied(lambda self, x: {name: getattr(self, name)(x) for name in heads}, **heads)

    def step(*names):
        result = model(torch.ones(8, 16))
        sum(result[name].sum() for name in names).backward()

    steps = [partial(step, "one")] * 2 + [partial(step, "one", "two")] * 3
    macs = [one.macs for one in meter_of(steps, model).steps]
    # The first step with gradients of both is the first to show that such steps exist: the next one counts them all.
    assert macs == [3 * 8 * 16 * 4] * 2 + [4 * 8 * 16 * 4] * 3


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_recomputation_and_the_optimizer_are_hardware_flops_alone():
    model = Net(checkpointed=True)
    muon = torch.optim.Muon([model.first.weight, model.second.weight])

    def step():
        backward_of(model, 4)()
        muon.step()

    figures, (run, _) = meter_steps([model], [step, step], optimizer=muon)
    recomputed, update = run.macs(phase="recompute"), run.macs(phase="optimizer")
    assert recomputed > 0 and update > 0
    for one in figures:
        assert one.macs == run.macs() - recomputed - update
        assert one.hardware_flops == pytest.approx(2 * run.macs(), rel=0.01)
        assert one.hfu > one.mfu


def test_what_shapes_cannot_count_is_recorded_once():
    model = Net(data_dependent=True)
    seen = []
    with StepMeter(model, device=CHIP) as meter:
        for rows in (4, 4, 4, 8, 8, 8, 4):
            with meter.step():
                backward_of(model, rows)()
            seen.append(math.isnan(meter.last.macs))
    with record(None) as run:
        backward_of(model, 4)()
    # The first step of each shape shows that the next one has to be recorded.
    assert seen == [True, False, False, True, False, False, False]
    assert [one.macs for one in meter.steps] == [times * run.macs() for times in (1, 1, 1, 2, 2, 2, 1)]


@pytest.mark.parametrize("in_place", [False, True], ids=["torch.compile", "Module.compile"])
def test_a_compiled_model_stays_compiled(in_place):
    runs, graphs = [], []

    def backend(graph, inputs):
        graphs.append(graph)

        def run(*args):
            runs.append(1)
            return graph.forward(*args)

        return run

    torch._dynamo.reset()
    model = Net()
    called = model
    if in_place:
        model.compile(backend=backend)
    else:
        called = torch.compile(model, backend=backend)
    for _ in range(2):
        backward_of(called, 4)()
    before = len(graphs)
    meter = meter_rows(called, *[4] * 5)
    backward_of(called, 4)()
    assert len(graphs) == before and len(runs) == 8 * before
    assert [one.macs for one in meter.steps] == [4 * (16 * 32 * 2 + 32 * 4 * 3)] * 5


def test_a_compiled_function_stays_compiled_and_is_counted_by_its_batches(caplog):
    runs = []

    def backend(graph, inputs):
        return lambda *args: runs.append(1) or graph.forward(*args)

    torch._dynamo.reset()
    model = Net()

    @torch.compile(backend=backend, fullgraph=True)
    def loss_of(x):
        return model(x).square().sum()

    macs = 4 * (16 * 32 * 2 + 32 * 4 * 3)
    with caplog.at_level(logging.WARNING, "fvflops"), StepMeter(model, device=CHIP) as meter:
        for number in range(8):
            x = torch.ones(4, 16)
            with meter.step(x if number >= 3 else None):
                loss_of(x).backward()
    found = [one.macs for one in meter.steps]
    assert [math.isnan(one) for one in found] == [True] * 3 + [False] * 5 and found[3:] == [macs] * 5
    assert len(runs) == 7  # a recorded step runs the function without compilation
    assert [message for message in caplog.messages if "no call of the models was seen in a step" in message]


def test_training_is_the_same_with_and_without_a_meter():
    def train(metered):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(), nn.Linear(32, 4))
        optimizer = torch.optim.AdamW(model.parameters())
        meter = StepMeter(model, optimizer=optimizer, device=CHIP) if metered else None
        for rows in (4, 8, 4, 8):
            if meter is not None:
                meter.begin()
            model(torch.randn(rows, 16)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if meter is not None:
                meter.end()
        if meter is not None:
            meter.close()
            assert not model._forward_hooks and not model._forward_pre_hooks
        return {**model.state_dict(), **{str(k): v for k, v in enumerate(optimizer.state_dict()["state"][0].values())}}

    plain, metered = train(False), train(True)
    assert plain.keys() == metered.keys()
    assert all(torch.equal(value, metered[name]) for name, value in plain.items())


def test_each_call_is_counted_once(counted):
    meter_rows(Net(), *(4, 8) * 10)
    assert len(counted) == 2


def test_autocast_is_part_of_a_call():
    model = Net()

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(torch.ones(4, 16)).float().sum()
        loss.backward()

    plain, autocast = meter_of([backward_of(model, 4), step], model).steps
    assert plain.model_flops == autocast.model_flops
    assert autocast.mfu * autocast.seconds == pytest.approx(plain.mfu * plain.seconds / 2)


def test_rates_and_logs():
    model = Net()
    with StepMeter(model, device=CHIP) as meter:
        assert meter.last is None
        with meter.step(samples=4, tokens=64):
            backward_of(model, 4)()
    last = meter.last
    assert last.tokens_per_second == 64 / last.seconds and last.samples_per_second == 4 / last.seconds
    logged = last.as_dict()
    assert {"step", "seconds", "macs", "model_flops", "hardware_flops", "mfu", "hfu"} < set(logged)
    assert {"tokens_per_second", "samples_per_second", "tflops_per_device"} < set(logged)
    assert "memory_peak" not in logged  # on a CPU
    assert mfu({"fp32": last.model_flops}, last.seconds, device=CHIP) == pytest.approx(last.mfu)
    assert str(last).startswith("step 1: ") and "tokens/s" in str(last) and "MFU" in str(last)


def test_an_unsupported_op_is_named_once(caplog):
    library = torch.library.Library("meter_test", "FRAGMENT")
    library.define("scan(Tensor x) -> Tensor")
    library.impl("scan", torch.clone, "CompositeExplicitAutograd")

    model = nn.Sequential(nn.Linear(16, 16), Applied(lambda _, x: torch.ops.meter_test.scan(x)))
    with caplog.at_level(logging.WARNING, "fvflops"), torch.no_grad():
        meter_of([lambda rows=rows: model(torch.ones(rows, 16)) for rows in (4, 8, 4)], model)
    assert caplog.messages == [
        "StepMeter: unsupported, so not counted: meter_test::scan (1 call); a table with rows for them counts them"
    ]


def test_more_than_the_peak_gives_nan_and_one_warning(caplog):
    with caplog.at_level(logging.WARNING, "fvflops"):
        meter = meter_rows(Net(), 4, 4, device=Device("slow", matrix={"fp32": 1000}))
    assert math.isnan(meter.last.mfu)
    assert [record.message.split(" is NaN")[0] for record in caplog.records] == ["StepMeter: mfu", "StepMeter: hfu"]


def test_a_step_that_raises_is_left_out_and_the_error_is_the_users():
    model = Net()
    meter = StepMeter(model, device=CHIP)
    with pytest.raises(RuntimeError, match="mat1 and mat2"), meter.step():
        model(torch.ones(4, 17))
    with meter.step():
        backward_of(model, 4)()
    assert [one.step for one in meter.steps] == [1] and meter.last.macs == 4 * (16 * 32 * 2 + 32 * 4 * 3)
    meter.end()  # nothing was begun
    assert len(meter.steps) == 1


def test_bad_models_are_refused():
    with pytest.raises(ValueError, match="there is no model to meter"):
        StepMeter()
    with pytest.raises(TypeError, match=r"a model must be a torch\.nn\.Module, got list"):
        StepMeter([Net()])


def test_a_batch_records_the_first_step_of_its_shapes_with_all_that_runs():
    model, head = Net(), nn.Linear(4, 64)

    def step(rows):
        head(model(torch.ones(rows, 16))).sum().backward()

    with StepMeter(model, device=CHIP) as meter:
        for rows in (4, 8, 4, 8):
            with meter.step({"x": torch.ones(rows, 16)}, samples=rows):
                step(rows)
    for rows, one in zip((4, 8, 4, 8), meter.steps, strict=True):
        with record(None) as run:
            step(rows)
        assert one.macs == run.macs()


def test_of_many_batches_one_is_recorded_if_the_calls_of_the_models_are_all_work(counted, monkeypatch):
    started = []
    start = step_costs.StepCosts.start_recording
    monkeypatch.setattr(step_costs.StepCosts, "start_recording", lambda self: started.append(1) or start(self))
    runs = []
    model = Net()
    model.compile(backend=lambda graph, inputs: lambda *args: runs.append(1) or graph.forward(*args), dynamic=True)
    with StepMeter(model, device=CHIP) as meter:
        for rows in (4, 8, 12, 8, 16, 20, 24, 4):
            with meter.step({"x": torch.ones(rows, 16)}):
                functional.mse_loss(model(torch.ones(rows, 16)), torch.zeros(rows, 4)).backward()
    sizes = [4, 8, 12, 8, 16, 20, 24, 4]
    assert [one.macs for one in meter.steps] == [rows * (16 * 32 * 2 + 32 * 4 * 3) for rows in sizes]
    assert [one.samples for one in meter.steps] == sizes
    assert len(started) == 1 and len(counted) <= 7
    assert len(runs) == 7  # a recorded step runs the model without compilation


def test_tokens_and_samples_are_those_of_the_first_model():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 4))
    with StepMeter(model, device=CHIP) as meter:
        with meter.step():
            for _ in range(2):
                model(torch.zeros(3, 5, dtype=torch.long)).sum().backward()
        with meter.step(tokens=7):
            model(torch.zeros(3, 5, dtype=torch.long)).sum().backward()
    assert [(one.samples, one.tokens) for one in meter.steps] == [(6, 30), (3, 7)]


def test_the_mean_of_steps_weights_utilisations_by_time():
    assert StepMeter(Net(), device=CHIP).mean() is None
    meter = meter_rows(Net(), 4, 8, 400)
    steps, mean = meter.steps[1:], meter.mean(2)
    assert mean.step == 3 and mean.seconds == pytest.approx(sum(one.seconds for one in steps) / 2)
    flops = sum(one.model_flops for one in steps)
    assert mean.mfu == pytest.approx(flops / sum(one.seconds for one in steps) / (1000 * T))
    assert meter.mean().macs == pytest.approx(sum(one.macs for one in meter.steps) / 3)


class Attends(nn.Module):
    def __init__(self, multiple=1):
        super().__init__()
        self.multiple, self.mix, self.out = multiple, nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 8)

    def forward(self, x):
        x = functional.pad(x, (0, 0, 0, -x.shape[1] % self.multiple))
        return self.out(self.mix(x, x, x, need_weights=False)[0])


def loop_over_lengths(model, lengths, counted):
    """Return a meter after a step of each length, and what was known of each length in the loop."""
    meter, seen = StepMeter(model, device=CHIP), {}
    for length in lengths:
        with meter.step():
            model(torch.ones(2, length, 8)).sum().backward()
        for one, known in zip(meter.steps, lengths, strict=False):
            if not math.isnan(one.macs):
                assert seen.setdefault(known, one) == one or seen[known].model_flops == one.model_flops
    in_loop = len(counted)
    meter.close()
    return meter, seen, in_loop


@pytest.mark.parametrize("multiple", [1, 16])
def test_figures_of_many_lengths_are_right_or_unknown(multiple, counted):
    model = Attends(multiple)
    lengths = [3 + 7 * index % 97 for index in range(36)]
    assert len(set(lengths)) == 36
    meter, seen, in_loop = loop_over_lengths(model, lengths, counted)
    flops = {}
    for length in lengths:
        with record(None, warn=False) as run:
            model(torch.ones(2, length, 8)).sum().backward()
        entries = [entry for entry in run.counts().entries if entry.phase in ("forward", "backward")]
        flops[length] = sum(2 * (entry.macs - entry.recomputed) + entry.flops for entry in entries)
    assert [one.model_flops for one in meter.steps] == [flops[length] for length in lengths]
    assert {length: one.model_flops for length, one in seen.items()} == {length: flops[length] for length in seen}
    # In the loop, of some 0.1 s, hardly more than the first few are counted.
    assert 6 <= in_loop <= 12
    if multiple == 1:  # a quadratic, which gives the others
        assert len(counted) <= 16 and len(seen) > 10
    else:
        assert len(counted) == 36


@pytest.mark.parametrize(
    ("cost", "interpolated"),
    [
        (lambda rows, length: rows * (3 * length**2 + length), True),
        (lambda rows, length: rows * 7, True),
        (lambda rows, length: rows * length * (length + 1) // 2, True),
        (lambda rows, length: rows * length**3, False),
        (lambda rows, length: rows * (length + 7) // 8 * 8, False),
        (lambda rows, length: rows * min(length**2, 15 * length), False),
    ],
    ids=["quadratic", "constant", "triangular", "cubic", "padded", "window"],
)
def test_a_cost_is_interpolated_where_a_quadratic_is_verified(cost, interpolated):
    families, counted = SizeFamilies(), {}
    shapes = [(rows, length) for rows in (1, 2) for length in (8, 9, 10, 12, 14, 17, 18)]
    for number, (rows, length) in enumerate(shapes):
        families.add(number, "kind", ((rows, length), ((rows, length, 4), "float32")))
        if length not in (14, 18):
            counted[number] = StepCost(*[cost(rows, length)] * 5)
    for number, (rows, length) in enumerate(shapes):
        found = families.cost(number, counted)
        if length == 14 and interpolated:
            assert found == StepCost(*[cost(rows, length)] * 5)
        else:
            # 18 is beyond the counts: what is longer may be truncated.
            assert (found is None) == (not interpolated or length == 18)


def test_what_is_verified_by_twelve_counts_is_not_counted_further(counted, monkeypatch):
    monkeypatch.setattr(step_costs, "_SHARE", 10**9)
    model = Attends()
    meter, seen, in_loop = loop_over_lengths(model, [4, 40, *range(5, 40)], counted)
    assert in_loop == len(counted) == 12 and len(seen) == 37
    assert meter.steps[30].macs == seen[33].macs > 0


def test_calls_of_other_models_are_in_no_family():
    families = SizeFamilies()
    for number in range(6):
        families.add(number, "kind", (number,))
    families.add(6, "other kind", (3,))
    counted = {number: StepCost(*[7] * 5) for number in range(6) if number != 3}
    assert families.cost(3, counted) == StepCost(*[7] * 5) and families.cost(6, counted) is None


def test_values_of_a_batch_are_not_held():
    model = Attends()
    meter = StepMeter(model, device=CHIP)
    batches = []
    for length in range(2, 14):
        x = torch.ones(2, length, 8)
        batches.append(weakref.ref(x))
        with meter.step():
            model(x).sum().backward()
        del x
    assert not [batch for batch in batches if batch() is not None]
    assert any(math.isnan(one.macs) for one in meter.steps)
    meter.close()
    assert not any(math.isnan(one.macs) for one in meter.steps)


@pytest.mark.parametrize("closed_by", ["close", "exit", "error"])
def test_a_step_after_close_is_not_metered_and_says_so(closed_by, caplog):
    model, x = Net(), torch.ones(2, 16)
    meter, strict = (StepMeter(model, device=CHIP, strict=strict) for strict in (False, True))
    with meter.step():
        model(x)
    for one in (meter, strict):
        if closed_by == "close":
            one.close()
        else:
            one.__exit__(None if closed_by == "exit" else KeyError, None, None)
    figures = meter.steps
    for _ in range(3):
        with meter.step():
            model(x)
        meter.begin(x)
        meter.end()
    (message,) = [record.getMessage() for record in caplog.records]
    assert message == ("StepMeter: a step after close() is not metered, since the hooks are gone: make another meter")
    assert (meter.steps, meter.last, len(figures)) == (figures, figures[-1], 1)
    with pytest.raises(UtilisationError, match="StepMeter: a step after close"), strict.step():
        raise AssertionError("not reached")


def test_a_step_inside_another_is_the_one_metered_and_says_so(caplog):
    model, x = Net(), torch.ones(2, 16)
    with StepMeter(model, device=CHIP) as meter, StepMeter(model, device=CHIP, strict=True) as strict:
        for _ in range(2):
            with meter.step():
                model(x)
                with meter.step():
                    model(x)
        (message,) = [record.getMessage() for record in caplog.records]
        assert message.startswith(
            "StepMeter: a step began inside another one, which is discarded: let `with meter.step"
        )
        assert [step.macs for step in meter.steps] == [2 * (16 * 32 + 32 * 4)] * 2
        meter.begin()  # without its end, as in a loop that skips a batch: the next one discards it
        meter.begin()
        model(x)
        meter.end()
        assert len(meter.steps) == 3 and len(caplog.records) == 1
        with pytest.raises(UtilisationError, match="inside another one"), strict.step(), strict.step():
            raise AssertionError("not reached")


def test_after_an_exception_nothing_is_counted_and_no_hook_is_left(counted):
    model = Attends()
    with pytest.raises(KeyboardInterrupt), StepMeter(model, device=CHIP) as meter:
        for length in range(2, 14):
            with meter.step():
                model(torch.ones(2, length, 8)).sum().backward()
        raise KeyboardInterrupt
    assert len(counted) < 12 and not model._forward_hooks
    assert math.isnan(meter.steps[-1].macs) and meter.steps[-1].seconds > 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": "Imaginary 9000"}, "no device 'Imaginary 9000'.* 'fvflops peak"),
        ({"device": "H100 MIG 1g.10gb"}, "slice"),
        ({}, "the device is unknown: pass device='H100'"),
        ({"device": Device("slow", matrix={"fp32": 1000})}, "the work of a step takes at least"),
        ({"device": Device("half", matrix={"fp16": 1000})}, "half has no peak for fp32"),
    ],
)
def test_a_strict_meter_raises_what_others_warn_of(options, reason, caplog):
    model = Net()

    def loop(strict):
        with StepMeter(model, strict=strict, **options) as meter, meter.step():
            backward_of(model, 4)()
        return meter

    with pytest.raises(UtilisationError, match=f"^StepMeter: mfu is unknown: .*{reason}"):
        loop(True)
    with caplog.at_level(logging.WARNING, "fvflops"):
        meter = loop(False)
        assert math.isnan(meter.last.mfu) and meter.last.macs > 0
    assert "mfu is NaN where it is unknown" in caplog.text and not model._forward_hooks


@pytest.mark.parametrize(
    ("device", "gpu", "warning"),
    [
        ("H100", None, "the peaks are for H100 SXM, but the parameters are on the CPU"),
        ("H100", "NVIDIA A100-SXM4-80GB", "the peaks are for H100 SXM, but the parameters are on NVIDIA A100-SXM4"),
        ("H100", "NVIDIA H100 80GB HBM3", ""),
        ("H100", "NVIDIA of next year", ""),
        (CHIP, None, ""),
    ],
)
def test_peaks_of_another_device_are_warned_of_once(device, gpu, warning, caplog, monkeypatch):
    if gpu is not None:
        monkeypatch.setattr("fvflops.measure.step_meter.clock._device_of", lambda models: torch.device("cuda"))
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device: gpu)
        monkeypatch.setattr(Clock, "read", lambda _: time.perf_counter())
        monkeypatch.setattr(Clock, "seconds_between", lambda _, start, stop: stop - start)
        monkeypatch.setattr(Clock, "memory_peak", lambda _: math.nan)
    with caplog.at_level(logging.WARNING, "fvflops"):
        meter_rows(Net(), 4, 4, device=device)
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == bool(warning) and warning in "".join(warnings)


@pytest.fixture(scope="module")
def ranks():
    """Return what each of two processes found."""
    if VERSION < (2, 7):
        pytest.skip("FSDP2 of this torch asks a CPU for the streams of a GPU")
    return run_ranks("meter_worker", RANKS)


@pytest.mark.parametrize("case", ["ddp", "compiled ddp", "fsdp2"])
def test_ranks_have_their_own_figures_and_their_sum(ranks, case):
    # Two products forward; backward two for the weights and one for the hidden values.
    macs = [rows_of(rank) * 5 * WIDTH**2 for rank in range(RANKS)]
    for rank, results in enumerate(ranks):
        found = results[case]
        assert found["equal"], "the meter changed the training"
        assert [step["macs"] for step in found["steps"]] == [macs[rank]] * STEPS
        assert [one["macs"] for one in found["ranks"]] == macs
        total = found["total"]
        assert (total["macs"], total["samples"]) == (sum(macs), sum(map(rows_of, range(RANKS))))
        assert total["devices"] == RANKS
        assert total["seconds"] == max(one["seconds"] for one in found["ranks"])
        assert found["mfu"] == pytest.approx(total["mfu"])
        assert total["mfu"] == pytest.approx(total["model_flops"] / total["seconds"] / RANKS / 10**15)
        assert "3 steps on 2 devices" in found["text"] and "rank 1: " in found["text"]


def test_a_compiled_replica_is_compiled_and_run_as_often_as_without_a_meter(ranks):
    for results in ranks:
        assert results["compiled ddp"]["graphs"] == {"compiled": 1, "run": STEPS}
        assert results["compiled ddp"]["graphs without a meter"] == {"compiled": 1, "run": STEPS}


def test_the_summary_has_the_predicted_memory_of_the_largest_step():
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    with StepMeter(model, optimizer=optimizer, device=CHIP) as meter:
        assert meter.summary() is None
        for rows in (4, 512, 8):
            with meter.step():
                model(torch.ones(rows, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    summary = meter.summary()
    step = TrainingStepAnalysis(model, torch.ones(512, 64), loss=torch.sum, optimizer=optimizer)
    assert summary.memory_predicted == pytest.approx(predict_memory(step).peak, rel=0.02)
    assert summary.steps == 3 and len(summary.ranks) == 1 and math.isnan(summary.total.memory_peak)
    assert "predicted" in str(summary) and "measured" not in str(summary)
    assert mfu(summary, device=CHIP, dtype="fp32") == pytest.approx(summary.total.mfu)


def run_for(monkeypatch, durations, expected, rows=4, **options):
    """Return a meter of steps whose clock shows the given durations."""
    now = iter([reading for duration in durations for reading in (0.0, duration)])
    monkeypatch.setattr(Clock, "read", lambda _: next(now))
    model = Net()
    with StepMeter(model, device=CHIP, expected=expected, **options) as meter:
        for _ in durations:
            with meter.step():
                backward_of(model, rows)()
    return meter


@pytest.mark.parametrize(
    ("rows", "options", "more"),
    [
        (4, {}, ""),
        (6, {}, "; a step has 50.0% more FLOPs than planned"),
        (2, {}, "; a step has 50.0% fewer FLOPs than planned"),
        (6, {"table": "exact"}, ""),  # the plan's FLOPs are by another convention
    ],
)
def test_the_share_of_a_step_that_its_plan_does_not_explain(rows, options, more, monkeypatch, caplog):
    step = plan_step(Net(), torch.ones(4, 16), mesh={"dp": 1}, loss=torch.sum)
    estimate = estimate_step(step, device="H100")
    planned = estimate.seconds
    # The first ten warm up; the median of the others is 2.5 times the plan.
    factors = [*[40] * 10, *[2.5, 7.5, 1.25, 2.5, 2.5] * 2, 7]
    with caplog.at_level(logging.INFO, "fvflops"):
        meter = run_for(monkeypatch, [planned * factor for factor in factors], estimate, rows, **options)
    ((level, text),) = [(entry.levelname, entry.getMessage()) for entry in caplog.records]
    assert level == "WARNING"
    assert text == (
        f"StepMeter: median of 10 steps: the plan accounts for 40.0% of {format_seconds(2.5 * planned)} a step; "
        f"60.0% is unexplained: run `fvflops explain` on a trace of it{more}"
    )
    assert [one.unexplained for one in meter.steps] == [1 - planned / (planned * factor) for factor in factors]
    assert meter.last.as_dict()["unexplained"] == pytest.approx(6 / 7)
    assert str(meter.last).endswith(", 85.7% unexplained")
    mean = sum(factors) / len(factors)
    shown = f"the plan accounts for {format_share(1 / mean)} of {format_seconds(mean * planned)} a step"
    assert shown in str(meter.summary())
    assert ["time, not explained by the plan", format_share(1 - 1 / mean)] in cells(meter.to_html(), "Mean step")


def test_a_step_faster_than_planned_has_nothing_unexplained(monkeypatch, caplog):
    with caplog.at_level(logging.INFO, "fvflops"):
        meter = run_for(monkeypatch, [0.25] * 20, 1.0)
        assert run_for(monkeypatch, [1.0625] * 20, 1.0).last.unexplained == 1 - 1 / 1.0625
    assert [entry.levelname for entry in caplog.records] == ["INFO"] * 2  # 6 % is within the error of a plan
    assert caplog.messages[0].endswith("a step takes 250 ms, 25.0% of the planned 1 s")
    assert meter.last.unexplained == -3 and "unexplained" not in str(meter.last)
    ranks = [StepFigures(1, seconds, expected_seconds=1.0) for seconds in (2.0, 4.0)]
    assert sum_ranks(ranks).unexplained == 0.75
    for bad in (0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="expected seconds must be a number above 0"):
            StepMeter(Net(), device=CHIP, expected=bad)
    with pytest.raises(TypeError, match="expected is a StepEstimate or seconds, got 'a second'"):
        StepMeter(Net(), device=CHIP, expected="a second")


def test_a_line_of_a_terminal_has_the_last_step_and_other_streams_nothing():
    terminal, file = io.StringIO(), io.StringIO()
    terminal.isatty = lambda: True
    for stream in (terminal, file):
        model = Net()
        with StepMeter(model, device=CHIP, live=stream) as meter:
            for _ in range(50):
                with meter.step(samples=4):
                    backward_of(model, 4)()
    assert file.getvalue() == ""
    shown = terminal.getvalue()
    assert shown.startswith("\rstep 1: ") and "samples/s" in shown and shown.endswith("\x1b[K\n")
    assert shown.count("\n") == 1 and shown.count("\r") < 20  # at most five a second
    assert all(len(line) < 80 for line in shown.replace("\x1b[K", "").split("\r"))


def cells(page, title):
    body = page.partition(f"<h2>{title}")[2].partition("</table>")[0].partition("<tbody>")[2]
    return [
        [html.unescape(re.sub("<[^>]*>", "", cell)).strip() for cell in re.findall(r"<td.*?</td>", row)]
        for row in re.findall(r"<tr>.*?</tr>", body)
    ]


def test_a_page_shows_the_utilisation_and_where_the_flops_went(tmp_path):
    teacher, student = Net().eval(), Net()
    with StepMeter(teacher, student, device=Device("small", matrix={"fp32": 10**10})) as meter:
        with pytest.raises(TraceError, match="there is no step to report"):
            meter.to_html()
        for rows in (4, 8, 4):
            with meter.step():
                with torch.no_grad():
                    teacher(torch.ones(rows, 16))
                student(torch.ones(rows, 16)).sum().backward()
    path = tmp_path / "loop.html"
    profile = ProfileAnalysis(student, torch.ones(4, 16), repeat=1)
    page = meter.to_html(path, profile=profile)
    assert path.read_text() == page
    ElementTree.fromstring(page[page.index("<svg") : page.index("</svg>") + 6])
    assert "MFU: forward, backward" in page and "steps 1 to 3" in page
    first, second = 2 * 16 * 16 * 32, 2 * 16 * 32 * 4  # of 16 rows in all
    # The student's first layer has no gradient of its input.
    flops = {"model": 3 * first + 4 * second, "Net0": first + second, "Net1": 2 * first + 3 * second}
    modules = {row[0]: row[1] for row in cells(page, "Modules")}
    assert {name: modules[name] for name in flops} == {name: format_short(count) for name, count in flops.items()}
    assert cells(page, "Phases: FLOPs of 3 steps of 3")[0][:2] == ["forward", format_short(2 * (first + second))]
    assert ["MFU", format_percent(meter.mean().mfu, 1)] in cells(page, "Mean step")
    assert ["peak memory, measured (B)", "unknown"] in cells(page, "Mean step")
    assert "Profile: Net on float32[4, 16]" in page and "FLOP/s" in page


def test_a_page_of_an_unknown_device_shows_the_flops_per_second():
    page = meter_rows(Net(), 4, device="Imaginary 9000").to_html()
    assert "FLOP/s of a device" in page and "MFU: forward" not in page and ["MFU", "unknown"] in cells(page, "Mean")
