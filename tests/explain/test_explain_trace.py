"""Chrome traces explained: rows add up to each step, and each kernel has its class."""

import gzip
import json
import random
from itertools import product

import pytest

from fvflops import annotate_trace, explain_trace
from fvflops.cli import main
from fvflops.explain.findings.find_losses import find_losses
from fvflops.explain.step_records import sum_rows
from fvflops.measure.kernels import profiler_trace
from fvflops.measure.kernels.profiler_trace import TraceStream
from fvflops.trace import TraceError


def host(name, start, duration, category="cpu_op", **args):
    head = {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1}
    return {**head, "ts": start, "dur": duration, "args": args}


def kernel(name, start, duration, stream=7, category="kernel", **args):
    return {**host(name, start, duration, category, device=0, stream=stream, **args), "pid": 0, "tid": stream}


def launch(correlation, start, name="cudaLaunchKernel", duration=1, **args):
    return host(name, start, duration, "cuda_runtime", correlation=correlation, **args)


def write(path, events, **header):
    path.write_text(json.dumps({**header, "traceEvents": events}))
    return path


SHAPES = {"Input Dims": [[64, 32], [32, 16]], "Input type": ["float", "float"], "Concrete Inputs": ["", ""]}
EVENTS = [
    host("ProfilerStep#1", 0, 100, "user_annotation"),
    host("aten::mm", 5, 10, **SHAPES, **{"External id": 3}),
    launch(1, 8),
    kernel("gemm", 20, 30, correlation=1),
    launch(2, 16),
    kernel("ncclDevKernel_AllReduce", 40, 40, stream=9, correlation=2),
    launch(3, 17, "cudaMemcpyAsync"),
    kernel("Memcpy DtoD", 70, 20, stream=8, category="gpu_memcpy", correlation=3),
    host("ProfilerStep#2", 100, 100, "user_annotation"),
    host("aten::mm", 105, 10, **SHAPES, **{"External id": 5}),
    launch(4, 108),
    kernel("gemm", 120, 30, correlation=4),
]


def test_each_moment_of_a_step_belongs_to_one_row(tmp_path):
    explained = explain_trace(write(tmp_path / "trace.json", EVENTS))
    first, second = explained.timelines[0].steps
    assert [(row.kind, row.ns, row.kernel_ns) for row in sum_rows(first.work, lambda row: row.kind)] == [
        ("matmul", 30_000, 30_000),
        ("communication", 30_000, 40_000),
        ("copy", 10_000, 20_000),
    ]
    assert (first.total_ns, first.busy_ns, first.idle_ns) == (100_000, 70_000, 30_000)
    assert (second.total_ns, second.busy_ns, second.idle_ns) == (30_000, 30_000, 0)
    idle = sum_rows(first.idle, lambda row: row.cause)
    assert [(row.cause, row.ns) for row in idle] == [("host", 15_000), ("start", 11_000), ("launch", 4_000)]
    assert explained.total_ns() == 130_000
    assert [(row.calls, row.macs) for row in explained.work() if row.kind == "matmul"] == [(2, 2 * 64 * 32 * 16)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", 'no "traceEvents"'),
        (json.dumps({"traceEvents": EVENTS})[:999], "truncated"),
        ("[]", "neither ops nor kernels"),
        ('{"other": 1}', 'no "traceEvents"'),
        ('{"traceEvents": [3]}', "not an object"),
        ('{"traceEvents": [{"ph": "X", "cat": "kernel"}]}', "neither ops nor kernels"),
    ],
)
def test_what_is_no_trace_raises_an_error(tmp_path, text, message):
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(TraceError, match=message):
        explain_trace(tmp_path / "trace.json")


def test_compressed_traces_and_lists_of_events_are_the_same(tmp_path):
    plain = explain_trace(write(tmp_path / "trace.json", EVENTS))
    (tmp_path / "list.json.gz").write_bytes(gzip.compress(json.dumps(EVENTS).encode()))
    assert explain_trace(tmp_path / "list.json.gz").timelines[0].steps == plain.timelines[0].steps
    (tmp_path / "cut.json.gz").write_bytes(gzip.compress(json.dumps(EVENTS).encode())[:-30])
    with pytest.raises(TraceError, match="decompressed"):
        explain_trace(tmp_path / "cut.json.gz")


