"""Chrome traces explained: rows add up to each step, and each kernel has its class."""

import json

import pytest

from fvflops import explain_trace
from fvflops.explain.step_records import sum_rows
from fvflops.trace import TraceError


def host(name, start, duration, category="cpu_op", **args):
    return {
        "ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": duration, "args": args,
    }  # fmt: skip


def kernel(name, start, duration, stream=7, category="kernel", **args):
    args = {"device": 0, "stream": stream, **args}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 0,
        "tid": stream,
        "ts": start,
        "dur": duration,
        "args": args,
    }


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
    assert [(row.cause, row.ns) for row in idle] == [("host", 15_000), ("start", 12_000), ("launch", 3_000)]
    assert explained.total_ns() == 130_000
    assert [(row.calls, row.macs) for row in explained.work() if row.kind == "matmul"] == [(2, 2 * 64 * 32 * 16)]


def test_a_file_that_is_cut_off_raises_an_error(tmp_path):
    text = json.dumps({"traceEvents": EVENTS})
    (tmp_path / "trace.json").write_text(text[: len(text) // 2])
    with pytest.raises(TraceError, match="cut off"):
        explain_trace(tmp_path / "trace.json")
