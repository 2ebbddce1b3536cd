"""Profiles of kernels: torch.profiler's numbers are unchanged, and every counted FLOP is on an event of its module."""

import gc
import gzip
import json
import logging
import random
import time
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from fvflops import FlopCountAnalysis, KernelProfile, Trace, profile_kernels, record, schedule
from fvflops.capture.instrument.torch_profiler import read_events
from fvflops.capture.run import record_call
from fvflops.counting import TableCostModel
from fvflops.counting.cost_models import HandleCostModel
from fvflops.counting.nested_timeline import build_timeline, read_times
from fvflops.formulas import load_table
from fvflops.measure.kernels.alignment import align
from fvflops.measure.kernels.kernel_sums import KernelAverages, overlay_times, sum_kernels
from fvflops.measure.kernels.matching import match_kernels
from fvflops.measure.kernels.recorded_calls import RecordedCall, Work
from fvflops.reports.files.timeline_files import write_events as render_chrome_trace
from fvflops.trace import TraceError
from fvflops.trace.kernel_events import KernelEvent, KernelRun
from tests.support.installed_patches import installed
from tests.support.models.parts import Applied, Parts
from tests.support.old_torch import VERSION
from tests.support.recording_checks import nothing_stays_installed as nothing_stays_installed

COST_MODEL = TableCostModel(load_table("default"), "flops")


class Block(nn.Module):
    """Convolutions with a shortcut, and a product made by a function."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, groups=2)

    def forward(self, x):
        y = self.conv2(torch.relu(self.norm(self.conv1(x))))
        return x + y * (x.flatten(2) @ x.flatten(2).transpose(1, 2)).mean()


def make_convnet():
    return nn.Sequential(nn.Conv2d(3, 4, 3), Block(), Block(), nn.Flatten(), nn.Linear(4 * 36, 5))


class Attention(Parts):
    def forward(self, x):
        q, k, v = self.qkv(x).reshape(2, 6, 3, 4, 4).permute(2, 0, 3, 1, 4)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 6, 16))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm = Attention(qkv=nn.Linear(16, 48), out=nn.Linear(16, 16)), nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


MODELS = {"convnet": (make_convnet, (2, 3, 8, 8)), "transformer": (lambda: nn.Sequential(Layer(), Layer()), (2, 6, 16))}
LOSSES = {"forward": None, "training": lambda y: y.sum()}


def hardware_counts(counted):
    """Return counts with 2 FLOPs per multiply-add, whatever the table's convention."""
    counts = counted.counts()
    return replace(
        counts, entries=tuple(entry._replace(value=2 * entry.macs + entry.flops) for entry in counts.entries)
    )


def sums_of_steps(match):
    sums = {}
    for step, flops in zip(match.steps, match.self_flops, strict=True):
        if step >= 0 or flops:  # a device has events outside of all steps, such as synchronization
            sums[step] = sums.get(step, 0) + (flops or 0)
    return sums