def test_negative_durations_and_missing_launches_are_said(tmp_path):
    events = [kernel("gemm", 0, 10, correlation=99), kernel("gemm", 30, -5), kernel("gemm", 50, 10)]
    explained = explain_trace(write(tmp_path / "trace.json", events))
    (step,) = explained.timelines[0].steps
    assert (step.total_ns, step.busy_ns) == (60_000, 20_000)
    assert {row.cause: row.ns for row in step.idle} == {"unknown": 40_000}
    text = "\n".join(explained.about())
    assert "1 event of negative duration" in text and "100.0% of the kernel time has no op" in text


def test_kernels_of_a_graph_are_classed_by_name(tmp_path):
    events = [launch(1, 0, "cudaGraphLaunch"), kernel("nvjet_tst_64", 10, 30, correlation=1)]
    events.append(kernel("triton_poi_fused_add_gelu_0", 45, 5, correlation=1))
    explained = explain_trace(write(tmp_path / "trace.json", events))
    rows = {row.kind: row for row in explained.work()}
    assert (rows["matmul"].is_graph, rows["elementwise"].ns) == (True, 5_000)
    assert {row.cause for row in explained.idle()} == {"queue"}
    assert "100.0% of the kernel time is in captured graphs" in "\n".join(explained.about())


@pytest.mark.parametrize(
    ("before", "cause"),
    [
        ([host("aten::item", 5, 20), launch(8, 6, "cudaStreamSynchronize", 18)], "synchronisation"),
        ([host("enumerate(DataLoader)#_Single.__next__", 5, 90, "user_annotation")], "data"),
        ([launch(8, 11, "cudaMalloc", 85)], "runtime"),
        ([host("train.py(7): prepare", 5, 90, "python_function")], "host"),
        ([host("aten::add", 5, 90)], "launch"),
        # Compilation runs ops, and calls that are not compilation lie in frames of torch.compile.
        ([host("aot_collect_metadata (dynamo_timed)", 5, 90), host("aten::t", 6, 80)], "compilation"),
        ([host("torch/_compile.py(42): inner", 5, 90, "python_function"), host("aten::t", 6, 89)], "launch"),
        ([host("torch/_dynamo/eval_frame.py(8): _fn", 5, 90, "python_function")], "host"),
        (
            [
                host("train.py(3): tidy", 5, 90, "python_function"),
                host("<built-in function collect>", 6, 88, "python_function"),
            ],
            "garbage",
        ),
        ([host("torch/serialization.py(9): save", 5, 90, "python_function"), host("aten::copy_", 6, 80)], "saving"),
        ([host("checkpoints/save/train.py(3): main", 5, 90, "python_function")], "host"),
    ],
)
def test_idle_time_has_the_cause_that_the_host_was_busy_with(tmp_path, before, cause):
    """A gap from 10 to 110 us, whose kernel is launched at 100."""
    events = [launch(1, 0), kernel("gemm", 5, 5, correlation=1), *before]
    events += [launch(2, 100), kernel("gemm", 110, 10, correlation=2)]
    rows = explain_trace(write(tmp_path / "trace.json", events)).idle()
    assert (rows[0].cause, sum(row.ns for row in rows)) == (cause, 100_000)
    assert rows[0].ns >= 80_000


def test_phases_and_modules_of_the_backward_pass(tmp_path):
    events = [
        host("nn.Module: Linear_3", 0, 20, "python_function"),
        host("aten::mm", 1, 10, **{"Sequence number": 7}),
        launch(1, 2),
        host("autograd::engine::evaluate_function: MmBackward0", 30, 20, **{"Sequence number": 7}),
        host("aten::mm", 32, 10),
        launch(2, 33),
        host("Optimizer.step#SGD.step", 60, 20, "user_annotation"),
        host("aten::_foreach_add_", 62, 10),
        launch(3, 63),
        *(kernel("k", 40 * number, 10, correlation=number) for number in (1, 2, 3)),
    ]
    rows = explain_trace(write(tmp_path / "trace.json", events)).work(lambda row: row.phase)
    found = {row.phase: (row.kind, row.module) for row in rows}
    assert found == {
        "forward": ("matmul", "Linear_3"),
        "backward": ("matmul", "Linear_3"),
        "optimizer": ("optimizer", ""),
    }


