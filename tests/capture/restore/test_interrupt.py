"""A signal at any moment, and a second one while the first is cleaned up after, leaves nothing behind."""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fvflops import FlopCountAnalysis, KernelProfile, TrainingStepAnalysis, record
from fvflops.capture.restore import interrupts
from fvflops.capture.restore.interrupts import allowed, deferred
from fvflops.capture.restore.restore import restore_all
from tests.support import interruptions
from tests.support.interruptions import (
    Block,
    Injection,
    Plain,
    Storm,
    Tiny,
    Training,
    describe,
    describe_process,
    differences,
)
from tests.support.random_cases import long_except

Case = Callable[[nn.Module, torch.Tensor], int]


def by_shapes(model, x):
    return FlopCountAnalysis(model, x).total()


def for_real(model, x):
    return FlopCountAnalysis(model, x, execution="real").total()


def training_step(model, x):
    return TrainingStepAnalysis(model, x, optimizer=torch.optim.AdamW).total()


def recorded(model, x):
    with record(model) as run:
        model(x)
    return run.total()


def recorded_by_shapes(model, x):
    with record(model, execution="shapes") as run:
        model(run.in_shapes(x)).backward()
    return run.total()


CASES = (by_shapes, for_real, training_step, recorded, recorded_by_shapes)
# Where the handlers of ours stand during the model's run too: what a signal raises is never lost.
ALONE = (by_shapes, for_real, training_step)


@pytest.fixture(autouse=True, scope="module")
def loaded():
    """Let torch load what it loads when first used, warnings' filters included."""
    training_step(Tiny(), torch.ones(1, 2))


class Subject:
    """A model that is counted over and over in one way, and what it and the process look like."""

    def __init__(self, case, model, x):
        self.case, self.model, self.x = case, model, x
        self.total = self.run()
        started = time.perf_counter()
        for _ in range(3):
            self.run()
        self.seconds = (time.perf_counter() - started) / 3

    def run(self):
        return self.case(self.model, self.x)

    def look(self):
        told = describe_process()
        # What a real recording changes of the model, and of random numbers, is the program's own.
        return told if self.case is recorded else told | describe(self.model)


def make_subjects():
    torch.manual_seed(0)
    x = torch.rand(2, 3, 4, 4)
    return [
        Subject(case, make(), x)
        for case, make in (
            *((by_shapes, Block), (for_real, Block), (by_shapes, Training), (for_real, Training)),
            *((training_step, Training), (recorded, Plain), (recorded_by_shapes, Plain)),
        )
    ]


def storm(subjects, signals, seed):
    """Interrupt counts at random moments, some twice or three times, and say how many signals came where."""
    choose = random.Random(seed)
    tally = Counter()
    driver = Storm()
    while tally["signals"] < signals:
        subject = choose.choice(subjects)
        delay = max(choose.random() * subject.seconds * 1.2, 1e-5)
        before = subject.look()
        interrupted, result = driver.run(subject.run, delay, choose.choice((1, 1, 2, 3)), choose.uniform(20e-6, 320e-6))
        left = differences(before, subject.look())
        assert not left, f"{subject.case.__name__} of {type(subject.model).__name__} at {driver.where}: {left}"
        assert interrupted or result == subject.total
        if subject.case in ALONE:
            assert interrupted or not driver.raised, f"{subject.case.__name__}: lost at {driver.where}"
        tally["signals"] += driver.raised
        tally["analyses"] += 1
        tally["interrupted"] += interrupted
        tally["inside"] += driver.inside
    return tally


def check_afterwards(subjects):
    for subject in subjects:
        assert subject.run() == subject.total
    assert interruptions.is_free(), "a lock is held"


@pytest.mark.long
def test_a_storm_of_signals_leaves_nothing():
    subjects = make_subjects()
    tally = storm(subjects, 2000, seed=1)
    print(dict(tally))
    assert tally["inside"] > 1000, tally
    check_afterwards(subjects)


def inject(case, *, bytecodes, step):
    """Count with a signal at each of the moments, and return how many there are."""
    subject = Subject(case, Tiny(), torch.ones(1, 2))
    injection = Injection(("contextlib.py",), bytecodes=bytecodes)
    injection.run(subject.run, 0)
    moments = injection.seen
    for number in range(min(step, 7), moments + 1, step):
        before = subject.look()
        interrupted, result = injection.run(subject.run, number)
        left = differences(before, subject.look())
        assert not left, f"moment {number} of {moments}, at {injection.where}: {left}"
        assert interrupted or (case not in ALONE and result == subject.total), f"lost at {injection.where}"
    assert subject.run() == subject.total
    assert interruptions.is_free()
    return moments


# Some lines by default; at any line, and between the bytecodes of a line, when asked for.
@pytest.mark.parametrize(("bytecodes", "step"), long_except([(False, 151)], [(False, 151), (False, 1), (True, 11)]))
@pytest.mark.parametrize("case", CASES)
def test_a_signal_leaves_nothing(case, bytecodes, step):
    assert inject(case, bytecodes=bytecodes, step=step) > 2000


