"""Chrome traces that other processes wrote with torch.profiler alone: nearly all FLOPs land on their events."""

import json
from collections import Counter
from functools import cache

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fvflops import FlopCountAnalysis, TrainingStepAnalysis, annotate_trace, load_table, record_call
from fvflops.counting import TableCostModel
from fvflops.explain.annotation import annotation_report
from fvflops.explain.trace_events import read_events
from fvflops.measure.kernels.profiler_trace import read_document, write_document
from fvflops.measure.kernels.recorded_calls import ShapeCosts, Work
from fvflops.reports.formats import write_document as write_report
from fvflops.trace import TraceError
from tests.support.checkout import ROOT
from tests.support.processes.start import run_ranks
from tests.support.processes.trace_writer import MODELS, STEPS

RANKS = 2
CUDA_TRACE = ROOT / "tests" / "data" / "cuda_chrome_trace.json"
ADDED = {"module", "phase", "MACs", "FLOPs", "FLOP/s", "bytes", "launched by"}


@cache
def count_step(name):
    model, x = MODELS[name]()
    step = TrainingStepAnalysis(
        model.train(), x, loss=lambda y: y.sum(), optimizer=torch.optim.AdamW, table="exact", warn=False
    )
    return step.trace()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The traces of a process alone and of two ranks."""
    path = tmp_path_factory.mktemp("traces")
    run_ranks("trace_writer", RANKS, path, timeout=120)
    return path


@cache
def annotate(path):
    """Return the trace of another process with the counts of its model."""
    return annotate_trace(path, count_step(FILES[path.name]))


FILES = {
    "resnet50.json": "resnet50",
    "gpt2.json.gz": "gpt2",
    "llama.json": "llama",
    **{f"ddp_{rank}.json": "gpt2" for rank in range(RANKS)},
    **{f"fsdp_{rank}.json": "llama" for rank in range(RANKS)},
}


@pytest.mark.parametrize("name", FILES)
def test_the_flops_of_a_training_step_land_on_the_events_of_another_process(folder, name):
    trace = count_step(FILES[name])
    annotated = annotate(folder / name)
    match = annotated.match
    counts = FlopCountAnalysis.from_trace(trace, table="exact", warn=False)
    assert match.total == Work(counts.macs(), counts.total())
    assert match.ledger.recorded_flops == STEPS * counts.total()
    assert annotated.share() > 0.999
    assert annotated.rank == (int(name.split("_")[1][0]) if "_" in name else None)
    assert len(match.complete_steps()) == STEPS
    # What landed has the modules, the phases and the multiply-adds of the recording.
    macs = Counter()
    for event, module, phase, step, work in zip(
        match.run.events, match.modules, match.phases, match.steps, match.self_work, strict=True
    ):
        if step == 0 and event.kind == "op" and work is not None and work.macs:
            macs[module, phase] += work.macs
    expected = Counter()
    for entry in counts.counts().entries:
        if entry.macs:
            expected[entry.scope[-1] if entry.scope else "", entry.phase] += entry.macs
    assert macs == expected
    rows = annotated.key_averages()
    assert sum(row.self_flops or 0 for row in rows) == annotated.work().flops
    assert sum(row.self_macs or 0 for row in rows) == STEPS * counts.macs()


@pytest.mark.parametrize("name", ["resnet50.json", "gpt2.json.gz", "ddp_1.json"])
def test_an_annotated_trace_is_the_trace_with_more_args(folder, tmp_path, name):
    annotated = annotate(folder / name)
    path = tmp_path / "new" / name
    annotated.save(path)
    ours, theirs = read_document(str(path)), read_document(str(folder / name))
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
    assert ours["fvflops"]["FLOPs per MAC"] == 2 and ours["fvflops"]["about"] == annotated.about()
    assert {key: value for key, value in ours.items() if key not in ("fvflops", "traceEvents")} == {
        key: value for key, value in theirs.items() if key != "traceEvents"
    }
    assert len(ours["traceEvents"]) == len(theirs["traceEvents"])
    for event, other in zip(ours["traceEvents"], theirs["traceEvents"], strict=True):
        args = event.get("args", {})
        assert {key: value for key, value in args.items() if key not in ADDED} == other.get("args", {})
        assert {**event, "args": 0} == {**other, "args": 0}
    products = [event for event in ours["traceEvents"] if event["name"] in ("aten::addmm", "aten::mm")]
    assert products
    for event in products:
        args = event["args"]
        assert args["FLOPs"] >= 2 * args["MACs"] > 0 and args["bytes"] > 0 and "module" in args
        assert args["FLOP/s"] == pytest.approx(args["FLOPs"] * 1e6 / event["dur"], rel=1e-3)


def test_without_a_model_the_flops_come_from_the_recorded_shapes(folder):
    by_model, by_shapes = annotate(folder / "gpt2.json.gz"), annotate_trace(folder / "gpt2.json.gz")
    assert by_shapes.work().macs == by_model.work().macs > 0
    # Ops are counted as called, and a string, such as GELU's approximation, is not recorded.
    assert by_shapes.work().flops == pytest.approx(by_model.work().flops, rel=0.003)
    assert by_shapes.share() is None and set(by_shapes.match.modules) == {""}
    assert by_shapes.match.phases == by_model.match.phases
    bytes_by_model, bytes_by_shapes = (
        sum(annotated.match.nbytes[index] for index, work in enumerate(annotated.match.self_work) if work and work.macs)
        for annotated in (by_model, by_shapes)
    )
    assert bytes_by_model == pytest.approx(bytes_by_shapes, rel=0.01) and bytes_by_model > 0
    with pytest.raises(TraceError, match=r"resnet50\.json has no input shapes: pass the model"):
        annotate_trace(folder / "resnet50.json")


def test_events_of_other_shapes_are_counted_by_their_own(folder, tmp_path):
    """The model is counted at another batch than the traced one, which is said."""
    model, x = MODELS["gpt2"]()
    options = {"loss": lambda y: y.sum(), "optimizer": torch.optim.AdamW, "table": "exact", "warn": False}
    wrong = TrainingStepAnalysis(model.train(), x[:1], **options)
    annotated = annotate_trace(folder / "gpt2.json.gz", wrong)
    right = annotate(folder / "gpt2.json.gz")
    assert annotated.work().macs == right.work().macs == 2 * STEPS * wrong.macs()
    assert annotated.work().flops == pytest.approx(right.work().flops, rel=0.003)
    assert dict(annotated.match.ledger.other_shapes)["aten::addmm"] >= STEPS * 4 * 4
    assert any("input shapes differ from the model's" in line for line in annotated.about())
    linears = [index for index, event in enumerate(annotated.match.run.events) if event.name == "aten::addmm"]
    assert [annotated.match.modules[index] for index in linears] == [right.match.modules[index] for index in linears]


def test_an_op_on_a_part_of_a_tensor_has_the_flops_of_that_part(tmp_path):
    """The events are DTensor's: the op on the whole tensor, and within it the same op on this rank's part."""
    args = {"Input type": ["float", "float"], "Concrete Inputs": ["", ""]}
    raw_events = [
        {"name": "aten::mm", "ts": 0, "dur": 50, "args": {**args, "Input Dims": [[4, 8], [8, 6]]}},
        {"name": "aten::mm", "ts": 10, "dur": 30, "args": {**args, "Input Dims": [[4, 8], [8, 3]]}},
    ]
    document = {"traceEvents": [{"ph": "X", "cat": "cpu_op", "pid": 1, "tid": 1, **event} for event in raw_events]}
    trace = record_call(torch.mm, (torch.ones(4, 8), torch.ones(8, 6)))
    write_document(document, str(tmp_path / "trace.json"))
    annotated = annotate_trace(tmp_path / "trace.json", trace)
    assert [work and work.macs for work in annotated.match.self_work] == [None, 4 * 8 * 3]
    assert annotated.match.work[0] == Work(4 * 8 * 3, 2 * 4 * 8 * 3)


def count_linear_step():
    """Return the step of CUDA_TRACE."""
    model, x = nn.Linear(64, 128).train(), torch.randn(32, 64)
    options = {"optimizer": torch.optim.SGD, "device": "cuda", "table": "exact", "warn": False}
    return TrainingStepAnalysis(model, x, loss=torch.sum, **options)


def test_kernels_have_the_flops_of_the_op_that_launched_them(tmp_path):
    step = count_linear_step()
    macs = 32 * 64 * 128
    for counted in (step, None):
        annotated = annotate_trace(CUDA_TRACE, counted)
        assert annotated.work() == Work(step.macs(), step.total()) and step.macs() == 2 * macs
        annotated.save(tmp_path / "cuda.json")
        events = json.loads((tmp_path / "cuda.json").read_text())["traceEvents"]
        kernels = [event for event in events if event.get("cat") == "kernel"]
        products = {event["name"].split("_")[0]: event for event in kernels if event["args"]["MACs"]}
        # The two kernels of addmm ran for 30 and 10 µs, mm's for 40.
        assert {name: event["args"]["MACs"] for name, event in products.items()} == {
            "cutlass": macs * 3 // 4,
            "splitKreduce": macs // 4,
            "ampere": macs,
        }
        assert sum(event["args"]["FLOPs"] for event in kernels) == step.total()
        assert products["ampere"]["args"]["FLOP/s"] == round(2 * macs / 40e-6)
        assert products["ampere"]["args"]["launched by"] == "aten::mm"
        assert [event["args"]["phase"] for event in products.values()] == ["forward", "forward", "backward"]
        (memset,) = [event for event in events if event.get("cat") == "gpu_memset"]
        assert "FLOPs" not in memset["args"] and memset["args"]["bytes"] == 128
        linear = next(event for event in events if event["name"] == "aten::linear")
        # The time of an op is its kernels' and copies': 2 + 30 + 10 µs.
        assert linear["args"]["FLOP/s"] == round(linear["args"]["FLOPs"] / 42e-6)
    rows = {row.key.split("_")[0]: row for row in annotated.key_averages()}
    assert rows["cutlass"].flops_per_second == products["cutlass"]["args"]["FLOPs"] / 30e-6
    assert rows["cutlass"].self_flops is None and sum(row.self_flops or 0 for row in rows.values()) == step.total()


def test_a_backward_thread_runs_before_the_optimizer_of_its_step():
    """Backward ops of another thread are in order between ops of the step's own thread."""
    annotated = annotate_trace(CUDA_TRACE, count_linear_step())
    assert annotated.share() == 1 and annotated.match.ledger.attributed_to_modules == ()
    nodes = [event for event in annotated.match.run.events if event.name.startswith("autograd::engine")]
    assert {event.thread for event in nodes} == {2}
    assert [event.forward_thread for event in nodes] == [1, 1, 0]