@pytest.mark.parametrize("table", ["default", "exact"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", MODELS)
def test_every_counted_flop_is_on_an_event(name, loss, table):
    make, shape = MODELS[name]
    model, x = make().train(), torch.randn(shape)
    run = profile_kernels(model, x, loss=LOSSES[loss], repeat=2, table=table)
    trace = record_call(model, (x,), loss=LOSSES[loss], stops_at=TableCostModel(load_table(table), "flops").stops_at)
    counted = FlopCountAnalysis.from_trace(trace, table=table)
    match = run.match()
    assert (run.total(), run.macs()) == (hardware_counts(counted).total(), counted.macs()) and run.macs() > 0
    assert sums_of_steps(match) == {0: run.total(), 1: run.total()}
    assert run.ledger().attributed_to_modules == ()
    # The FLOPs of a module call are on its event, including functions called in it.
    timeline = build_timeline(trace, run._cost_model)
    calls = {
        timeline.callees[span.callee].name: span.flops
        for span in timeline.spans
        if timeline.callees[span.callee].kind == "module"
    }
    for index, event in enumerate(match.run.events):
        if event.kind == "module":
            work = match.work[index]
            assert work.flops + (load_table(table).multiply_add - 2) * work.macs == calls[event.module], event.name
    # The FLOPs of the events of a module add up to by_module().
    expected = {name: sum(row.values()) for name, row in hardware_counts(counted).by_module_and_operator().items()}
    by_module = dict.fromkeys(expected, 0)
    for module, flops, step in zip(match.modules, match.self_flops, match.steps, strict=True):
        if step == 0 and flops:
            parts = module.split(".") if module else []
            for length in range(len(parts) + 1):
                by_module[".".join(parts[:length])] += flops
    assert by_module == expected
    # In rows the FLOPs of nested events count again.
    for rows in (run.key_averages(), run.key_averages(group_by_module=True), run.key_averages(group_by_stack_n=1)):
        assert sum(row.self_flops or 0 for row in rows) == 2 * run.total() < sum(row.flops or 0 for row in rows) / 1.5
        assert sum(row.self_macs or 0 for row in rows) == 2 * run.macs()


@pytest.mark.parametrize("name", MODELS)
def test_sequence_numbers_alone_find_the_module_of_a_backward_op(name):
    make, shape = MODELS[name]
    run = profile_kernels(make().train(), torch.randn(shape), loss=LOSSES["training"], repeat=1)
    match = run.match()
    without_trace = match_kernels(match.run, None, COST_MODEL)
    events = match.run.events
    compared = 0
    for index in match.call_of_event:
        outer = index
        while outer >= 0 and events[outer].kind != "node":
            outer = events[outer].parent
        if outer >= 0 and events[outer].sequence >= 0:
            assert without_trace.modules[index] == match.modules[index], events[index]
            assert without_trace.phases[index] == match.phases[index] == "backward"
            compared += 1
    assert compared > 20
    assert without_trace.total is None and set(without_trace.flops) == {None}


MEASURED_NS = defaultdict(list)


class Sleeper(Parts):
    def forward(self, x):
        start = time.perf_counter_ns()
        time.sleep(self.milliseconds / 1000)
        result = x * self.weight
        # A profile would restore the module's own list.
        MEASURED_NS[self.milliseconds].append(time.perf_counter_ns() - start)
        return result


def test_the_time_of_a_module_equals_a_direct_measurement():
    first, second = (Sleeper(milliseconds=ms, weight=nn.Parameter(torch.ones(4))) for ms in (20, 40))
    model = nn.Sequential(first, nn.Sequential(second))
    run = profile_kernels(model, torch.ones(4), repeat=3)
    trace = run.trace()
    times = read_times(trace).modules["forward"]
    for name, milliseconds in (("0", 20), ("1.0", 40)):
        expected = sorted(MEASURED_NS[milliseconds][-3:])[1]
        assert 0 <= times[name].total - expected < 0.25 * expected  # a busy machine adds some time
    assert times["1"].total >= times["1.0"].total
    assert times[""].total >= times["0"].total + times["1"].total
    assert times[""].own < 0.25 * times[""].total
    # The time of a call in the Trace is its event's.
    match = run.match()
    ranges = [event.duration_ns for event in match.run.events if event.module == "1.0"]
    assert times["1.0"].total == sorted(ranges)[1]
    assert trace.about["measured"] == "time" and trace.about["runs"] == "3"
    assert Trace.from_json(trace.to_json()) == trace
    timeline = build_timeline(trace, COST_MODEL)
    assert json.loads("".join(render_chrome_trace(timeline)))["otherData"]["measured_by"] == "torch.profiler"


def test_rows_equal_those_of_torch_profiler():
    run = profile_kernels(
        make_convnet(), torch.randn(2, 3, 8, 8), loss=LOSSES["training"], record_shapes=True, profile_memory=True
    )
    for by_shape in (False, True):
        theirs = {}
        for row in run.profiler.key_averages(group_by_input_shape=by_shape):
            theirs[row.key, str(row.input_shapes) if row.input_shapes else ""] = row
        compared = 0
        for row in run.key_averages(group_by_input_shape=by_shape):
            if (row.key, row.input_shapes) in theirs:
                other = theirs[row.key, row.input_shapes]
                assert row.count == other.count
                for name in ("cpu_time_total", "self_cpu_time_total", "cpu_time", "device_time_total"):
                    assert getattr(row, name) == pytest.approx(getattr(other, name), rel=1e-9, abs=1e-6)
                assert row.cpu_memory_usage == other.cpu_memory_usage
                assert row.self_cpu_memory_usage == other.self_cpu_memory_usage
                compared += 1
        assert compared > 40
    rows = run.key_averages()
    assert sum(row.self_cpu_time_total for row in rows) == pytest.approx(run.profiler.events().self_cpu_time_total)


def test_flops_of_products_and_convolutions_equal_torch_profilers_estimates():
    """torch.profiler estimates a few ops, and counts a multiply-add as 2 too."""

    def forward(self, x, image, weight, signal):
        y = torch.mm(x, x) + torch.addmm(x, x, x)
        z = nn.functional.conv2d(image, weight, stride=2)
        return y, z, torch.bmm(x[None], x[None]), nn.functional.conv1d(signal, weight[0])

    inputs = torch.randn(8, 8), torch.randn(2, 3, 9, 9), torch.randn(5, 3, 3, 3), torch.randn(2, 3, 9)
    rows = profile_kernels(Applied(forward), inputs, repeat=1).key_averages()
    ours, macs = ({row.key: getattr(row, name) for row in rows} for name in ("flops", "macs"))
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as theirs, torch.no_grad():
        Applied(forward)(*inputs)
    estimates = {row.key: row.flops for row in theirs.key_averages()}
    for op in ("aten::mm", "aten::addmm", "aten::bmm", "aten::conv2d"):
        assert estimates[op] == ours[op] == 2 * macs[op] > 0, op
    assert macs["aten::conv2d"] == 2 * 5 * 4 * 4 * 3 * 9
    # Ops without an estimate count as zero.
    assert estimates["aten::conv1d"] == 0 < ours["aten::conv1d"] == 2 * macs["aten::conv1d"] == 2 * 2 * 3 * 7 * 3 * 3
    model, x = MODELS["transformer"][0]().eval(), torch.randn(2, 6, 16)
    attention = {row.key: row.flops for row in profile_kernels(model, x, repeat=1).key_averages()}
    with profile(activities=[ProfilerActivity.CPU], with_flops=True) as theirs, torch.no_grad():
        model(x)
    estimates = {row.key: row.flops for row in theirs.key_averages()}
    op = "aten::scaled_dot_product_attention"
    assert estimates[op] == 0 < attention[op] == 2 * 2 * 2 * 2 * 4 * 6 * 6 * 4


def test_a_loop_is_counted_by_the_step_before_the_active_ones():
    model = make_convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(2, 3, 8, 8)
    totals = []

    def step():
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with record(model, table="exact") as counted:
        step()
    steps = schedule(wait=1, warmup=1, active=2, repeat=2)
    ready = lambda run: totals.append(run.total())  # noqa: E731
    with KernelProfile(model, schedule=steps, table="exact", on_trace_ready=ready) as run:
        for _ in range(8):
            step()
            run.step()
    assert totals == [counted.total()] * 2
    assert run.total() == counted.total() and run.step_num == 8
    match = run.match()
    by_phase = dict.fromkeys(counted.by_phase(), 0)
    for phase, flops, number in zip(match.phases, match.self_flops, match.steps, strict=True):
        if number == 0 and flops:
            by_phase[phase] += flops
    assert by_phase == {phase: sum(labels.values()) for phase, labels in counted.by_phase().items()}
    assert by_phase["optimizer"] > 0
    assert run.flops_per_second() > 0
    again = KernelProfile(model, table="exact")
    with again:
        step()
    with pytest.raises(TraceError, match="no FLOPs were counted"):
        again.total()
    assert "no FLOPs" in again.key_averages().table()
    assert again.count(step).total() == counted.total()


def test_the_recomputation_of_a_checkpoint_is_recompute():
    inner, x = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), torch.randn(3, 4)
    model = Applied(lambda self, x: checkpoint(self.inner, x, use_reentrant=False), inner=inner)
    run = profile_kernels(model, x, loss=LOSSES["training"], repeat=1)
    counted = FlopCountAnalysis.from_trace(record_call(model, (x,), loss=LOSSES["training"]))
    match = run.match()
    phases = zip(match.run.events, match.phases, strict=True)
    assert {"inner", "inner.0", "inner.1"} <= {event.module for event, phase in phases if phase == "recompute"}
    rows = zip(match.phases, match.self_flops, strict=True)
    assert sum(flops or 0 for phase, flops in rows if phase == "recompute") == sum(
        hardware_counts(counted).by_phase()["recompute"].values()
    )
    assert sums_of_steps(match) == {0: 2 * counted.macs()}


def test_flops_of_a_fused_kernel_are_attributed_to_its_module():
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    run = profile_kernels(model, torch.randn(2, 5, 8), repeat=1)
    match = run.match()
    names = [event.name for event in match.run.events]
    assert "aten::_transformer_encoder_layer_fwd" in names
    assert dict(run.ledger().attributed_to_modules)["aten::linear"] >= 1
    (root,) = [index for index, event in enumerate(match.run.events) if event.kind == "module"]
    counted = FlopCountAnalysis(model, torch.randn(2, 5, 8))
    assert match.flops[root] == run.total() == hardware_counts(counted).total()
    assert "without an event" in run.key_averages().table()


# Inductor compiles C++.
@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_compiled_code_is_timed_compiled_and_counted_as_the_eager_model(backend):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(3, 8)
    with torch.no_grad():
        compiled(x)
    counters.clear()
    run = profile_kernels(compiled, x, repeat=2)
    total = 2 * FlopCountAnalysis(model, x).macs()
    match = run.match()
    assert run.total() == total == 2 * 3 * (8 * 16 + 16 * 4)
    assert any(event.kind == "compiled" for event in match.run.events)
    calls = [index for index, event in enumerate(match.run.events) if event.kind == "module"]
    assert [match.run.events[index].module for index in calls] == ["", ""]
    assert [match.flops[index] for index in calls] == [total, total]
    assert sums_of_steps(match) == {0: total, 1: total}
    # Only the eager backend calls aten::linear, which has the FLOPs of the aten::addmm inside it.
    inside = [row for row in run.key_averages() if row.key == "aten::addmm"]
    assert [row.flops for row in inside] == [None if backend == "eager" else 2 * total]
    assert "compiled code" in run.about()[1] and run.ledger().compiled > 0
    assert run.flops_per_second() > 0
    assert read_times(run.trace()).modules["forward"][""].total > 0
    with torch.no_grad():
        compiled(x)
    assert not counters["frames"]  # nothing was recompiled, neither in the profile nor after it
    torch._dynamo.reset()


def test_a_loop_over_compiled_code_compiles_before_the_active_steps():
    """The first step is recorded and runs eagerly; the next one compiles, and is not active yet."""
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    compiled, x = torch.compile(model, backend="aot_eager"), torch.randn(3, 8)
    with KernelProfile(compiled, schedule=schedule(wait=1, warmup=1, active=2, repeat=1)) as run:
        for _ in range(4):
            compiled(x).sum().backward()
            run.step()
    assert run.macs() == 3 * (2 * 8 * 16 + 3 * 16 * 4)  # x requires no gradient
    names = {event.name for event in run.match().run.events}
    assert "CompiledFunction" in names and not any("compile_inner" in name for name in names)
    assert sums_of_steps(run.match()) == {0: run.total(), 1: run.total()}
    torch._dynamo.reset()


def test_a_module_with_a_handle_has_its_flops():
    model, x = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 8)), torch.randn(5, 1, 4)
    run = profile_kernels(model, x, repeat=1)
    handles = {"torch.nn.LSTM": lambda call: Counter({"lstm": 1000})}
    cost_model = HandleCostModel(COST_MODEL, {}, handles)
    match = match_kernels(run.match().run, record_call(model, (x,), stops_at=cost_model.stops_at), cost_model)
    events = zip(match.run.events, match.self_flops, strict=True)
    flops = [own for event, own in events if event.kind == "module" and event.module]
    assert flops == [0, 1000] and match.total == Work(5 * 16, 2 * 5 * 16 + 1000)
    assert sums_of_steps(match) == {0: match.total.flops}


