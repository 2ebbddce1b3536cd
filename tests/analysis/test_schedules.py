"""The schedules: which steps are recorded, what one of them comes to, and that nothing is installed in between."""

import inspect
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fvflops
from fvflops.analysis.steps import Spread
from fvflops.trace import TraceError
from tests.support.installed_patches import NOTHING, installed

# A layer of 3 inputs and 2 outputs on n rows: 6 n multiply-adds forward, and as many for the gradient of its weight.
MACS_PER_ROW = 6


class Loop:
    """A plain training loop, whose batches have given numbers of rows."""

    def __init__(self):
        self.model = nn.Linear(3, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def train(self, rows=1):
        checkpoint(self.model, torch.ones(rows, 3), use_reentrant=False).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def loop():
    return Loop()


@pytest.fixture
def quiet_profiler():
    """Keep in what the profiler warns of: schedules without warming up, which a count does not need, or broken off."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def profiler_schedule(**numbers):
    if "skip_first_wait" in numbers and "skip_first_wait" not in inspect.signature(torch.profiler.schedule).parameters:
        pytest.skip("this torch's schedule always waits")
    return torch.profiler.schedule(**numbers)


COMBINATIONS = [
    dict(zip(("wait", "warmup", "active", "repeat", "skip_first"), numbers, strict=True))
    for numbers in itertools.product((0, 1, 3), (0, 2), (1, 2, 5), (0, 1, 3), (0, 4))
]


@pytest.mark.usefixtures("quiet_profiler")
@pytest.mark.parametrize("first_wait", [{}, {"skip_first_wait": 0}, {"skip_first_wait": 1}, {"skip_first_wait": 7}])
def test_a_schedule_says_what_that_of_the_profiler_says(first_wait):
    assert len(COMBINATIONS) == 108
    for numbers in COMBINATIONS:
        numbers = {**numbers, **first_wait}
        ours, theirs = fvflops.schedule(**numbers), profiler_schedule(**numbers)
        assert [ours(step) for step in range(60)] == [theirs(step).name.lower() for step in range(60)], numbers


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"active": 0}, "active must be an integer >= 1, not 0"),
        ({"active": 1, "wait": -1}, "wait must be an integer >= 0, not -1"),
        ({"active": 1, "repeat": 1.5}, "repeat must be an integer >= 0, not 1.5"),
        ({"active": True}, "active must be an integer >= 1, not True"),
        ({"active": 1, "skip_first_wait": -2}, "skip_first_wait must be an integer >= 0, not -2"),
    ],
)
def test_a_number_that_makes_no_schedule_is_named(numbers, message):
    with pytest.raises(ValueError, match=message):
        fvflops.schedule(**numbers)


def profiled(plan, steps):
    """Return at which steps torch's profiler calls on_trace_ready, the last of them after the loop."""
    calls = []
    profiler = torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=plan,
        on_trace_ready=lambda profiler: calls.append(profiler.step_num),
    )
    with profiler:
        for _ in range(steps):
            torch.ones(1)
            profiler.step()
    return calls


@pytest.mark.usefixtures("quiet_profiler")
@pytest.mark.parametrize(
    ("numbers", "steps"),
    [
        ({"wait": 1, "warmup": 1, "active": 2}, 9),
        ({"wait": 1, "warmup": 1, "active": 2}, 8),
        ({"wait": 0, "warmup": 0, "active": 1}, 3),
        ({"wait": 0, "warmup": 0, "active": 3}, 5),
        ({"wait": 1, "warmup": 0, "active": 2, "repeat": 2}, 9),
        ({"wait": 2, "warmup": 0, "active": 1, "repeat": 1, "skip_first": 2}, 6),
        ({"wait": 9, "warmup": 0, "active": 1}, 3),
    ],
)
def test_a_trace_is_ready_when_the_profilers_is(loop, numbers, steps):
    plan = torch.profiler.schedule(**numbers)  # the profiler's own is taken too
    calls = []
    with fvflops.record(loop.model, schedule=plan, on_trace_ready=lambda run: calls.append(run.step_num)) as run:
        for _ in range(steps):
            loop.train()
            run.step()
    assert calls == profiled(plan, steps)


@pytest.mark.usefixtures("quiet_profiler")
def test_a_cycle_that_a_schedule_breaks_off_is_not_ready(loop):
    action = torch.profiler.ProfilerAction
    actions = [action.RECORD, action.NONE, action.RECORD, action.RECORD_AND_SAVE, action.NONE, action.RECORD]
    plan = (actions + [action.NONE] * 3).__getitem__
    calls = []
    with fvflops.record(loop.model, schedule=plan, on_trace_ready=lambda run: calls.append(run.step_num)) as run:
        for _ in range(7):
            loop.train()
            run.step()
    assert calls == profiled(plan, 7) == [4]
    assert len(run.steps) == 4