def test_threads_steps_and_nesting_are_read_as_torch_profiler_has_them(tmp_path):
    """The events of the file, nested by time, equal torch.profiler's own in memory."""
    model, x = MODELS["gpt2"]()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        model(x).sum().backward()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = read_events(read_document(str(tmp_path / "trace.json"))).run.events
    ours = [
        (event.name, event.parent >= 0 and events[event.parent].name, event.kind == "op")
        for event in events
        if event.name != "[memory]"
    ]
    theirs = [
        (event.name, event.cpu_parent is not None and event.cpu_parent.name)
        for event in sorted(profiler.events(), key=lambda event: (event.time_range.start, -event.time_range.end))
        if event.name != "[memory]"
    ]
    # torch.profiler merges an event with its only nested event of the same name.
    counts = Counter(item[:2] for item in ours if item[0] != item[1])
    assert sum((counts - Counter(theirs)).values()) <= 0.01 * len(theirs)
    assert sum((Counter(theirs) - counts).values()) <= 0.01 * len(theirs)
    assert sum(is_op for *_, is_op in ours) > 100


def test_the_report_has_a_row_for_each_rank_and_ops_that_add_up(folder):
    ranks = [(f"{rank}.json", annotate(folder / f"ddp_{rank}.json")) for rank in range(RANKS)]
    report = annotation_report(ranks, subject="gpt2")
    traces, events = report.tables()[0].records(), report.main_table()
    assert [row["rank"] for row in traces] == list(range(RANKS))
    assert [row["flops"] for row in traces] == [annotated.work().flops for _, annotated in ranks]
    assert all(row["share"] > 0.999 for row in traces)
    assert sum(row["flops"] or 0 for row in events.records()) == sum(row["flops"] for row in traces)
    text = write_report(report, "text")
    assert "aten::mm" in text and "matched" in text and "c10d::allreduce_" in text


