"""Work on inputs and constants, in threads and processes, and of lazy results is counted or reported."""

import asyncio
import queue
import threading
import warnings

import pytest
import torch

from fvflops import FlopCountAnalysis, TrainingStepAnalysis, record
from fvflops.cli import main
from fvflops.counting.uncounted_work import find_unsupported_locations
from tests.support.models import unseen_memory_and_threads as work
from tests.support.models.unseen_memory_and_threads import ENDLESS, KINDS, LAYER, RESULTS, SHAPE, Net
from tests.support.random_cases import long_except

ALL = {**KINDS, **RESULTS, **ENDLESS}
FILE = "tests/support/models/unseen_memory_and_threads.py"
# These wait for seconds.
SLOW = ("thread_that_does_not_end", "coroutine_that_does_not_end")


@pytest.fixture(autouse=True)
def no_grad():
    work.start_server()
    work.RELEASED.clear()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NumPy, forks, and coroutines that a program does not await
        yield
    work.RELEASED.set()


def sine():
    return torch.linspace(-1, 1, 32).reshape(SHAPE)


def unseen(analysis):
    return {op: calls for op, calls in analysis.unsupported_ops().items() if op.startswith("unseen::")}


def calls_of_the_layer(analysis):
    return analysis.by_module().get("scan.layer", 0) / LAYER


async def gather(items):
    return [item async for item in items]


async def wait_for(item):
    return await item


def use(value):
    if hasattr(value, "__next__"):
        for item in value:
            use(item)
    elif hasattr(value, "__anext__"):
        asyncio.run(gather(value))
    elif hasattr(value, "__await__"):
        asyncio.run(wait_for(value))
    elif isinstance(value, (list, tuple)):
        for item in value:
            use(item)
    elif isinstance(value, dict):
        use(list(value.values()))
    elif isinstance(value, work.Output):
        use(value.steps)


ENDING = [*KINDS, *(kind for kind in ENDLESS if kind not in SLOW)]
AUTO, REAL = ([(kind, execution) for kind in ENDING] for execution in ("auto", "real"))


@pytest.mark.parametrize(("kind", "execution"), long_except([*AUTO, *REAL[::3]], AUTO + REAL))
def test_work_is_counted_or_reported(kind, execution):
    compute, calls, op = ALL[kind]
    x = sine()
    analysis = FlopCountAnalysis(Net(compute), x, execution=execution).unsupported_ops_warnings(False)
    assert calls_of_the_layer(analysis) == calls
    found = unseen(analysis)
    # Real execution sees that the buffer has changed, which is the array's memory.
    assert found == ({} if op is None else {op: 1}) or (kind == "array_of_a_buffer" and len(found) == 1)
    for name, locations in find_unsupported_locations(analysis.trace(), analysis.counts()).items():
        if name in found:
            # A result is the outermost module's; an array that the run has changed has no line.
            assert all(location.startswith(("'scan'", "Net at")) for location in locations)
            assert all(FILE in location for location in locations) or name == "unseen::ndarray"
    assert torch.equal(x, sine())  # what NumPy wrote to the input is restored


@pytest.mark.parametrize("kind", [kind for kind in (*KINDS, *ENDLESS) if kind not in SLOW])
def test_a_recording_counts_or_reports_work(kind):
    compute, calls, op = ALL[kind]
    model = Net(compute)
    with record(model) as run:
        result = model(sine())
    del result
    assert calls_of_the_layer(run) == (0 if kind == "endless_generator" else calls)
    assert len(unseen(run)) == (op is not None)


@pytest.mark.parametrize("execution", ["auto", "real"])
@pytest.mark.parametrize("kind", RESULTS)
def test_an_unfinished_result_is_run_to_its_end(kind, execution):
    compute, calls, _ = RESULTS[kind]
    analysis = FlopCountAnalysis(Net(compute), sine(), execution=execution)
    assert analysis.by_module()["scan.layer"] == calls * LAYER
    assert unseen(analysis) == {}


@pytest.mark.parametrize("is_used", [True, False])
@pytest.mark.parametrize("kind", RESULTS)
def test_a_recording_counts_a_used_result_and_reports_another(kind, is_used):
    compute, calls, op = RESULTS[kind]
    model = Net(compute)
    with record(model) as run:
        result = model(sine())
        if is_used:
            use(result)
    if is_used:
        assert calls_of_the_layer(run) == calls
        assert unseen(run) == {}
    else:
        assert unseen(run) == {op: 1}


@pytest.mark.parametrize("execution", ["auto", "real"])
def test_an_input_that_is_written_to_without_an_export_is_reported(execution):
    model = Net(work.input_written_with_dispatch_disabled)
    assert len(unseen(FlopCountAnalysis(model, sine(), execution=execution).unsupported_ops_warnings(False))) == 1


@pytest.mark.parametrize("kind", SLOW)
def test_work_that_does_not_end_is_reported_after_seconds(kind):
    compute, calls, op = ENDLESS[kind]
    analysis = FlopCountAnalysis(Net(compute), sine()).unsupported_ops_warnings(False)
    assert calls_of_the_layer(analysis) == calls
    assert unseen(analysis) == {op: 1}


def test_a_loss_uses_an_unfinished_result():
    def loss(steps):
        return sum(step.sum() for step in steps)

    with torch.enable_grad():
        step = TrainingStepAnalysis(Net(RESULTS["generator"].compute), sine(), loss=loss)
    phases = step.by_module_and_phase()["scan.layer"]
    assert (phases["forward"], phases["backward"]) == (3 * LAYER, 3 * LAYER)
    assert unseen(step) == {}


def test_a_result_is_awaited_where_an_event_loop_runs():
    async def notebook():
        analysis = FlopCountAnalysis(Net(RESULTS["coroutine_with_tasks"].compute), sine())
        analysis.total()
        return analysis

    assert asyncio.run(notebook()).by_module()["scan.layer"] == 3 * LAYER


def test_an_event_loop_of_the_program_stays():
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        FlopCountAnalysis(Net(RESULTS["coroutine"].compute), sine()).total()
        assert asyncio.get_event_loop() is loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def test_a_thread_that_waits_for_tasks_is_not_reported():
    tasks = queue.Queue()

    def run_tasks():
        while (task := tasks.get()) is not None:
            task()

    def compute(scan, x):
        done = threading.Event()
        threading.Thread(target=run_tasks, daemon=True).start()
        tasks.put(lambda: (scan.layer(x), done.set()))
        done.wait()
        return x

    analysis = FlopCountAnalysis(Net(compute), sine(), execution="real")
    assert calls_of_the_layer(analysis) == 1
    assert unseen(analysis) == {}
    tasks.put(None)


def test_strict_fails_on_an_empty_table(capsys):
    assert main(["count", "torch.nn:Identity", "--input", "4,8"]) == 0
    assert main(["count", "torch.nn:Identity", "--input", "4,8", "--strict"]) == 2
    assert "no op was called" in capsys.readouterr().err
