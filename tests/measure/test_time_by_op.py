"""Each kernel's time is in one row of an annotated trace, and the rows add up, whoever wrote the trace."""

import json
import random

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, annotate_trace
from fvflops.explain.annotation import annotation_report
from tests.support.models.parts import Applied, Parts

MM = {"Input Dims": [[64, 32], [32, 16]], "Input type": ["float", "float"]}
PRODUCT = 64 * 32 * 16


@torch.library.custom_op("fvflops_test::numpy_product", mutates_args=())
def numpy_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(a.view(-1, a.shape[-1]).numpy() @ b.numpy())


def profiled(path, run, *, record_shapes=True):
    with torch.profiler.profile(record_shapes=record_shapes) as profiler:
        run()
    profiler.export_chrome_trace(str(path))
    return str(path)


class GpuTrace:
    """Events as torch.profiler writes them on a GPU."""

    def __init__(self):
        self.events = []

    def add(self, name, cat, start, dur, tid=1, **args):
        self.events.append({"ph": "X", "cat": cat, "name": name, "ts": start, "dur": dur, "pid": 1, "tid": tid})
        self.events[-1]["args"] = {key.replace("_", " "): value for key, value in args.items()}

    def op(self, name, start, dur, number, **args):
        self.add(name, "cpu_op", start, dur, External_id=number, **args)

    def launch(self, start, number, name="cudaLaunchKernel"):
        self.add(name, "cuda_runtime", start, 1, correlation=number)

    def kernel(self, start, dur, number, stream=7, cat="kernel"):
        self.add(f"kernel{number}", cat, start, dur, stream, correlation=number)

    def write(self, path):
        path.write_text(json.dumps({"traceEvents": self.events}))
        return str(path)


def rows_of(path, counted=None):
    report = annotation_report([(path, annotate_trace(path, counted))])
    return {row["event"]: row for row in report.main_table().records()}


def test_compiled_code_without_a_model_has_the_flops_of_its_ops(tmp_path):
    model, x = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 64)), torch.ones(32, 64)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        compiled(x)
        inference = profiled(tmp_path / "inference.json", lambda: compiled(x))
        unshaped = profiled(tmp_path / "unshaped.json", lambda: compiled(x), record_shapes=False)
    expected = FlopCountAnalysis(model, x, table="exact").total()
    assert annotate_trace(inference).work().flops == expected
    counted = annotate_trace(inference, FlopCountAnalysis(model, x))
    assert counted.work().flops == expected
    assert counted.share() == 1
    assert annotate_trace(unshaped, FlopCountAnalysis(model, x)).share() == 1
    more = nn.Sequential(model, nn.Softmax(1))  # as if the softmax was fused: no event, and no step around it
    lines = annotate_trace(unshaped, FlopCountAnalysis(more, x)).about()
    assert any("where the FLOPs of fused ops are on no event (" in line for line in lines)
    compiled(x).sum().backward()
    training = profiled(tmp_path / "training.json", lambda: compiled(x).sum().backward())
    # x needs no gradient, so that the first Linear has one product in the backward pass, the second two.
    assert annotate_trace(training).work().macs == 5 * 32 * 64 * 128


def test_a_custom_op_with_a_view_inside_is_an_event_without_flops(tmp_path):
    x, weight = torch.ones(32, 64), torch.ones(64, 64)
    path = profiled(tmp_path / "custom.json", lambda: (numpy_product(x, weight), torch.mm(x, weight)))
    annotated = annotate_trace(path)
    assert ("fvflops_test::numpy_product", 1) in annotated.match.ledger.no_op
    assert annotated.work().macs == 32 * 64 * 64
    assert annotated.time_by_op().others["fvflops_test::numpy_product"] > 0


def test_a_row_has_the_calls_and_the_time_of_its_own_flops_only(tmp_path):
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(8)])
    x, small = torch.ones(32, 64), torch.ones(4, 4)
    rows = rows_of(profiled(tmp_path / "nested.json", lambda: (model(x), torch.matmul(small, small))))
    assert (rows["aten::linear"]["calls"], rows["aten::linear"]["macs"]) == (8, 8 * 32 * 64 * 64)
    assert (rows["aten::matmul"]["calls"], rows["aten::matmul"]["macs"]) == (1, 64)
    trace = annotate_trace(tmp_path / "nested.json")
    matmul = next(event for event in reversed(trace.match.run.events) if event.name == "aten::matmul")
    assert rows["aten::matmul"]["seconds"] == pytest.approx(matmul.duration_ns / 1e9)


class _Attention(Parts):
    def forward(self, x):
        for _ in range(self.transposes):
            x = x.transpose(1, 2)
        return nn.functional.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("has_shapes", (True, False))