def test_bad_input(tmp_path):
    (tmp_path / "trace.json").write_text('{"traceEvents": []}')
    with pytest.raises(TraceError, match=r"trace\.json: the trace has no op events"):
        annotate_trace(tmp_path / "trace.json")
    with pytest.raises(FileNotFoundError):
        annotate_trace(tmp_path / "missing.json")
    trace = record_call(nn.Linear(3, 2), (torch.ones(4, 3),))
    with pytest.raises(TraceError, match="it is aggregated: pass the Trace of a single step"):
        annotate_trace(CUDA_TRACE, trace.aggregate())


def test_holistic_trace_analysis_parses_annotated_traces(folder, tmp_path):
    hta = pytest.importorskip(
        "hta.trace_analysis", reason="pip install --no-deps HolisticTraceAnalysis plotly pydot narwhals"
    )
    files = {}
    for rank in range(RANKS):
        files[rank] = str(tmp_path / f"rank_{rank}.json")
        annotate(folder / f"ddp_{rank}.json").save(files[rank])
    parsed = hta.TraceAnalysis(trace_files=files, trace_dir=str(tmp_path)).t
    plain = hta.TraceAnalysis(
        trace_files={rank: str(folder / f"ddp_{rank}.json") for rank in range(RANKS)}, trace_dir=str(folder)
    ).t
    for rank in range(RANKS):
        assert len(parsed.traces[rank]) == len(plain.traces[rank]) > 1000
        assert list(parsed.traces[rank]["dur"]) == list(plain.traces[rank]["dur"])
    cuda = tmp_path / "cuda.json"
    annotate_trace(CUDA_TRACE).save(cuda)
    ours, theirs = (
        hta.TraceAnalysis(trace_files={0: str(path)}, trace_dir=str(path.parent)) for path in (cuda, CUDA_TRACE)
    )
    breakdown = ours.get_temporal_breakdown(visualize=False)
    assert len(breakdown) == 1 and breakdown.equals(theirs.get_temporal_breakdown(visualize=False))