@contextmanager
def handler(number, function):
    before = signal.signal(number, function)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextmanager
def unchanged(*models):
    """Check that what is inside leaves the process and the models as they are."""
    before = [describe_process(), *map(describe, models)]
    yield
    after = [describe_process(), *map(describe, models)]
    assert not [name for pair in zip(before, after, strict=True) for name in differences(*pair)]


class Interrupting(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.act = act

    def forward(self, x):
        y = self.linear(x)
        self.act()
        return y.sum()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, BaseException])
def test_whatever_a_model_raises_leaves_nothing(case, error):
    def act():
        raise error("stop")

    model = Interrupting(act)
    with unchanged(model), pytest.raises(error, match="stop"):
        case(model, torch.ones(1, 2))


@pytest.mark.parametrize("case", [by_shapes, for_real, training_step, recorded_by_shapes])
def test_what_a_broken_run_leaves_of_a_threads_state_is_put_back(case):
    """A signal may break off the `__exit__` of torch's own contexts."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    def act():
        torch.set_grad_enabled(not torch.is_grad_enabled())
        torch.autocast("cpu", dtype=torch.float16).__enter__()
        torch.inference_mode().__enter__()
        if hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):  # torch 2.7's cannot be seen
            torch._C._autograd._push_saved_tensors_default_hooks(lambda x: x, lambda x: x)
        torch._C._functorch._vmap_increment_nesting(2, "error")
        torch.device("cpu").__enter__()
        Mode().__enter__()
        raise KeyboardInterrupt

    model = Interrupting(act)
    with unchanged(model), pytest.raises(KeyboardInterrupt):
        case(model, torch.ones(1, 2))


@pytest.mark.parametrize("case", CASES)
def test_a_time_limit_in_the_midst_of_a_run_is_raised(case):
    """An ordinary exception from a signal's handler is not a reason to run the model in another way."""
    runs = []

    def expire(number, frame):
        raise TimeoutError("time is up")

    model = Interrupting(lambda: (runs.append(1), signal.raise_signal(signal.SIGALRM)))
    with unchanged(), handler(signal.SIGALRM, expire), pytest.raises(TimeoutError, match="time is up"):
        case(model, torch.ones(1, 2))
    assert runs == [1]


def test_a_long_run_ends_at_once():
    model = Interrupting(lambda: time.sleep(30))
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    started = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        for_real(model, torch.ones(1, 2))
    assert time.perf_counter() - started < 10


def test_waiting_for_another_thread_ends_at_once():
    running, done = threading.Event(), threading.Event()
    model = Interrupting(lambda: (running.set(), done.wait(30)))
    other = threading.Thread(target=for_real, args=(model, torch.ones(1, 2)))
    other.start()
    try:
        assert running.wait(10)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        started = time.perf_counter()
        with pytest.raises(KeyboardInterrupt):
            by_shapes(Tiny(), torch.ones(1, 2))
        assert time.perf_counter() - started < 10
    finally:
        done.set()
        other.join()
    assert by_shapes(Tiny(), torch.ones(1, 2))


def test_a_handler_that_raises_nothing_is_called_and_the_count_goes_on():
    seen = []
    model = Interrupting(lambda: (signal.raise_signal(signal.SIGTERM), seen.append(-1)))
    with handler(signal.SIGTERM, lambda number, frame: seen.append(number)):
        assert by_shapes(model, torch.ones(1, 2)) == 4
    assert seen == [signal.SIGTERM, -1]


def test_a_model_that_catches_an_interrupt_can_be_interrupted_again():
    caught = []

    def act():
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            caught.append(1)
        assert by_shapes(Tiny(), torch.ones(1, 2)) == 4
        signal.raise_signal(signal.SIGINT)
        caught.append(2)

    with pytest.raises(KeyboardInterrupt):
        for_real(Interrupting(act), torch.ones(1, 2))
    assert caught == [1]


def test_a_second_interrupt_waits_while_the_first_is_cleaned_up_after():
    done = []

    def act():
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            done.append("cleaned up")

    before = describe_process()
    with pytest.raises(KeyboardInterrupt):
        for_real(Interrupting(act), torch.ones(1, 2))
    assert done == ["cleaned up"]
    assert differences(before, describe_process()) == ["random"]  # the weights drawn here


def test_a_handler_that_a_model_installs_stays():
    def mine(number, frame):
        pass

    with handler(signal.SIGTERM, lambda number, frame: None):
        by_shapes(Interrupting(lambda: signal.signal(signal.SIGTERM, mine)), torch.ones(1, 2))
        assert signal.getsignal(signal.SIGTERM) is mine


def test_signals_wait_where_they_are_held_back():
    seen = []
    with handler(signal.SIGTERM, lambda number, frame: seen.append("handled")), deferred():
        signal.raise_signal(signal.SIGTERM)
        seen.append("held back")
        with allowed():
            signal.raise_signal(signal.SIGTERM)
            with deferred(), allowed():
                signal.raise_signal(signal.SIGTERM)
            with deferred():
                signal.raise_signal(signal.SIGTERM)
                seen.append("held back")
        with deferred(), allowed():  # inside of what is set up
            signal.raise_signal(signal.SIGTERM)
            seen.append("held back")
    assert seen == ["held back", "handled", "handled", "handled", "held back", "handled", "held back", "handled"]


