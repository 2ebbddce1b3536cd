"""Equal iterations of a loop: two run, and all are recorded."""

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, TrainingStepAnalysis, record
from fvflops.capture.recorder import recorder
from fvflops.sources.diffusers.diffusers_pipeline import repeat


class Loop(nn.Module):
    """Runs `body` some times, by `repeat` or by a loop; the first call caches a tensor."""

    def __init__(self, times, by_repeat):
        super().__init__()
        self.times, self.by_repeat, self.runs = times, by_repeat, []
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 3)
        self.scale = None

    def forward(self, x):
        def iterate():
            self.runs.append(1)
            if self.scale is None:
                self.scale = torch.randn(8, 8) @ torch.randn(8, 8)
            self.body(x @ self.scale)

        if self.by_repeat:
            repeat(self.times, iterate)
        else:
            for _ in range(self.times):
                iterate()
        return self.head(x)


def analyse(times, **options):
    models = [Loop(times, by_repeat) for by_repeat in (True, False)]
    return models, [FlopCountAnalysis(model, torch.ones(2, 8), warn=False, **options) for model in models]


@pytest.mark.parametrize("times", [1, 2, 3, 7])
def test_the_trace_is_that_of_the_loop(times):
    _, (repeated, looped) = analyse(times)
    assert repeated.by_module() == looped.by_module()
    ours, theirs = repeated.trace(), looped.trace()
    assert (ours.calls, ours.region_calls) == (theirs.calls, theirs.region_calls)
    assert list(ours.events) == list(theirs.events)
    assert list(ours.storages) == list(theirs.storages)
    assert repeated.module_call_table() == looped.module_call_table()


def test_two_iterations_run_in_shape_execution_and_all_in_real_execution():
    runs = []
    for execution in ("shapes", "real"):
        (model, _), (flops, _) = analyse(50, execution=execution)
        model.register_forward_hook(lambda module, *_: runs.append(len(module.runs)))
        flops.total()
    assert runs == [2, 50]


def test_many_events_are_reduced_to_counts(monkeypatch):
    monkeypatch.setattr(recorder, "_MAX_REPEATED", 100)
    _, (repeated, looped) = analyse(1000)
    assert repeated.by_module() == looped.by_module()
    assert repeated.trace().events is None
    assert repeated.trace().region_calls == looped.trace().region_calls


def test_under_autograd_all_iterations_run():
    totals = []
    for by_repeat in (True, False):
        model = Loop(5, by_repeat)
        step = TrainingStepAnalysis(model, torch.ones(2, 8), loss=lambda result: result.sum())
        totals.append(step.by_module_and_phase())
    assert totals[0] == totals[1]


def test_lines_are_those_of_the_loop():
    _, (repeated, looped) = analyse(5, lines=True)
    assert repeated.line_counts() == looped.line_counts()


def test_without_a_recording_it_is_a_loop():
    calls = []
    repeat(3, lambda: calls.append(1))
    with record(nn.Linear(2, 2)):
        repeat(4, lambda: calls.append(1))
    assert len(calls) == 7