def test_ops_of_a_cpu_trace_take_the_place_of_kernels(tmp_path):
    events = [host("aten::linear", 0, 30), host("aten::addmm", 10, 15, **SHAPES), host("aten::relu", 40, 10)]
    explained = explain_trace(write(tmp_path / "trace.json", events))
    (step,) = explained.timelines[0].steps
    assert {row.op: row.ns for row in step.work} == {
        "aten::linear": 15_000,
        "aten::addmm": 15_000,
        "aten::relu": 10_000,
    }
    assert step.idle_ns == 10_000


def test_collectives_of_gloo_are_exposed_where_no_op_runs(tmp_path):
    """From 0 to 100 us: an op until 30, compilation with an op inside from 60 to 80, a collective from 20 to 50."""
    events = [
        host("aten::mm", 0, 30, **SHAPES),
        {**host("gloo:all_reduce", 20, 30, "user_annotation"), "tid": 2},
        host("entire_frame_compile", 60, 20),
        host("aten::mm", 65, 10, **SHAPES),
        host("aten::relu", 90, 10),
    ]
    (step,) = explain_trace(write(tmp_path / "trace.json", events)).timelines[0].steps
    assert (step.compute_ns, step.exposed_communication_ns, step.communication_ns) == (40_000, 20_000, 30_000)
    assert {(row.op or row.kernel): row.ns for row in step.work} == {
        "aten::mm": 30_000,
        "gloo:all_reduce": 20_000,
        "aten::relu": 10_000,
    }
    assert {row.cause: row.ns for row in step.idle} == {"compilation": 20_000, "host": 20_000}


def test_the_report_is_written_in_each_format(tmp_path):
    explained = explain_trace(write(tmp_path / "trace.json", EVENTS))
    assert repr(explained).startswith("<ExplainedTrace of trace.json: 2 steps") and len(repr(explained)) <= 80
    assert max(map(len, str(explained).splitlines())) <= 80
    assert explained._repr_html_().count("<table") >= 3
    assert "matmul" in str(explained) and "idle: host outside of ops" in str(explained)
    explained.save(tmp_path / "out.html")
    explained.save(tmp_path / "out.json")
    data = json.loads((tmp_path / "out.json").read_text())
    (rank,) = data["ranks"]
    for step in rank["steps"]:
        assert sum(row["ns"] for row in (*step["work"], *step["idle"])) == step["total_ns"]
    with pytest.raises(ValueError, match="name a file"):
        explained.save(tmp_path / "out.pdf")
    assert main(["explain", str(tmp_path / "trace.json"), "--output", str(tmp_path / "out.md")]) == 0
    assert "ProfilerStep#1" in (tmp_path / "out.md").read_text()


def test_a_long_product_makes_no_collective_late(tmp_path):
    """Collectives without a recorded name are compared with each other, not with all kernels."""
    events = [kernel("ncclDevKernel_Generic", start, 50, stream=9) for start in (0, 100, 200)]
    events += [kernel("gemm", start, duration) for start, duration in ((300, 10), (320, 10), (340, 10), (360, 300))]
    found = find_losses(explain_trace(write(tmp_path / "trace.json", events)))
    assert "straggler" not in [finding.code for finding in found]


def test_the_rank_that_joins_last_is_the_straggler(tmp_path):
    paths = []
    for rank, (start, duration) in enumerate([(0, 90), (70, 20), (30, 60)]):
        args = {"Collective name": "allreduce", "In msg nelems": 1000, "dtype": "Float", "Group size": 3}
        events = [kernel("ncclDevKernel_AllReduce", start, duration, **args)]
        paths.append(write(tmp_path / f"{rank}.json", events, distributedInfo={"rank": rank}))
    explained = explain_trace(paths)
    assert [(wait.rank, wait.waiting_ns) for wait in explained.waits()] == [(0, 70_000), (1, 0), (2, 40_000)]
    assert [row.nbytes for row in explained.work()] == [12_000]
    assert "least rank 1" in "\n".join(explained.about())
    found = {finding.code: finding for finding in find_losses(explained)}
    assert found["straggler"].seconds == pytest.approx((70e-6 + 0 + 40e-6) / 3)
    assert "of which rank 1 joins last" in found["straggler"].text
    assert not explain_trace(paths[:1]).waits()
    with pytest.raises(TraceError, match="the same rank"):
        explain_trace([paths[0], paths[0]])


