"""The recording of any program: in another one, in threads, paused, and whatever goes wrong inside."""

import copy
import gc
import pickle
import threading
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fvflops import FlopCountAnalysis, Trace, TrainingStepAnalysis, flop_count_str, flop_count_table, record, schedule
from fvflops.capture.recorder.tensor_specs import signature_count
from fvflops.capture.run import ExecutionError, record_call
from tests.support.installed_patches import installed
from tests.support.models.parts import Applied, Parts
from tests.support.recording_checks import BEFORE, EXECUTIONS, X, check_sums, macs_by_owner, macs_by_phase, make_net
from tests.support.recording_checks import nothing_stays_installed as nothing_stays_installed


def accesses(trace):
    """Return bytes, origin and name of the storages that ops use, and of those from outside that are freed."""
    rows = [(storage.nbytes, storage.origin, storage.name) for storage in trace.storages]
    return [
        ("free", rows[event.item]) if event.kind == "free" else [rows[index] for index in (*event.reads, *event.writes)]
        for event in trace.events
        if event.kind == "op" or (event.kind == "free" and rows[event.item][1] == "outside")
    ]


@pytest.mark.parametrize("reuse", ["module", "view", "backward", "weight", "another recording"])
def test_a_tensor_of_an_earlier_step_is_one_from_outside(reuse):
    def run_steps(execution):
        model, values = nn.Linear(4, 4), torch.ones(2, 4)
        with record(model, execution=execution) as run:
            result, weight = model(values), model.weight.t()
            view = result.view(4, 2).t()
            if reuse == "another recording":
                run.__exit__(None, None, None)
                run = record(model, execution=execution).__enter__()
            run.step()
            if reuse == "backward":
                result.sum().backward()
            else:
                model(view + 1 if reuse == "view" else result @ weight if reuse == "weight" else result)
            del result, view, weight
            run.step()
        return [accesses(trace) for trace in run.steps]

    real, shapes = run_steps("real"), run_steps("shapes")
    assert len(real[-1]) > 2 and shapes == real


def test_queries_inside_tell_what_there_is_so_far():
    model = make_net()
    with record(model) as run:
        model(X)
        first = run.trace()
        events = len(first.events)
        assert (run.total(), run.by_module()["2"], run.uncalled_modules()) == (72, 24, set())
        loss = model(X).sum()
        with run.paused():
            assert run.by_module_and_phase()[""] == {"forward": 144}
            model(X)
            assert run.total() == 144
        loss.backward()
        assert run.by_phase() == {"forward": Counter(addmm=144), "backward": Counter(mm=96)}
        assert len(first.events) == events  # a Trace does not change
        assert not first.complete
        assert Trace.from_json(first.to_json()) == first
    assert run.total() == 240
    assert run.trace().complete


@pytest.mark.parametrize("outer_execution", EXECUTIONS)
@pytest.mark.parametrize("inner_execution", EXECUTIONS)
def test_a_recording_in_a_recording(outer_execution, inner_execution):
    outer_model, inner_model = make_net(), make_net()
    with record(outer_model, execution=outer_execution) as outer:
        loss = outer_model(X).sum()
        with record(inner_model, execution=inner_execution) as inner:
            inner_model(X).sum().backward()
        loss.backward()
    own = {"forward": 72, "backward": 96}
    assert macs_by_phase(inner) == own
    assert macs_by_owner(inner).keys() == {"0", "2"}
    # What is done by shapes is not done: the outer one, which may be real, sees nothing of it.
    both = 2 if inner_execution == "real" else 1
    assert macs_by_phase(outer) == {phase: both * macs for phase, macs in own.items()}
    assert outer.total("0") == inner.total("0") == 96
    assert not outer.trace().modules.pseudo_modules()


def test_a_recording_inside_the_forward_pass_of_another():
    class Recording(Parts):
        def forward(self, x):
            with record(self.inner) as self.run:
                return self.inner(x)

    model = nn.Sequential(Recording(inner=make_net()))
    with record(model) as run:
        model(X).sum().backward()
    assert macs_by_phase(run) == {"forward": 72, "backward": 96}
    assert macs_by_phase(model[0].run) == {"forward": 72}
    # A graph that was made inside an inner recording is known to the outer one; the inner one's end cuts nothing.
    assert macs_by_owner(run).keys() == {"0.inner.0", "0.inner.2"}