def test_modules_compiled_in_place_are_marked_and_restored():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    model[0].compile(backend="eager")
    before = model[0]._compiled_call_impl
    run = profile_kernels(model, torch.randn(3, 8), loss=LOSSES["training"], repeat=1)
    assert model[0]._compiled_call_impl is before
    match = run.match()
    flops = {event.module: match.flops[index] for index, event in enumerate(match.run.events) if event.kind == "module"}
    assert flops == {"": 6 * (128 + 64), "0": 6 * 128, "1": 6 * 64}
    torch._dynamo.reset()


def test_memory_is_the_allocators():
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 16))
    x = torch.randn(32, 256)
    gc.collect()
    trace = profile_kernels(model, x, repeat=2, profile_memory=True).trace()
    ops = [(trace.signatures[event.item].op, event) for event in trace.events if event.kind == "op"]
    hidden, result = 32 * 1024 * 4, 32 * 16 * 4
    kept = [("aten::linear", hidden), ("aten::relu", hidden), ("aten::linear", result)]
    assert [(op, event.memory_after - event.memory_before) for op, event in ops] == kept
    first, relu, last = (event for _, event in ops)
    assert relu.memory_before == first.memory_after == first.memory_before + hidden
    assert last.memory_before == first.memory_before + hidden  # the first layer's result is freed after relu
    assert relu.memory_peak == first.memory_before + 2 * hidden
    assert trace.about["measured"] == "time, memory"
    exits = [event for event in trace.events if event.kind == "exit"]
    (root,) = [event for event in exits if trace.region_signatures[event.item].region == 0]
    assert root.memory_peak - root.memory_before == 2 * hidden
    assert root.memory_after - root.memory_before == result