@pytest.mark.parametrize("seed", range(5))
def test_times_equal_those_of_a_timeline_of_microseconds(tmp_path, seed):
    """The definitions of TraceLens' gpu_timeline, applied to each microsecond."""
    draw = random.Random(seed)
    names = {"gemm": "kernel", "ncclDevKernel_AllGather": "kernel", "Memcpy DtoH": "gpu_memcpy"}
    events, running = [], {name: set() for name in names}
    for _ in range(60):
        name, start, duration = draw.choice(list(names)), draw.randrange(400), draw.randrange(1, 12)
        events.append(kernel(name, start, duration, stream=draw.randrange(3), category=names[name]))
        running[name] |= set(range(start, start + duration))
    (step,) = explain_trace(write(tmp_path / "trace.json", events)).timelines[0].steps
    compute, communication, copies = running.values()
    everything = compute | communication | copies
    assert step.compute_ns == 1000 * len(compute)
    assert (step.communication_ns, step.memcpy_ns) == (1000 * len(communication), 1000 * len(copies))
    assert step.exposed_communication_ns == 1000 * len(communication - compute)
    assert step.exposed_memcpy_ns == 1000 * len(copies - communication - compute)
    assert step.total_ns == 1000 * (max(everything) + 1 - min(everything))
    assert step.idle_ns == step.total_ns - 1000 * len(everything) == sum(row.ns for row in step.idle)


@pytest.mark.parametrize("field", ["name", "ts", "dur", "pid", "tid", "args", *SHAPES, "External id", "correlation"])
def test_an_event_with_invalid_values_is_no_error(tmp_path, field):
    invalid = (None, -3, 1.5, "x", [1], {"a": 1}, True, 1e300, float("inf"), 10**30, [[1, 2], "a"], [[{}]])
    for event, value in product({event["cat"]: event for event in EVENTS}.values(), invalid):
        args = {**event["args"], **SHAPES, field: value}
        changed = {**event, field: value} if field in event else {**event, "args": args}
        path = write(tmp_path / "trace.json", [*EVENTS, changed])
        unreadable = explain_trace(path).timelines[0].columns.unreadable
        assert (unreadable <= 1 and (field, value) != ("args", [1])) or unreadable == 1
        for read in (explain_trace, annotate_trace):
            assert ("1 event with invalid values ignored" in " ".join(str(read(path)).split())) == unreadable
    assert unreadable or field not in ("ts", "dur", "args")


@pytest.mark.parametrize("runtime", ["cuda_runtime", "cuda_driver", "hip_runtime", "runtime"])
def test_a_kernel_without_an_id_is_of_the_op_around_its_launch(tmp_path, runtime):
    op, launched = host("aten::mm", 0, 9, **SHAPES), {**launch(1, 2), "cat": runtime}
    path = write(tmp_path / "trace.json", [op, launched, kernel("gemm", 20, 5, correlation=1)])
    assert [row.name for row in annotate_trace(path).time_by_op().rows if row.nanoseconds == 5000] == ["aten::mm"]


@pytest.mark.parametrize("size", range(1, 40))
def test_a_number_may_be_cut_by_the_end_of_a_block(tmp_path, monkeypatch, size):
    monkeypatch.setattr(profiler_trace, "_BLOCK", size)
    stream = TraceStream(str(write(tmp_path / "trace.json", EVENTS, version=123456789, factor=-1.25e-7)))
    assert (list(stream), stream.header) == (EVENTS, {"version": 123456789, "factor": -1.25e-7})


def test_times_since_1970_are_read_exactly(tmp_path):
    later = [{**event, "ts": 1_759_300_000_000_000.25 + event["ts"]} for event in EVENTS]
    read, exact = (explain_trace(write(tmp_path / "trace.json", events)) for events in (later, EVENTS))
    assert read.timelines[0].steps == exact.timelines[0].steps