def test_of_several_signals_each_is_handled_and_the_first_error_raised():
    seen = []

    def refuse(number, frame):
        seen.append(number)
        raise ValueError(number)

    raised = pytest.raises(ValueError, match=str(int(signal.SIGALRM)))
    with handler(signal.SIGTERM, refuse), handler(signal.SIGALRM, refuse), unchanged(), raised, deferred():
        for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGALRM):
            signal.raise_signal(number)
    assert seen == [signal.SIGALRM, signal.SIGTERM]


@pytest.mark.parametrize("calls", ["a", "b", "aa", "ba", "bbba", ".ab", ".bbb", "..a", "..b", "..ab", "..bbbb"])
def test_handlers_that_raise_while_others_are_replaced_leave_all_as_they_were(calls, monkeypatch):
    """Python calls handlers before (b) it sets another, and after (a); the first two settings hold signals back."""
    left = list(calls)

    def set_handler(number, function):
        when = left.pop(0) if left else "."
        if when == "b":
            raise TimeoutError
        signal.signal(number, function)
        if when == "a":
            raise TimeoutError

    entered = False
    with handler(signal.SIGTERM, lambda number, frame: None), unchanged():
        monkeypatch.setattr(interrupts, "_set_handler", set_handler)
        with pytest.raises(TimeoutError), deferred():
            entered = True
    assert entered == calls.startswith("..")
    assert not left


def test_nothing_keeps_another_thing_from_being_restored():
    restored = []

    def restore(number):
        restored.append(number)
        if number == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        restore_all(((restore, (0, 1)), (restore, (2,))))
    assert restored == [0, 1, 2]


@pytest.mark.parametrize("execution", ["real", "shapes"])
def test_a_recording_that_nobody_ends_ends_with_its_object(execution):
    model = Plain()
    before = describe_process() | describe(model)
    run = record(model, execution=execution)
    run.__enter__()
    model(run.in_shapes(torch.ones(1, 3, 4, 4)))
    del run
    left = differences(before, describe_process() | describe(model))
    assert execution == "real" or not left
    assert not [name for name in left if "norm" not in name]


def test_a_profile_of_kernels_leaves_nothing():
    def act():
        raise KeyboardInterrupt

    def profile():
        with pytest.raises(KeyboardInterrupt), KernelProfile(model):
            model(torch.ones(1, 2))

    model = Interrupting(act)
    profile()  # loads what torch loads late
    with unchanged():
        profile()
    assert not torch.autograd._profiler_enabled()


def in_child(act):
    """Return what a function says in a forked child, which is ended if it hangs."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            os.write(writes, str(act()).encode())
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as file:
        said = file.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.parametrize("case", [for_real, by_shapes, recorded, recorded_by_shapes])
def test_a_child_that_is_forked_while_another_thread_records_is_free(case):
    def count():
        left = differences(before, describe_process() | describe(model))
        return f"{by_shapes(Tiny(), torch.ones(1, 2))} {for_real(Tiny(), torch.ones(1, 2))} {left}"

    running, done = threading.Event(), threading.Event()
    model = Interrupting(lambda: (running.set(), done.wait(30)))
    before = describe_process() | describe(model)
    other = threading.Thread(target=case, args=(model, torch.ones(1, 2)))
    other.start()
    try:
        assert running.wait(10)
        # Python gives a child random numbers of its own.
        assert in_child(count) == "4 4 ['random']"
    finally:
        done.set()
        other.join()


def test_a_child_that_is_forked_while_locks_are_held_is_free():
    from fvflops.capture import compiler
    from fvflops.capture import run as record
    from fvflops.capture.instrument import patching

    held, done = threading.Event(), threading.Event()

    def hold():
        with patching._LOCK, record._LOCK, compiler._EAGER._lock:
            held.set()
            done.wait(30)

    other = threading.Thread(target=hold)
    other.start()
    try:
        assert held.wait(10)
        assert in_child(lambda: by_shapes(Training(), torch.rand(2, 3, 4, 4)) > 0) == "True"
    finally:
        done.set()
        other.join()


@pytest.mark.parametrize("execution", ["real", "shapes"])
def test_a_child_that_is_forked_inside_a_recording_is_outside_of_it(execution):
    model = Tiny()

    def work():
        values = torch.ones(3) + 1  # as a data loader's worker makes
        return f"{values.tolist()} {type(next(model.parameters())).__name__} {len(run.trace().calls)}"

    with record(model, execution=execution) as run:
        model(run.in_shapes(torch.ones(1, 2)))
        before = len(run.trace().calls)
        assert in_child(work) == f"[2.0, 2.0, 2.0] Parameter {before}"
        model(run.in_shapes(torch.ones(1, 2)))
    assert run.total() == 8