def test_times_need_a_recording():
    run = profile_kernels(nn.Linear(4, 4), torch.randn(8, 4), repeat=1)
    with pytest.raises(TraceError, match="record one step"):
        overlay_times(match_kernels(run.match().run, None, COST_MODEL))


def test_the_chrome_trace_is_torch_profilers_with_more_args(tmp_path):
    path, again = tmp_path / "ours" / "trace.json", tmp_path / "again.json.gz"
    model = make_convnet()
    run = profile_kernels(
        model, torch.randn(2, 3, 8, 8), loss=LOSSES["training"], repeat=2, profile_memory=True, chrome_trace=path
    )
    run.export_chrome_trace(again)
    assert gzip.decompress(again.read_bytes()) == path.read_bytes()
    ours, theirs = json.loads(path.read_text()), json.loads(Path(run._export()).read_text())
    added = {"module", "phase", "MACs", "FLOPs", "FLOP/s", "bytes", "memory before", "memory after", "memory peak"}
    assert len(ours["traceEvents"]) == len(theirs["traceEvents"])
    flops = 0
    for event, other in zip(ours["traceEvents"], theirs["traceEvents"], strict=True):
        args = event.get("args", {})
        assert {key: value for key, value in args.items() if key not in added} == other.get("args", {})
        assert {**event, "args": 0} == {**other, "args": 0}
        if event.get("cat") == "cpu_op":
            assert set(args) >= {"module", "phase", "memory peak"}
            assert args["module"] in dict(model.named_modules())
        if event["name"] == "aten::conv2d":
            flops += args["FLOPs"]
            assert args["FLOP/s"] == pytest.approx(args["FLOPs"] * 1e6 / event["dur"], rel=1e-3)
    row = next(row for row in run.key_averages() if row.key == "aten::conv2d")
    assert flops == row.flops > 0
    assert ours["fvflops"]["about"] == run.about()


