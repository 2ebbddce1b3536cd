"""The measuring: by a clock that only known work moves, modules take what they work, and watching takes nothing."""

import json
import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fvflops.capture.instrument.probe as meter
from fvflops import FlopCountAnalysis, ProfileAnalysis, Trace, profile_kernels, record
from fvflops.capture.real_mode import SignatureCache
from fvflops.counting.nested_timeline import read_times
from fvflops.measure.profile_rows import fit_ops
from fvflops.trace import TraceError
from tests.support.models.parts import Applied
from tests.support.reports.breakdowns import unpack_columns

MILLISECOND = 1_000_000


class Clock:
    """A clock in ns that stands still unless it is moved."""

    def __init__(self):
        self.now = 0

    def __call__(self):
        return self.now


CLOCK = Clock()


@torch.library.custom_op("fvflops_test::work", mutates_args=())
def work(x: torch.Tensor, milliseconds: int) -> torch.Tensor:
    CLOCK.now += milliseconds * MILLISECOND
    return x.clone()


def work_back(ctx, gradient):
    return work(gradient, ctx.milliseconds), None


def set_up(ctx, inputs, output):
    ctx.milliseconds = 2 * inputs[1]


work.register_autograd(work_back, setup_context=set_up)


class Worker(nn.Module):
    """Works for some milliseconds in an op, and for some in Python beside it."""

    def __init__(self, in_op, beside):
        super().__init__()
        self.in_op, self.beside = in_op, beside
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x):
        CLOCK.now += self.beside * MILLISECOND
        return work(x * self.weight, self.in_op)


@pytest.fixture
def clock(monkeypatch):
    """Let the meter read a clock that only work moves, and that each op's taking down moves by a second."""
    CLOCK.now = 0
    before_call = SignatureCache.before_call

    def slow_before_call(self, *args):
        CLOCK.now += 1000 * MILLISECOND
        return before_call(self, *args)

    monkeypatch.setattr(meter, "perf_counter_ns", CLOCK)
    monkeypatch.setattr(SignatureCache, "before_call", slow_before_call)
    return CLOCK


class Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(func.__name__)
        return func(*args, **(kwargs or {}))


def milliseconds(timing):
    return timing.calls, timing.total / MILLISECOND, timing.own / MILLISECOND


def test_a_module_takes_what_it_works_and_not_what_watching_takes(clock):
    model = nn.Sequential(Worker(7, 1), nn.Sequential(Worker(20, 2), Worker(30, 0)))
    with record(model, measure={"time"}) as run:
        model(torch.ones(3))
    times = read_times(run.trace())
    assert {name: milliseconds(timing) for name, timing in times.modules["forward"].items()} == {
        "": (1, 60, 0),
        "0": (1, 8, 8),
        "1": (1, 52, 0),
        "1.0": (1, 22, 22),
        "1.1": (1, 30, 30),
    }
    assert milliseconds(times.operators["forward"]["fvflops_test::work"]) == (3, 57, 57)
    assert int(run.trace().about["overhead_ns"]) >= 6000 * MILLISECOND  # six ops, of which each was taken down


def test_the_way_to_an_op_and_back_is_not_the_ops(clock, monkeypatch):
    def travel(tensor):
        clock.now += 2 * MILLISECOND

    monkeypatch.setattr(meter, "_do_nothing", travel)
    with record(measure={"time"}) as run:
        for milliseconds in (7, 1, 30):
            work(torch.ones(3), milliseconds)
        running = run.trace()
    trace = run.trace()
    took = [event.duration_ns / MILLISECOND for event in trace.events if event.kind == "op" and event.duration_ns]
    assert took == [7 - 0.7, 1 - 0.1, 30 - 2]  # of small ops no more than a tenth
    assert read_times(running).operators == read_times(trace).operators
    assert trace.about["overhead_ns_per_op"] == str(2 * MILLISECOND)


def test_what_another_mode_would_see_is_not_sampled(clock):
    with Names() as names, record(measure={"time"}) as run:
        torch.ones(3).add(1)
    assert names.seen == ["aten::ones", "aten::add"]
    assert run.trace().about["overhead_ns_per_op"] == "0"
    with Functions() as functions, record(measure={"time"}):
        torch.ones(3).add(1)
    assert functions.seen == ["ones", "add"]


def test_the_backward_pass_is_the_modules_whose_forward_made_it(clock):
    model = nn.Sequential(Worker(7, 1), nn.Sequential(Worker(20, 2)))
    with record(model, measure={"time"}) as run:
        model(torch.ones(3)).sum().backward()
    backward = read_times(run.trace()).modules["backward"]
    assert {name: timing.total / MILLISECOND for name, timing in backward.items()} == {
        "": 54,
        "0": 14,
        "1": 40,
        "1.0": 40,
    }
    assert read_times(run.trace()).of_module("1").total == (22 + 40) * MILLISECOND