def test_what_is_said_of_a_step_must_be_known(loop):
    with pytest.raises(ValueError, match=r"returned 'yes' for step 0: use fvflops.schedule"):
        fvflops.record(loop.model, schedule=lambda step: "yes").__enter__()
    assert installed() == NOTHING


def test_the_steps_that_are_recorded_are_the_active_ones(loop):
    plan = fvflops.schedule(wait=1, warmup=1, active=2, repeat=2, skip_first=1)
    with fvflops.record(loop.model, schedule=plan) as run:
        for number in range(12):
            loop.train(rows=2**number)
            run.step()
    # Steps 3, 4, 7 and 8, of which the binary places tell.
    assert run.macs() == 2 * MACS_PER_ROW * 0b000110011000
    assert [sum(trace.calls.values()) > 0 for trace in run.steps] == [True] * 4


def test_on_trace_ready_is_called_with_the_steps_of_the_cycle_done(loop):
    seen = []
    plan = fvflops.schedule(wait=1, active=2)

    def ready(run):
        # The Traces of the cycle have their events, earlier cycles' are aggregated.
        seen.append((run.step_num, run.macs(), [trace.events is not None for trace in run.steps]))

    with fvflops.record(loop.model, schedule=plan, on_trace_ready=ready) as run:
        for _ in range(6):
            loop.train()
            run.step()
    step = 2 * MACS_PER_ROW
    assert seen == [(3, 2 * step, [True, True]), (6, 4 * step, [False, False, True, True])]
    assert run.steps[0] is run.steps[1]  # equal steps are kept once


def test_between_active_steps_nothing_is_installed(loop):
    plan = fvflops.schedule(wait=1, warmup=1, active=2, repeat=2)
    found = []
    with fvflops.record(loop.model, schedule=plan) as run:
        for _ in range(10):
            found.append(installed() == NOTHING)
            loop.train()
            assert found[-1] == (installed() == NOTHING)
            run.step()
    assert found == [True, True, False, False] * 2 + [True, True]
    assert installed() == NOTHING


def test_all_that_is_looked_at_is_changed_by_an_active_step(loop):
    """The comparison above sees each kind of thing: nothing in it is the same in an active step by mistake."""
    with fvflops.record(loop.model):
        during = installed()
    assert not [name for name, thing in during.items() if thing == NOTHING[name]]


def test_between_two_steps_a_loop_can_pause_so_that_nothing_is_installed(loop):
    with fvflops.record(loop.model) as run:
        run.pause()
        assert installed() != NOTHING  # a step that has begun is only paused
        with pytest.raises(TraceError, match=r"no complete step was recorded: the first continues until step\(\)"):
            run.per_step()
        for _ in range(3):
            run.resume()
            assert installed() != NOTHING
            loop.train()
            run.pause()
            run.step()
            assert installed() == NOTHING
            loop.train(rows=100)  # as an evaluation between the steps would
    assert run.macs() == 3 * 2 * MACS_PER_ROW
    assert run.per_step().steps == 3


def test_a_step_that_ends_within_paused_begins_after_it(loop):
    with fvflops.record(loop.model) as run:
        loop.train()
        with run.paused():
            run.step()
            with run.paused():
                loop.train(rows=100)
            loop.train(rows=100)
            assert installed() == NOTHING
        loop.train()
        run.step()
    assert run.per_step().total == Spread(2 * MACS_PER_ROW, 2 * MACS_PER_ROW, 2 * MACS_PER_ROW)


def test_an_exception_in_an_active_step_leaves_nothing(loop):
    calls = []
    with (
        pytest.raises(ZeroDivisionError),
        fvflops.record(loop.model, schedule=fvflops.schedule(active=2), on_trace_ready=calls.append) as run,
    ):
        for number in range(4):
            loop.train()
            if number == 2:
                raise ZeroDivisionError
            run.step()
    assert installed() == NOTHING
    assert len(calls) == 1
    # What the third step did is counted with all, but it is not a step.
    assert run.macs() == 3 * 2 * MACS_PER_ROW and not run.trace().complete
    assert run.per_step().steps == len(run.steps) == 2
    with pytest.raises(RuntimeError, match="call it inside the with block"):
        run.step()


def test_an_exception_in_on_trace_ready_leaves_nothing(loop):
    def ready(run):
        raise OSError("disk full")

    with (
        pytest.raises(OSError, match="disk full"),
        fvflops.record(loop.model, schedule=fvflops.schedule(active=1), on_trace_ready=ready) as run,
    ):
        loop.train()
        run.step()
    assert installed() == NOTHING
    assert run.macs() == 2 * MACS_PER_ROW