def test_torchs_own_trace_handler_writes_our_trace(tmp_path):
    model, x = make_convnet(), torch.randn(2, 3, 8, 8)
    handler = torch.profiler.tensorboard_trace_handler(str(tmp_path), worker_name="worker")
    with KernelProfile(model, schedule=schedule(warmup=1, active=1, repeat=2), on_trace_ready=handler) as run:
        for _ in range(4):
            model(x)
            run.step()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    for file in files:
        events = json.loads(file.read_text())["traceEvents"]
        (step,) = [event for event in events if event["name"].startswith("ProfilerStep") and event["ph"] == "X"]
        assert step["args"]["FLOPs"] == run.total() > 0


def test_tables_are_sorted_limited_and_grouped_by_module():
    run = profile_kernels(make_convnet(), torch.randn(2, 3, 8, 8), repeat=2)
    rows = run.key_averages(group_by_module=True)
    text = rows.table(sort_by="flops", row_limit=4)
    lines = text.splitlines()
    assert lines[0].startswith("torch.profiler's times of 2 steps, ")
    assert len(lines) == 1 + 2 + 4 + 2
    assert "Module" in lines[1] and "FLOP/s" in lines[1]
    largest = sorted(rows, key=lambda row: -1 if row.flops is None else row.flops, reverse=True)[:4]
    assert [line.split()[0] for line in lines[3:7]] == [row.key.split()[0] for row in largest]
    convolutions = {row.module: row.flops for row in rows if row.key == "aten::conv2d"}
    by_module = FlopCountAnalysis(make_convnet(), torch.randn(2, 3, 8, 8)).by_module()
    assert convolutions == {name: 2 * 2 * by_module[name] for name in convolutions} and len(convolutions) == 5
    assert rows.table(sort_by="self_cuda_time_total", header="mine").startswith("mine\n")
    with pytest.raises(ValueError, match=r"sort_by must be one of .*flops_per_second; got 'speed'"):
        rows.table(sort_by="speed")
    module_calls = next(row for row in run.key_averages() if row.key == "nn.Module call")
    assert module_calls.flops == 2 * run.total()  # nested calls count once