def test_memory_is_what_the_run_made_and_still_holds():
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU())
    with torch.no_grad(), record(model, measure={"memory"}) as run:
        y = model(torch.ones(32, 256))
    ops = {run.trace().signatures[event.item].op: event for event in run.trace().events if event.kind == "op"}
    hidden = 32 * 1024 * 4
    relu = ops["aten::relu"]
    assert relu.memory_after - relu.memory_before == hidden == y.nbytes
    assert relu.memory_peak == relu.memory_after == 2 * hidden + 32 * 256 * 4
    assert relu.duration_ns is None
    with pytest.raises(TraceError, match="has no times"):
        read_times(run.trace())


def test_a_profile_is_the_middle_of_its_runs_and_leaves_no_trace(clock):
    waits = iter([90, 70, 5, 50, 1, 60, 3])  # one to warm up, and then one that watches ops and one that does not

    def changing(self, x):
        CLOCK.now += next(waits) * MILLISECOND
        return self.norm(x)

    model = Applied(changing, norm=nn.BatchNorm1d(4)).train()
    profile = ProfileAnalysis(model, torch.randn(8, 4), warmup=1, repeat=3, table="exact")
    assert milliseconds(profile.times().modules["forward"][""]) == (1, 3, 3)
    assert profile.trace().about["runs"] == "3" and profile.measured().about["clocked"] == "3 runs"
    assert int(model.norm.num_batches_tracked) == 0
    assert profile.total() == FlopCountAnalysis(nn.BatchNorm1d(4), torch.randn(8, 4), table="exact").total()
    assert Trace.from_json(profile.trace().to_json()) == profile.trace()


def test_runs_that_differ_are_told():
    lengths = iter([1, 1, 2, 2, 1, 1, 1, 1])  # each run twice: ops are watched, and then modules only

    def forward(self, x):
        for _ in range(next(lengths)):
            x = x + 1
        return x

    profile = ProfileAnalysis(Applied(forward), torch.ones(2), warmup=0, repeat=4)
    assert profile.trace().about["runs"] == "3"
    assert profile.trace().about["differed"] == "1 of 4 runs did other work, and are ignored"


def test_bad_input():
    model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="repeat must be an integer >= 1, not 0"):
        ProfileAnalysis(model, torch.ones(1, 2), repeat=0)
    with pytest.raises(ValueError, match="got 'time'"):
        record(model, measure="time").__enter__()
    with pytest.raises(ValueError, match="requires execution='real'"):
        record(model, measure={"time"}, execution="shapes")
    with pytest.raises(ValueError, match="got \\{'watts'\\}"):
        ProfileAnalysis(model, torch.ones(1, 2), measure={"watts"}).total()


def test_a_measured_recording_inside_another_adds_nothing_of_its_own_to_it():
    model = nn.ReLU()
    with record(model) as outer, record(model, measure={"time"}):
        model(torch.ones(3))
    trace = outer.trace()
    ops = [trace.signatures[event.item].op for event in trace.events if event.kind == "op"]
    assert ops == ["aten::ones", "aten::relu"]


class Cache:
    def __init__(self):
        self.keys, self.seen = torch.zeros(4), 0