def test_analyses_inside_a_recording_are_not_part_of_it():
    model = make_net()
    with record(model) as run:
        model(X).sum().backward()
        assert FlopCountAnalysis(model, X).total() == 72
        assert TrainingStepAnalysis(model, X, loss=torch.sum, optimizer=torch.optim.SGD).total() == 168
        with run.paused():
            FlopCountAnalysis(model, X).total()
            model(X)
        model(X)
    assert macs_by_phase(run) == {"forward": 144, "backward": 96}


def test_pauses_nest_and_last():
    model = make_net()
    with record(model) as run:
        with run.paused():
            model(X)
            with run.paused():
                model(X)
            model(X)
        model(X)
        for change in (run.pause, run.resume):
            with ThreadPoolExecutor(1) as pool:
                pool.submit(change).result()
            model(X)
    assert run.macs() == 2 * 72
    with record(model, schedule=schedule(active=2)) as run:
        run.pause()
        run.step()
        model(X)
        run.resume()
        model(X)
    assert run.macs() == 72


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_pauses_in_the_middle_of_forward_and_of_backward(execution):
    def pausing(self, x, run):
        x = self.first(x)
        with run.paused():
            x = self.first(self.second(x))
        return self.second(x)

    model = Applied(pausing, first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    with record(model, execution=execution) as run:
        y = model(X, run)
        y.sum().backward()
    # The backward pass of what was not counted is counted, and has its owner: 4 layers, 7 products.
    assert macs_by_owner(run) == {
        "first": {"forward": 48, "backward": 48 + 96},
        "second": {"forward": 48, "backward": 96 + 96},
    }
    model = make_net()
    with record(model, execution=execution) as run:
        h = model[0](X)
        h.register_hook(lambda gradient: run.pause())
        model[2](model[1](h)).sum().backward()
        run.resume()
        model(X)
    assert macs_by_owner(run) == {"0": {"forward": 96}, "2": {"forward": 48, "backward": 48}}


@pytest.mark.parametrize("same", [False, True])
def test_two_threads_record_at_once_and_end_in_the_other_order(same):
    models = [make_net()] * 2 if same else [make_net(), make_net()]
    barrier = threading.Barrier(2, timeout=30)

    def work(number):
        if number:
            barrier.wait()
        with record(models[number]) as run:
            if not number:
                barrier.wait()  # the second begins when the first has, and ends first
            for _ in range(3):
                y = models[number](X)
                barrier.wait()
                torch.autograd.grad(y.sum(), list(models[number].parameters()))
                barrier.wait()
            if not number:
                barrier.wait()
        if number:
            barrier.wait()
        return run

    with ThreadPoolExecutor(2) as pool:
        runs = list(pool.map(work, range(2)))
    for run in runs:
        assert macs_by_owner(run) == {"0": {"forward": 144, "backward": 144}, "2": {"forward": 72, "backward": 144}}
        assert not run.trace().modules.pseudo_modules()


def test_a_recording_ends_where_it_began():
    model = make_net()
    run = record(model)
    run.__enter__()
    model(X)
    with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="stopped in the thread that started it"):
        pool.submit(run.__exit__, None, None, None).result()
    model(X)
    run.__exit__(None, None, None)
    assert run.total() == 144


def test_compiled_models_run_eagerly_and_stay_compiled():
    compiled = []

    def backend(graph, example):
        compiled.append(graph)
        return graph.forward

    model = make_net()
    fast = torch.compile(model, backend=backend, fullgraph=True)
    with record(model) as run:
        fast(X).sum().backward()
        inside = torch.compile(model, backend=backend, fullgraph=True)
        inside(X)
    assert not compiled
    assert macs_by_phase(run) == {"forward": 144, "backward": 96}
    with record(fast) as run:
        fast(X).sum().backward()
    assert macs_by_owner(run).keys() == {"0", "2"}
    inside(X)
    assert len(compiled) == 1
    other = Applied(lambda self, x: self.layer(x).pow(2), layer=nn.Linear(4, 4))
    with record(other) as run:
        other.compile(backend=backend, fullgraph=True)
        other(X)
    assert (run.macs(), len(compiled)) == (48, 1)
    other(X)
    assert len(compiled) == 2
    torch.compiler.reset()


