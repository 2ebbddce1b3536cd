"""What a model runs in other threads is counted in its modules, and a thread is left as it was."""

import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch as python_dispatch

from fvflops import FlopCountAnalysis, TrainingStepAnalysis, record
from fvflops.capture.shapes.shape_cache import clear_cache
from tests.support.models.parts import Applied

EXECUTOR = ThreadPoolExecutor(2)
POOL = ThreadPool(2)


def _threads(layer, parts):
    out = {}
    threads = [threading.Thread(target=lambda i=i: out.__setitem__(i, layer(parts[i]))) for i in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [out[i] for i in range(len(parts))]


class _Runner(threading.Thread):
    def __init__(self, layer, part):
        super().__init__()
        self.layer, self.part = layer, part

    def run(self):
        self.out = self.layer(self.part)


def _subclass(layer, parts):
    threads = [_Runner(layer, part) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
        assert "run" not in vars(thread)
    return [thread.out for thread in threads]


def _new_executor(layer, parts):
    with ThreadPoolExecutor(2) as executor:
        return list(executor.map(layer, parts))


WAYS = {
    "threads": _threads,
    "a subclass of Thread": _subclass,
    "a thread in a thread": lambda layer, parts: _threads(lambda part: _threads(layer, [part])[0], parts),
    "an executor of the program": lambda layer, parts: list(EXECUTOR.map(layer, parts)),
    "an executor of the model": _new_executor,
    "futures": lambda layer, parts: [item.result() for item in [EXECUTOR.submit(layer, part) for part in parts]],
    "a pool's map": lambda layer, parts: POOL.map(layer, parts),
    "a pool's imap": lambda layer, parts: list(POOL.imap(layer, parts)),
    "a pool's apply_async": lambda layer, parts: [r.get() for r in [POOL.apply_async(layer, (p,)) for p in parts]],
}


class Net(nn.Module):
    """4 rows through 8 x 8 multiply-adds, and three times through 8 x 16 in other threads: 256 + 3 * 512."""

    def __init__(self, way):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.branch = nn.Linear(8, 16)
        self.way = way

    def forward(self, x):
        x = self.first(x)
        return sum(self.way(self.branch, [x, x, x]))


COUNTS = {"": 1792, "first": 256, "branch": 1536}


@pytest.mark.parametrize("execution", ["shapes", "real"])
@pytest.mark.parametrize("way", WAYS)
def test_other_threads_are_counted_in_their_modules(way, execution):
    analysis = FlopCountAnalysis(Net(WAYS[way]), torch.ones(4, 8), execution=execution)
    assert analysis.by_module() == COUNTS
    assert set(analysis.unsupported_ops()) <= {"aten::add"}


@pytest.mark.parametrize("way", WAYS)
def test_a_training_step_goes_back_through_other_threads(way):
    model, x = Net(WAYS[way]), torch.ones(4, 8)
    # The first layer's input needs no gradient, the branch's does.
    phases = {"": (1792, 256 + 3072), "first": (256, 256), "branch": (1536, 3072)}
    step = TrainingStepAnalysis(model, x, loss=torch.Tensor.sum)
    with record(model) as run:
        model(x).sum().backward()
    for found in (step.by_module_and_phase(), run.by_module_and_phase()):
        assert {name: (counts["forward"], counts["backward"]) for name, counts in found.items()} == phases


def test_threads_that_meet_the_same_new_ops_at_once_are_counted_right():
    """Each thread infers the same outcomes: the one that another replaces in the cache must not lend its identity."""
    model, found = Net(WAYS["threads"]), set()
    for _ in range(100):
        clear_cache()
        step = TrainingStepAnalysis(model, torch.ones(4, 8), loss=torch.Tensor.sum)
        found.add(tuple(step.by_module_and_phase()[""].values()))
    assert found == {(1792, 256 + 3072)}


def test_workers_are_left_without_a_mode():
    FlopCountAnalysis(Net(WAYS["an executor of the program"]), torch.ones(4, 8)).total()
    depths = [EXECUTOR.submit(torch._C._len_torch_dispatch_stack).result() for _ in range(4)]
    assert depths == [0] * 4
    assert all(EXECUTOR.submit(torch.is_grad_enabled).result() for _ in range(4))


def test_a_raising_thread_leaves_nothing():
    def way(layer, parts):
        return [EXECUTOR.submit(layer, parts[0][:, :3]).result()]

    with pytest.raises(RuntimeError):
        FlopCountAnalysis(Net(way), torch.ones(4, 8)).total()
    assert EXECUTOR.submit(torch._C._len_torch_dispatch_stack).result() == 0
    assert FlopCountAnalysis(Net(_threads), torch.ones(4, 8)).total() == 1792


@pytest.mark.parametrize("execution", ["shapes", "real"])
def test_a_thread_that_outlives_the_run_leaves_torchs_flags(execution):
    begun, ended = threading.Event(), threading.Event()
    threads = []

    def forward(self, x):
        thread = threading.Thread(target=lambda: (begun.set(), ended.wait(30)), daemon=True)
        threads.append(thread)
        thread.start()
        assert begun.wait(30)
        return x + 1

    before = _flags()
    assert FlopCountAnalysis(Applied(forward), torch.ones(2, 3), execution=execution).total() == 0
    ended.set()
    for thread in threads:
        thread.join(30)
    assert _flags() == before


def _flags():
    return {name: value for name, value in vars(python_dispatch).items() if name.startswith("_is_in_")}