def test_attention_is_not_lost_to_the_transposes_inside_its_event(tmp_path, has_shapes):
    """The model that was profiled has other transposes than the one that is counted."""
    x = torch.ones(2, 4, 4, 8)
    with torch.profiler.profile(record_shapes=has_shapes) as profiler:
        _Attention(transposes=0)(x)
    profiler.export_chrome_trace(str(tmp_path / "attention.json"))
    counted = FlopCountAnalysis(_Attention(transposes=4), x, table="exact")
    annotated = annotate_trace(tmp_path / "attention.json", counted)
    assert annotated.work().flops == counted.total() > 0
    assert annotated.share() == 1


def test_an_op_that_the_convention_decomposes_has_the_flops_of_the_ops_inside(tmp_path):
    def forward(self, x):
        return torch.diff(x)

    x = torch.ones(4, 5)
    path = profiled(tmp_path / "diff.json", lambda: Applied(forward)(x))
    assert annotate_trace(path, FlopCountAnalysis(Applied(forward), x)).work().flops == 4 * 4


def test_graph_launches_and_kernels_of_no_op_and_idle_time_are_rows(tmp_path):
    trace = GpuTrace()
    trace.op("aten::linear", 0, 10, 1, Input_Dims=[[64, 32], [16, 32], []], Input_type=["float", "float", ""])
    trace.op("aten::mm", 1, 8, 2, **MM)
    trace.launch(2, 100)
    trace.op("lib::fused", 20, 10, 3)
    trace.op("aten::view", 21, 2, 4, Input_Dims=[[64, 32], []], Input_type=["float", "ScalarList"])
    trace.launch(24, 101)
    trace.op("outer::run", 40, 10, 5)
    trace.launch(41, 102, "cudaGraphLaunch")
    for start, duration, number in ((5, 50, 100), (60, 20, 101), (90, 5, 102), (95, 15, 102), (120, 10, 999)):
        trace.kernel(start, duration, number)
    trace.kernel(70, 4, 101, stream=8, cat="gpu_memcpy")
    rows = rows_of(trace.write(tmp_path / "gpu.json"))
    microseconds = {name: round(row["seconds"] * 1e6, 6) for name, row in rows.items()}
    assert microseconds == {"aten::linear": 50, "other ops": 24, "graph launches": 20, "no op": 10, "idle": 25}
    assert {name: row["calls"] for name, row in rows.items()} == {
        "aten::linear": 1, "other ops": 1, "graph launches": 2, "no op": 1, "idle": None
    }  # fmt: skip
    assert (rows["aten::linear"]["macs"], rows["other ops"]["flops"]) == (PRODUCT, None)
    annotated = annotate_trace(tmp_path / "gpu.json")
    assert annotated.match.clock() == (1, 125_000)
    assert annotated.match.ledger.no_op == (("lib::fused", 1), ("outer::run", 1))


def test_rows_add_up_to_the_kernels_of_random_traces(tmp_path):
    drawn = random.Random(3)
    for number in range(20):
        trace = GpuTrace()
        intervals, time = [], 0
        for op in range(1, 40):
            time += drawn.randint(5, 30)
            trace.op(drawn.choice(["aten::mm", "lib::op"]), time, 4, op, **MM)
            trace.launch(time + 1, op, drawn.choice(["cudaLaunchKernel", "hipGraphLaunch", "cudaLaunchKernel"]))
            for _ in range(drawn.randint(0, 3)):
                start, length = time + drawn.randint(0, 40), drawn.randint(1, 25)
                intervals.append((start, start + length))
                trace.kernel(start, length, drawn.choice([op, op, 1000 + op]), stream=drawn.randint(7, 9))
        rows = rows_of(trace.write(tmp_path / f"{number}.json"))
        total = sum(round(row["seconds"] * 1e9) for name, row in rows.items() if name != "idle")
        assert total == 1000 * sum(end - start for start, end in intervals)
        points = {point for start, end in intervals for point in range(start, end)}
        span = max(end for _, end in intervals) - min(start for start, _ in intervals)
        assert round(rows["idle"]["seconds"] * 1e9) == 1000 * (span - len(points))


def test_most_of_the_time_without_flops_is_the_first_line(tmp_path):
    trace = GpuTrace()
    trace.op("aten::mm", 0, 4, 1, **MM)
    trace.launch(1, 1)
    trace.kernel(2, 3, 1)
    trace.op("lib::op", 10, 4, 2)
    trace.launch(11, 2)
    trace.kernel(12, 9, 2)
    path = trace.write(tmp_path / "few.json")
    few = annotation_report([("few.json", annotate_trace(path))]).parts[0]
    assert few.items == ["most of the time is without FLOPs: 25.0% of 12 µs has FLOPs"]
    trace.events[0]["name"] = "lib::other"
    none = annotation_report([("none.json", annotate_trace(trace.write(tmp_path / "none.json")))]).parts[0]
    assert none.items == ["most of the time is without FLOPs: none of 12 µs has FLOPs"]