def test_data_parallel_models(tmp_path):
    model = make_net()
    with record(nn.DataParallel(model)) as run:
        nn.DataParallel(model)(X).sum().backward()
    assert macs_by_owner(run) == {"0": {"forward": 48, "backward": 48}, "2": {"forward": 24, "backward": 48}}
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        parallel = nn.parallel.DistributedDataParallel(model)
        with record(parallel) as run:
            for _ in range(2):
                parallel(X).sum().backward()
        assert macs_by_owner(run) == {"0": {"forward": 96, "backward": 96}, "2": {"forward": 48, "backward": 96}}
        phases = {entry.phase for entry in run.counts().entries if entry.op.startswith("c10d::allreduce")}
        assert phases == {"backward"}
    finally:
        torch.distributed.destroy_process_group()


def test_mixed_precision_with_a_scaler():
    model = make_net()
    optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu")
    with record(model) as run:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(X).sum()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert run.by_dtype() == {"bfloat16": 168}
    assert macs_by_phase(run) == {"forward": 72, "backward": 96}
    with record(model, table="exact") as run:
        scaler.scale(model(X).sum()).backward()
        scaler.step(optimizer)
    assert run.by_phase()["optimizer"].total() == 2 * 30
    with record(model, execution="shapes") as shapes, torch.autocast("cpu", torch.bfloat16):
        model(X).sum().backward()
    assert shapes.by_dtype() == {"bfloat16": 168}


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_copy_of_the_model_is_no_part_of_it(execution):
    model = make_net()
    with record(model, execution=execution) as run:
        twin = copy.deepcopy(model)
        twin(X).sum().backward()
        model(X).sum().backward()
    assert macs_by_owner(run) == {
        "": {"forward": 72, "backward": 96},
        "0": {"forward": 48, "backward": 48},
        "2": {"forward": 24, "backward": 48},
    }


class Stop(BaseException):
    """Neither an Exception nor an interrupt."""


def fail_at_second_call(model, kind):
    calls = []

    def call(x):
        calls.append(1)
        h = model(x)
        if len(calls) == 2:
            raise kind("stop")
        return h @ torch.ones(2, 2) @ torch.ones(2, 1)

    return call


def stop(kind):
    def hook(*args):
        raise kind("stop")

    return hook


@pytest.mark.parametrize("execution", EXECUTIONS)
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, Stop])
@pytest.mark.parametrize("place", ["forward", "backward", "step", "rerun"])
def test_an_exception_leaves_a_trace_that_can_be_read(place, kind, execution):
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    run = record(model, execution=execution)
    twice = fail_at_second_call(model, kind)

    def work():
        if place == "forward":
            model[2].register_forward_pre_hook(stop(kind))
        if place == "rerun":
            checkpoint(twice, X.clone().requires_grad_(), use_reentrant=True).sum().backward()
        y = model(X)
        if place == "backward":
            y.register_hook(stop(kind))
        y.sum().backward()
        optimizer.register_step_pre_hook(stop(kind))
        optimizer.step()

    with pytest.raises(kind, match="stop"), run:
        work()
    assert not run.trace().complete
    macs = {
        "forward": {"forward": 48},
        "backward": {"forward": 72},
        "step": {"forward": 72, "backward": 96},
        "rerun": {"forward": 72 + 12 + 6, "recompute": 72},
    }
    assert macs_by_phase(run) == macs[place]
    assert Trace.from_json(run.trace().to_json()) == run.trace()
    flop_count_table(run)
    flop_count_str(run)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    if execution == "shapes":
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("execution", EXECUTIONS)
def test_a_recording_goes_on_after_an_exception_that_the_program_catches(execution):
    model = make_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    square = torch.eye(3)
    with record(model, execution=execution, table="exact") as run:
        hook = model[2].register_forward_pre_hook(stop(ValueError))
        with pytest.raises(ValueError, match="stop"):
            model(X)
        hook.remove()
        square @ square
        y = model(X)
        y.register_hook(stop(ValueError))
        with pytest.raises(ValueError, match="stop"):
            y.sum().backward()
        square @ square
        hook = optimizer.register_step_pre_hook(stop(ValueError))
        with pytest.raises(ValueError, match="stop"):
            optimizer.step()
        hook.remove()
        square @ square
        model(X).sum().backward()
        optimizer.step()
    assert macs_by_owner(run) == {
        "": {"forward": 3 * 27},
        "0": {"forward": 3 * 48, "backward": 48},
        "2": {"forward": 2 * 24, "backward": 48},
    }
    assert run.by_phase()["optimizer"].total() == 2 * 30
    assert run.trace().complete


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recording_goes_on_after_a_rerun_that_fails(reentrant):
    model = make_net()
    with record(model) as run:
        y = checkpoint(fail_at_second_call(model, ValueError), X.clone().requires_grad_(), use_reentrant=reentrant)
        with pytest.raises(ValueError, match="stop"):
            y.sum().backward()
        model(X).sum().backward()
    assert macs_by_owner(run) == {
        # The gradient of the last product needs only kept tensors: a constant is not an argument of the checkpoint.
        "": {"forward": 12 + 6},
        "0": {"forward": 96, "recompute": 48, "backward": 48},
        "2": {"forward": 48, "recompute": 24, "backward": 48},
    }