def test_products_in_compiled_code_are_counted_by_their_shapes(tmp_path):
    """What a compiler does not fuse has events, in an order of its own; the rest is on the event of the step."""
    torch._dynamo.reset()
    model, x = MODELS["gpt2"]()
    del model.h[2:]
    compiled = torch.compile(model.train(), backend="aot_eager")
    loop = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, schedule=loop) as profiler:
        for _ in range(2):
            compiled(x).sum().backward()
            profiler.step()
    torch._dynamo.reset()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    step = TrainingStepAnalysis(model, x, loss=lambda y: y.sum(), table="exact", warn=False)
    annotated = annotate_trace(tmp_path / "trace.json", step)
    match = annotated.match
    assert match.ledger.compiled > 50 and annotated.work() == Work(step.macs(), step.total())
    on_ops = sum(
        work.macs
        for event, work in zip(match.run.events, match.self_work, strict=True)
        if event.kind == "op" and work is not None
    )
    assert on_ops > 0.95 * step.macs() and annotated.share() > 0.9
    assert any("op events in compiled code" in line for line in annotated.about())


def test_an_ops_shapes_may_have_those_of_its_results_too():
    table = load_table("exact")
    dims, values = [[6], [4, 5], [5, 6], [], [], [4, 6]], ["", "", "", "1", "1", ""]
    args = dims, ["float", "float", "float", "Scalar", "Scalar", "float"], values
    unreadable = dims, ["float", "SomeClass", "float", "Scalar", "Scalar", "float"], values
    events = [("aten::addmm", args), ("aten::addmm", unreadable), ("aten::addmm", ()), ("mylib::scan", args)]
    costs = ShapeCosts(events, table, TableCostModel(table, "flops"))
    assert costs.work(0).macs == 4 * 5 * 6
    assert [costs.work(index) for index in (1, 2, 3)] == [None] * 3 == [costs.nbytes(index) for index in (1, 2, 3)]