@pytest.mark.parametrize("wait", [3, 5])  # it becomes active after the last step, or never
def test_a_schedule_that_never_becomes_active_is_told(loop, wait):
    calls = []
    plan = fvflops.schedule(wait=wait, active=1)
    with fvflops.record(loop.model, schedule=plan, on_trace_ready=calls.append) as run:
        for _ in range(3):
            loop.train()
            run.step()
    assert calls == []
    for ask in (run.total, run.trace, run.by_phase, run.per_step):
        with pytest.raises(TraceError, match=r"recorded.*: the schedule made none of 3 steps active"):
            ask()
    assert run.steps == ()


@pytest.mark.parametrize("plan", [None, fvflops.schedule(wait=1, active=1)], ids=["all steps", "a schedule"])
def test_step_outside_of_the_with_block_is_refused(loop, plan):
    run = fvflops.record(loop.model, schedule=plan)
    with pytest.raises(RuntimeError, match=r"^step\(\) marks the end of a step"):
        run.step()
    with pytest.raises(TraceError, match="the with block was not entered"):
        run.per_step()
    with run:
        pass
    with pytest.raises(RuntimeError, match=r"^step\(\) marks the end of a step"):
        run.step()
    run.resume()
    assert installed() == NOTHING
    with pytest.raises(RuntimeError, match="create another"), run:
        pass


def test_batches_of_variable_length_have_a_mean_a_least_and_a_most(loop):
    rows = (2, 5, 1, 2)
    with fvflops.record(loop.model, table="exact", schedule=fvflops.schedule(active=1)) as run:
        for count in rows:
            loop.train(rows=count)
            run.step()
    step = run.per_step()
    # Forward a row takes 6 multiply-adds and 2 biases, 14, none of which checkpointing needs again, and 2 for the sum;
    # backward 6 multiply-adds for the weight's gradient and 2 for the bias'. The optimizer's work is the same whatever
    # the batch: a product and a sum for each of 8 parameters.
    forward, backward, optimizer = [16 * count for count in rows], [14 * count for count in rows], 16
    assert step.phases == {
        "forward": Spread(sum(forward) / 4, min(forward), max(forward)),
        "backward": Spread(sum(backward) / 4, min(backward), max(backward)),
        "optimizer": Spread(optimizer, optimizer, optimizer),
    }
    assert (step.steps, step.mean, step.minimum, step.maximum) == (4, 91, 46, 166)
    assert step.mean * 4 == run.total()
    assert {phase: spread.mean * 4 for phase, spread in step.phases.items()} == {
        phase: sum(labels.values()) for phase, labels in run.by_phase().items()
    }
    assert step.total.differs and not step.phases["optimizer"].differs
    shown = "4 steps, 91 flops per step (46 to 0.166K): forward 40 (16 to 80), backward 35 (14 to 70), optimizer 16"
    assert str(step) == shown


def test_without_step_the_with_block_is_one(loop):
    with fvflops.record(loop.model) as run:
        loop.train()
        loop.train()
    assert str(run.per_step()) == "1 step, 24 flops per step: forward 12, backward 12; 48 at 2 per MAC"


def test_what_comes_after_the_last_step_is_counted_but_is_no_step(loop):
    with fvflops.record(loop.model) as run:
        for _ in range(2):
            loop.train()
            run.step()
        assert run.per_step().steps == 2  # asked inside, too
        loop.train(rows=10)
    assert run.total() == 2 * 12 + 120 and type(run.per_step().mean) is int
    assert str(run.per_step()) == "2 steps, 12 flops per step: forward 6, backward 6; 24 at 2 per MAC"


def test_an_op_that_the_table_does_not_know_is_named_and_a_handle_counts_it():
    with torch.library._scoped_library("fvflops_schedules", "FRAGMENT") as library:
        library.define("scan(Tensor x) -> Tensor")
        library.impl("scan", lambda x: x + 1, "CPU")
        with fvflops.record() as run:
            for _ in range(2):
                torch.ops.fvflops_schedules.scan(torch.ones(3))
                run.step()
    assert str(run.per_step()) == (
        "2 steps, 0 flops per step; unsupported, so not counted: fvflops_schedules::scan (2 calls)"
    )
    run.set_op_handle("fvflops_schedules::scan", lambda call: 5 * call.out.numel)
    assert str(run.per_step()) == "2 steps, 15 flops per step: forward 15"


def test_a_handle_for_what_was_looked_into_is_refused():
    with fvflops.record(table="exact") as run, torch.inference_mode():  # which shows composite ops
        nn.functional.cosine_similarity(torch.ones(3), torch.ones(3), dim=0)
        run.step()
    run.set_op_handle("aten::cosine_similarity", lambda call: 1)
    for ask in (run.per_step, run.total):
        with pytest.raises(
            TraceError,
            match="decomposed aten::cosine_similarity: to count that as a whole, set handles before the with block",
        ):
            ask()