class Token:
    """Something that can be watched, where a node of autograd cannot."""


class Holding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, token):
        ctx.token = token
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone(), None


@pytest.mark.parametrize("caught", [False, True])
def test_what_needs_a_number_ends_a_recording_by_shapes(caught):
    model = make_net()
    optimizer = torch.optim.Adam(model.parameters())
    run = record(model, execution="shapes")
    with pytest.raises(ExecutionError if caught else RuntimeError, match=r"_local_scalar_dense.*needs values"), run:
        loss = model(X).sum()
        loss.backward()
        optimizer.step()
        with suppress(RuntimeError) if caught else nullcontext():
            loss.item()
    assert not run.trace().complete
    assert macs_by_phase(run) == {"forward": 72, "backward": 96}
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_recording_without_a_model_and_one_under_inference_mode():
    model = make_net()
    for execution in EXECUTIONS:
        with record(execution=execution) as run:
            model(X).sum().backward()
        assert (macs_by_phase(run), dict(run.by_module())) == ({"forward": 72, "backward": 96}, {"": 168})
        with record(model, execution=execution) as run:
            with torch.inference_mode():
                model(X)
            model(X).sum().backward()
        assert macs_by_owner(run) == {"0": {"forward": 96, "backward": 48}, "2": {"forward": 48, "backward": 48}}


def test_what_a_recording_installs_is_seen():
    before = installed()
    with record(make_net()):
        inside = installed()
    assert sum(inside[name] != before[name] for name in before) >= 8


def test_a_recording_keeps_nothing_alive():
    model, token = make_net(), Token()
    with record(model) as run:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle = optimizer.register_step_pre_hook(stop(ValueError))
        Holding.apply(model(X), token).sum().backward()
        with pytest.raises(ValueError, match="stop"):
            optimizer.step()
    watched = [weakref.ref(token), weakref.ref(optimizer)]
    del token, optimizer, handle
    gc.collect()  # an optimizer is in a cycle of its own
    assert [ref() for ref in watched] == [None, None]
    assert run.total() == 168