def test_a_profile_restores_the_model_and_its_inputs():
    model, x = make_convnet().train(), torch.randn(2, 3, 8, 8, requires_grad=True)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    x.grad = torch.ones_like(x)
    gradient = x.grad
    profile_kernels(model, x, loss=LOSSES["training"], repeat=2)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert x.grad is gradient and bool((gradient == 1).all())
    assert torch.equal(generator, torch.get_rng_state())

    def forward(self, x):
        raise KeyError("broken")

    before = installed()
    broken = Applied(forward)
    with pytest.raises(KeyError), KernelProfile(broken) as run:
        broken(x)
    assert installed() == before
    assert run.about() == ["torch.profiler's times of an incomplete step"]


@pytest.mark.skipif(VERSION < (2, 12), reason="events of this torch cannot be written by hand")
def test_device_time_is_attributed_to_the_op_that_launched_it(caplog):
    """The events are written by hand as torch.profiler creates them on CUDA, where kernels are linked with their op."""

    def on_cpu(number, name, start, end, **more):
        return FunctionEvent(number, name, 1, start, end, use_device="cuda", activity_type="cpu_op", **more)

    module, op, launch = on_cpu(1, "nn.Module: (Linear)", 0, 50), on_cpu(2, "aten::linear", 10, 40), None
    inner, launch = on_cpu(3, "aten::addmm", 20, 35), on_cpu(9, "cudaLaunchKernel", 25, 30)
    kernel = FunctionEvent(
        9, "gemm", 7, 60, 160, use_device="cuda", device_type=DeviceType.CUDA, linked_correlation_id=3
    )
    for parent, child in ((module, op), (op, inner), (inner, launch)):
        parent.append_cpu_child(child)
        child.set_cpu_parent(parent)
    inner.append_kernel("gemm", 0, 100)
    run = read_events([module, op, inner, launch, kernel], {"nn.Module: (Linear)": ""}, device="cuda")
    assert [event.kind for event in run.events] == ["module", "op", "op", "other", "device"]
    assert [event.parent for event in run.events] == [-1, 0, 1, 2, 2]
    trace = record_call(nn.Linear(3, 2), (torch.ones(4, 3),), stops_at=COST_MODEL.stops_at)
    match = match_kernels(run, trace, COST_MODEL)
    assert match.flops == (48, 48, None, None, None)
    assert [event.device_ns for event in run.events] == [100_000, 100_000, 100_000, 0, 100_000]
    (timed,) = [event for event in overlay_times(match).events if event.kind == "op"]
    assert timed.duration_ns == 100_000
    rows = {row.key: row for row in sum_kernels(match)}
    assert (rows["gemm"].cpu_time_total, rows["gemm"].self_device_time_total) == (0, 100)
    assert rows["aten::linear"].flops_per_second == 48 / 100e-6
    text = KernelAverages(rows.values()).table(sort_by="cuda_time_total")
    assert "Self device %" in text and text.endswith("Self device time total: 100 µs")


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the warning without CUDA")
@pytest.mark.parametrize("activities", [[ProfilerActivity.CPU, ProfilerActivity.CUDA], [ProfilerActivity.CUDA]])
def test_without_cuda_the_profile_has_cpu_times_and_warns_once(activities, caplog, recwarn):
    with caplog.at_level(logging.WARNING, logger="fvflops"):
        run = profile_kernels(nn.Linear(3, 2), torch.ones(4, 3), activities=activities)
    assert [record.getMessage() for record in caplog.records] == [
        "this machine has no CUDA: the profile has CPU times only"
    ]
    assert not [warning for warning in recwarn if "CUDA" in str(warning.message)]
    assert run.total() == 48 and {row.key for row in run.key_averages()} >= {"aten::linear"}


def test_bad_input(tmp_path):
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    with KernelProfile(model, schedule=schedule(wait=5, active=1)) as run:
        for _ in range(3):
            model(x)
            run.step()
    with pytest.raises(TraceError, match="the schedule made none of 3 steps active"):
        run.key_averages()
    with pytest.raises(RuntimeError, match="call it inside the with block"):
        run.step()
    with pytest.raises(RuntimeError, match="can be entered only once"):
        run.__enter__()
    with pytest.raises(TraceError, match="was not entered"):
        KernelProfile(model).match()
    (tmp_path / "file").write_text("")
    calls = []
    with pytest.raises(OSError, match="cannot be written"):
        profile_kernels(lambda y: calls.append(y), x, chrome_trace=tmp_path / "file" / "trace.json")
    assert not calls
    with pytest.raises(ValueError, match="repeat must be an integer >= 1, not 0"):
        profile_kernels(model, x, repeat=0)
    with pytest.raises(TypeError, match="got int"):
        KernelProfile(3)
    with pytest.raises(ValueError, match="returned 'now' for step 0"):
        KernelProfile(model, schedule=lambda step: "now").__enter__()
    with KernelProfile(model) as run, pytest.raises(RuntimeError, match="before or after the with block"):
        run.count(lambda: None)