class Writing(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("state", torch.zeros(2))
        self.apart, self.by_name = torch.zeros(2), {"a": torch.zeros(2)}

    def forward(self, x, cache):
        for tensor in (self.state, self.apart, self.by_name["a"], cache.keys):
            tensor.add_(1)
        cache.seen += 1
        return x.t_() + 1


def run_profile(model, inputs, **options):
    ProfileAnalysis(model, inputs, repeat=1, **options).trace()


def run_kernel_profile(model, inputs, **options):
    profile_kernels(model, inputs, repeat=1, execution="real", **options)


@pytest.mark.parametrize("run", [run_profile, run_kernel_profile])
def test_what_a_model_writes_to_is_as_it_was(run):
    model, cache, x = Writing(), Cache(), torch.arange(6.0).reshape(2, 3)
    run(model, x, kwargs={"cache": cache})
    assert [tensor.sum() for tensor in (model.state, model.apart, model.by_name["a"], cache.keys)] == [0, 0, 0, 0]
    assert (cache.seen, x.tolist()) == (0, [[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize("run", [run_profile, run_kernel_profile])
def test_inputs_of_any_kind_can_be_profiled(run):
    missing = torch.full((1, 3), torch.nan)
    with torch.inference_mode():
        inference = missing.clone()
        norm = nn.BatchNorm1d(3)
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    for x in (missing, missing.expand(4, 3), inference, torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), nested):
        run(nn.ReLU(), x)
    assert missing._version == 0  # nothing was put back into what had not changed
    with torch.inference_mode():
        run(norm, torch.arange(6.0).reshape(2, 3))
    assert norm.running_mean.tolist() == [0, 0, 0]


def force(self, x):
    """The gradient of an energy, as models of atoms return it."""
    x = x.detach().requires_grad_()
    return torch.autograd.grad(self.energy(x).sum(), x)[0]


def test_a_model_that_uses_autograd_in_its_forward_pass_is_clocked():
    profile = ProfileAnalysis(Applied(force, energy=nn.Linear(3, 1)), torch.ones(2, 3), repeat=1)
    assert profile.measured().about["clocked"] == "1 run"


def test_recordings_around_a_profile_see_nothing_of_its_runs():
    model, x = nn.ReLU(), torch.ones(3)
    with record(model) as outer:
        ProfileAnalysis(model, x, repeat=1).trace()
    assert [event.kind for event in outer.trace().events if event.kind != "free"] == []


def test_compiled_parts_of_a_model_run_eagerly_under_the_clock_too():
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph

    model = nn.Sequential(torch.compile(nn.ReLU(), backend=backend))
    ProfileAnalysis(model, torch.ones(3), repeat=1).trace()
    assert compiled == []


@pytest.mark.parametrize("run", [run_profile, run_kernel_profile])
def test_an_input_that_is_used_up_by_the_first_run_is_refused(run):
    with pytest.raises(ValueError, match="'parts' is a generator, which the first of several runs"):
        run(lambda parts: sum(parts), None, kwargs={"parts": (torch.ones(2) for _ in range(3))})


def test_a_parameter_that_the_forward_pass_writes_to_is_as_it_was():
    def forward(self, x):
        self.codes.mul_(0.5).add_(x)  # a moving average
        return x - self.codes

    book = Applied(forward, codes=nn.Parameter(torch.ones(3), requires_grad=False))
    ProfileAnalysis(book, torch.zeros(3), repeat=2).trace()
    assert book.codes.tolist() == [1, 1, 1]


def test_what_there_was_before_is_no_memory_that_a_module_made():
    model, x = nn.Sequential(nn.ReLU()), torch.ones(1000)
    with record(model, measure={"memory"}) as run:
        y = model(x)
        del x
        z = model(y)
    ends = [event for event in run.trace().events if event.kind == "exit"]
    assert [(end.memory_before, end.memory_after) for end in ends] == [(0, 4000)] * 2 + [(4000, 8000)] * 2
    assert z.numel() == 1000


@pytest.mark.parametrize("loss", [None, lambda y: y.sum()])
def test_the_page_shows_the_times_of_the_text(loss):
    body = nn.Sequential(nn.ReLU(), nn.Dropout(), nn.Flatten())
    model = nn.Sequential(nn.Conv2d(3, 8, 3), body, nn.Linear(8 * 36, 5))
    profile = ProfileAnalysis(model, torch.randn(2, 3, 8, 8), loss=loss, table="exact", repeat=3, warn=False)
    page = read_page(profile.to_html())
    names = [page["strings"][index] for index in page["modules"]["name"]]
    (times,) = [measure for measure in page["measures"] if measure["key"] == "time"]
    cells = times.get("rows", range(len(times["values"])))
    by_module = Counter()
    for cell, nanoseconds in zip(cells, times["values"], strict=True):
        module = page["rows"]["module"][cell]
        while module >= 0:
            by_module[module] += nanoseconds
            module = page["modules"]["parent"][module]
    text = profile.measured().module_rows()
    full_names = ["", "0", "1", "1.0", "1.1", "1.2", "2"]
    assert len(names) == len(full_names)
    assert dict(by_module) == {index: text[name].total_ns for index, name in enumerate(full_names)}
    assert profile.report(by="operator").main_table().total[2] == text[""].total_ns


def read_page(page):
    (data,) = re.findall(r'<script[^>]*type="application/json"[^>]*>(.*?)</script>', page, re.DOTALL)
    return unpack_columns(json.loads(data))


def test_ops_take_no_longer_than_their_module(clock):
    """In runs without instrumentation of ops a module may be faster than its ops were: they are scaled."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    trace = ProfileAnalysis(model, torch.ones(2, 4), repeat=1, measure={"time"}, warn=False).trace()
    events = [
        event._replace(duration_ns={"op": 100, "exit": 60}.get(event.kind, event.duration_ns)) for event in trace.events
    ]
    fitted = fit_ops(replace(trace, events=tuple(events)))
    assert [event.duration_ns for event in fitted.events if event.kind == "op"] == [60, 60]
    longer = [event._replace(duration_ns=150) if event.kind == "exit" else event for event in events]
    assert fit_ops(replace(trace, events=tuple(longer))).events == tuple(longer)


def test_autocast_runs_the_ops_of_a_loop_in_autocast():
    model, inputs = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), torch.randn(3, 8)
    profile = ProfileAnalysis(
        model, inputs, loss=lambda y: y.float().square().mean(), autocast=torch.bfloat16, repeat=2
    )
    with record(model) as run:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(inputs).float().square().mean()
        loss.backward()
    ours, loops = (
        [(call.name, call.phase) for call in analysis.op_calls() if not call.name.startswith(("add_", "detach"))]
        for analysis in (profile, run)  # gradients may be there before
    )
    assert ours == loops
    assert {entry.dtype for entry in profile.counts().entries if entry.macs} == {"bfloat16"}
    assert ", in autocast to bf16: " in " ".join(str(profile).split())
    assert not torch.is_autocast_enabled("cpu")