@pytest.mark.parametrize(
    "table", ["default", "fvcore", "exact", "deepspeed", "thop", "ptflops", "torchinfo", "calflops"]
)
def test_a_recorded_training_step_is_saved_merged_and_told_in_every_convention(table):
    model = nn.Sequential(
        nn.LSTM(4, 4),
        Applied(lambda self, output: output[0][-1]),
        nn.BatchNorm1d(4),
        nn.ReLU(),
        nn.Linear(4, 4),
        nn.Linear(4, 2),
    )
    optimizer = torch.optim.SGD([{"params": model[0].parameters(), "group_name": "lstm"}, {"params": model[5].weight}])
    x = torch.randn(3, 2, 4, requires_grad=True)
    past = model[4](torch.ones(1, 4)).sum()
    traces = []
    for _ in range(2):
        with record(model, table=table) as run:
            checkpoint(model, x, use_reentrant=False).sum().backward()
            past.backward(retain_graph=True)
            optimizer.step()
        traces.append(run.trace())
    check_sums(run)
    again = FlopCountAnalysis.from_trace(Trace.from_json(traces[0].to_json()), table=table)
    twice = FlopCountAnalysis.from_trace(Trace.merge(traces), table=table)
    first = FlopCountAnalysis.from_trace(traces[0], table=table)
    assert again.by_module_and_phase() == first.by_module_and_phase()
    assert again.by_parameter_group() == first.by_parameter_group()
    assert twice.total() == first.total() + run.total()
    assert twice.by_parameter_group().keys() == run.by_parameter_group().keys()
    if table == "deepspeed":  # its row for the module stands for the forward; what goes back is counted op by op
        rows = [entry for entry in run.counts().entries if entry.op == "torch.nn.LSTM"]
        assert {entry.phase: entry.calls for entry in rows} == {"forward": 1, "recompute": 1}
        assert run.by_module_and_phase()["4"]["backward"] == 2 * 2 * (2 * 4 * 4)
    for told in (run, again, twice):
        assert (BEFORE in flop_count_table(told)) == (told.total(BEFORE) > 0)  # rows without a count are left out
        assert BEFORE in flop_count_str(told)


@pytest.mark.parametrize("execution", ["auto", "shapes", "real"])
def test_what_is_wrong_before_the_first_run_is_raised_as_it_is(execution, monkeypatch):
    def refuse(*args, **kwargs):
        raise MemoryError("no recorder")

    monkeypatch.setattr("fvflops.capture.session.Recorder", refuse)
    with pytest.raises(MemoryError, match="no recorder"):
        record_call(nn.Linear(3, 2), (torch.ones(4, 3),), execution=execution)


@pytest.mark.parametrize("part", ["model", "submodule", "compile()"])
def test_a_recording_says_that_a_compiled_model_ran_eagerly(part, caplog):
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    if part == "model":
        model = torch.compile(model, backend="eager")
    elif part == "submodule":
        model[0] = torch.compile(model[0], backend="eager")
    else:
        model.compile(backend="eager")
    with record(model) as run:
        model(torch.ones(4, 3))
    assert run.macs() == 24
    assert [line.getMessage() for line in caplog.records if "runs eagerly while it is recorded" in line.getMessage()]
    caplog.clear()
    with record(model, warn=False):
        model(torch.ones(4, 3))
    with record(nn.Linear(3, 2)):
        pass
    assert not caplog.records


def test_the_process_keeps_few_signatures_of_steps_with_ever_other_learning_rates(monkeypatch):
    monkeypatch.setattr("fvflops.capture.shapes.shape_cache._MAX_SIGNATURES", 100)
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), foreach=False)
    costs = set()
    for step in range(60):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        with record(model, table="exact") as run:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        costs.add(run.total())
        assert signature_count() < 100 + 20 + 4
    assert len(costs) == 1


@pytest.mark.parametrize("execution", ["real", "shapes"])
def test_a_recording_can_be_pickled_with_its_results(execution):
    model, x = nn.Linear(4, 2), torch.ones(3, 4)
    with record(model, execution=execution, schedule=lambda step: "record") as run:
        for _ in range(2):
            model(x).sum().backward()
            run.step()
        model(x)
        so_far = pickle.loads(pickle.dumps(run))
        assert so_far.macs() == run.macs() > 0
    loaded = pickle.loads(pickle.dumps(run))
    assert (loaded.macs(), loaded.per_step().mean, loaded.steps) == (run.macs(), run.per_step().mean, run.steps)
    assert loaded.trace() == run.trace() and so_far.macs() == run.macs()
    with pytest.raises(RuntimeError, match="entered only once"), loaded:
        pass
    with pytest.raises(RuntimeError, match="inside the with block"):
        so_far.step()
    assert pickle.loads(pickle.dumps(record(model))).module_tree().root.class_name == "Linear"