def test_a_run_that_raises_keeps_its_completed_steps():
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    with pytest.raises(ZeroDivisionError), KernelProfile(model, schedule=schedule(warmup=1, active=5)) as run:
        for number in range(6):
            model(x)
            if number == 3:
                raise ZeroDivisionError
            run.step()
    assert run.match().complete_steps() == [0, 1]
    assert run.trace().about["runs"] == "2" and run.total() == 48
    assert run.about()[0].startswith("torch.profiler's times of 2 steps")


def test_errors_of_on_trace_ready_are_raised_after_torch_profiler_ends():
    model, x = nn.Linear(3, 2), torch.ones(4, 3)

    def fail(run):
        raise ZeroDivisionError(run.total())

    with (
        pytest.raises(ZeroDivisionError, match="48"),
        KernelProfile(model, schedule=schedule(warmup=1, active=1), on_trace_ready=fail) as run,
    ):
        for _ in range(4):
            model(x)
            run.step()
    assert run.step_num == 2
    with pytest.raises(TraceError, match="no FLOPs"), KernelProfile(model, on_trace_ready=fail):
        model(x)


def test_a_function_is_profiled_too():
    weight = torch.randn(4, 5)
    run = profile_kernels(lambda x: torch.relu(x @ weight), torch.randn(3, 4), repeat=1)
    assert run.total() == 2 * 3 * 4 * 5 and sums_of_steps(run.match()) == {0: 120}


def max_pairs(names, ends, expected):
    for size in range(min(len(names), len(expected)), 0, -1):
        for columns in combinations(range(len(expected)), size):
            for rows in combinations(range(len(names)), size):
                disjoint = all(ends[row] <= next_row for row, next_row in pairwise(rows))
                pairs = zip(rows, columns, strict=True)
                if disjoint and all(names[row] == expected[column] for row, column in pairs):
                    return size
    return 0


def test_the_alignment_is_the_longest_without_nested_events():
    generator = random.Random(0)
    for _ in range(150):
        count = generator.randint(1, 7)
        names = [RecordedCall("op", generator.choice("abc")) for _ in range(count)]
        depths = [0]
        for _ in range(count - 1):
            depths.append(generator.randint(0, depths[-1] + 1))
        ends = [
            next((end for end in range(row + 1, count) if depths[end] <= depths[row]), count) for row in range(count)
        ]
        expected = [RecordedCall("op", generator.choice("abc")) for _ in range(generator.randint(1, 5))]
        pairs = align(names, ends, expected)
        assert all(names[row] == expected[column] for row, column in pairs)
        for (row, column), (next_row, next_column) in pairwise(pairs):
            assert ends[row] <= next_row and column < next_column
        assert len(pairs) == max_pairs(names, ends, expected), (names, ends, expected)


def test_an_op_in_another_thread_belongs_to_the_step_running_at_its_start():
    events = (
        KernelEvent("ProfilerStep*", "step", start_ns=0, duration_ns=100, thread=1),
        KernelEvent("nn.Module: (Linear)", "module", parent=0, start_ns=5, duration_ns=20, thread=1),
        KernelEvent("aten::addmm", "op", parent=1, start_ns=6, duration_ns=10, thread=1, sequence=4),
        KernelEvent("AddmmBackward0", "node", start_ns=40, duration_ns=30, thread=2, sequence=4, forward_thread=1),
        KernelEvent("aten::mm", "op", parent=3, start_ns=45, duration_ns=20, thread=2),
        KernelEvent("aten::mm", "op", start_ns=200, duration_ns=20, thread=2),
    )
    match = match_kernels(KernelRun(events), None, COST_MODEL)
    assert match.steps == (0, 0, 0, 0, 0, -1)
    assert match.phases[3:] == ("backward", "backward", "forward")


def test_a_profiler_that_is_already_running_keeps_its_events():
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    with profile(activities=[ProfilerActivity.CPU]) as outer:
        model(x)
        with pytest.raises(RuntimeError, match="is already running"):
            profile_kernels(model, x)
        model(x)
    assert sum(row.count for row in outer.key_averages() if row.key == "aten::addmm") >= 2
    assert profile_kernels(model, x).total() == 48


def test_ops_in_data_parallel_modules_keep_their_flops():
    """The ranges of a DistributedDataParallel and of its recording have the same modules."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, x = make_convnet(), torch.randn(2, 3, 8, 8)
        wrapped = nn.parallel.DistributedDataParallel(model)
        loop = schedule(warmup=1, active=2, repeat=1)
        with KernelProfile(wrapped, schedule=loop) as run:
            for _ in range(3):
                wrapped(x).sum().backward()
                run.step()
        called = profile_kernels(wrapped, x, loss=LOSSES["training"], repeat=2)
    finally:
        dist.destroy_process_group()
    plain = profile_kernels(model, x, loss=LOSSES["training"], repeat=2)
    for profiled in (run, called):
        assert profiled.ledger().attributed_to_modules == () and profiled.total() == plain.total()
        rows, expected = (
            {(row.key, row.module): row.self_macs for row in other.key_averages(group_by_module=True) if row.self_macs}
            for other in (profiled, plain)
        )
        assert rows == expected
        assert {key for key, _ in rows} >= {"aten::convolution", "aten::convolution_backward", "aten::addmm"}


def test_flops_on_no_event_are_said():
    def step(x):
        return nn.functional.relu(x @ x)

    trace = record_call(lambda x: step(x) @ x, (torch.ones(4, 4),))
    run = KernelProfile()
    with run:
        step(torch.ones(4, 4))
    run.count_with(trace)
    assert run.total() == 2 * 2 * 4**3 and run.ledger().lost_flops == 2 * 4**3
    assert sum(row.self_flops or 0 for row in run.key_averages()) == run.total() - run.ledger().lost_flops
    assert "ops without an event, whose FLOPs are on no event (0.128K): aten::mm ×1" in run.about()


def test_stacks_and_the_memory_timeline_are_torch_profilers(tmp_path):
    options = {"record_shapes": True, "profile_memory": True, "with_stack": True}
    run = profile_kernels(make_convnet(), torch.randn(2, 3, 8, 8), loss=LOSSES["training"], repeat=2, **options)
    run.export_stacks(tmp_path / "time.txt")
    run.profiler.export_stacks(str(tmp_path / "torch.txt"))
    assert (tmp_path / "time.txt").read_text() == (tmp_path / "torch.txt").read_text() != ""
    stacks = {line.rpartition(" ")[0] for line in (tmp_path / "time.txt").read_text().splitlines()}
    for metric, total in (("self_flops", run.total()), ("self_macs", run.macs())):
        run.export_stacks(tmp_path / "work.txt", metric)
        lines = [line.rpartition(" ") for line in (tmp_path / "work.txt").read_text().splitlines()]
        assert sum(int(value) for *_, value in lines) == 2 * total
        assert {frames for frames, *_ in lines} <= stacks
    theirs = {(row.key, tuple(row.stack)): row for row in run.profiler.key_averages(group_by_stack_n=2)}
    rows = [row for row in run.key_averages(group_by_stack_n=2) if row.key == "aten::conv2d"]
    assert rows and all("test_kernels" in str(row.stack) or "conv.py" in str(row.stack) for row in rows)
    for row in rows:
        assert row.cpu_time_total == pytest.approx(theirs[row.key, row.stack].cpu_time_total)
    # Python functions are events of the profile, and change neither the sums of steps nor what is matched.
    sums = sums_of_steps(run.match())
    assert (sums[0], sums[1], sums.get(-1, 0)) == (run.total(), run.total(), 0)
    assert run.ledger().attributed_to_modules == () and len(run.match().complete_steps()) == 2
    run.export_memory_timeline(tmp_path / "memory.json", "cpu")
    times, sizes = json.loads((tmp_path / "memory.json").read_text())
    assert len(times) == len(sizes) > 10 and max(map(sum, sizes)) > 2 * 3 * 64 * 4
    run.export_chrome_trace(tmp_path / "stacks.json")
    events = json.loads((tmp_path / "stacks.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "python_function" for event in events)
    with pytest.raises(ValueError, match=r"metric must be one of .*self_flops; got 'flops'"):
        run.export_stacks(tmp_path / "x.txt", "flops")
    plain = profile_kernels(nn.Linear(3, 2), torch.ones(4, 3), record_shapes=True)
    with pytest.raises(ValueError, match=r"export_stacks needs with_stack=True: pass it"):
        plain.export_stacks(tmp_path / "x.txt")
    with pytest.raises(ValueError, match=r"export_memory_timeline needs profile_memory=True and with_stack=True"):
        plain.export_memory_timeline(tmp_path / "x.json")
    assert not (tmp_path / "x.txt").exists() and not (tmp_path / "x.json").exists()
