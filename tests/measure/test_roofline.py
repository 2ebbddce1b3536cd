"""The roofline: bounds against counts by hand and published intensities, measured peaks, the report, the command."""

import csv
import io
import json
import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fvflops import Device, FlopCountAnalysis, TrainingStepAnalysis, find_device, load_table, record_call
from fvflops.analysis.model_counts import ByteCountAnalysis
from fvflops.cli import main
from fvflops.devices.device_benchmark import measure_device, write_device
from fvflops.measure.op_roofline import VIEWS, Load, roofline, roofline_report
from fvflops.measure.profile_analysis import read_peaks
from fvflops.reports.display_width import display_width
from fvflops.reports.formats import write_document
from fvflops.zoo import build
from tests.support.models.parts import Applied

# 1 GFLOP/s in float32, 10 in bfloat16, 1 GB/s: ridges at 1 and 10 FLOP/byte.
SLOW = Device("slow", matrix={"bf16": 10e9}, vector={"fp32": 1e9}, bandwidth=1e9, source="made up")


def analyse(model, *args, **options):
    return roofline(FlopCountAnalysis(model, args, table="exact"), device=SLOW, **options)


def test_a_linear_layer_by_hand():
    model = nn.Sequential(nn.Linear(100, 50, bias=False), nn.ReLU())
    drawn = analyse(model, torch.ones(10, 100))
    first, second = drawn.entries
    # 2 * 10 * 100 * 50 FLOPs; 1000 + 5000 + 500 numbers of 4 bytes.
    assert first.load == Load(1, 100_000, 26_000, 1e-4, 1e-4)
    assert (first.scope, first.op, first.dtype, first.load.bound) == (("", "0"), "aten::linear", "fp32", "compute")
    # One compare-select each of 500; read and written.
    assert second.load == Load(1, 500, 4000, 4e-6) and second.load.bound == "memory"
    assert second.load.intensity == 0.125
    assert drawn.total() == Load(2, 100_500, 30_000, pytest.approx(1.04e-4), 1e-4)
    assert drawn.by_module() == {"": drawn.total(), "0": first.load, "1": second.load}
    assert list(drawn.by_operator()) == ["linear", "relu"] and list(drawn.by_phase()) == ["forward"]
    assert (drawn.peaks, drawn.ridge("fp32")) == ({"fp32": 10**9}, 1.0)


# NVIDIA, GPU Performance Background User's Guide, table 1: intensities of operations on numbers of 16 bits.
PUBLISHED = {
    "linear layer, 4096 outputs, 1024 inputs, batch 512": (nn.Linear(1024, 4096, bias=False), (512, 1024), 315),
    "linear layer, 4096 outputs, 1024 inputs, batch 1": (nn.Linear(1024, 4096, bias=False), (1, 1024), 1),
    "max pooling with 3x3 window and unit stride": (nn.MaxPool2d(3, 1, 1), (8, 64, 56, 56), 2.25),
    "ReLU activation": (nn.ReLU(), (512, 1024), 0.25),
}


@pytest.mark.parametrize("case", list(PUBLISHED))
def test_published_intensities(case):
    layer, shape, published = PUBLISHED[case]
    analysis = FlopCountAnalysis(layer.half(), torch.ones(shape, dtype=torch.half))
    drawn = roofline(analysis, device="V100 SXM2", table="exact")
    total = drawn.total()
    assert total.intensity == pytest.approx(published, rel=0.005)
    # The guide: a V100 that computes in half precision turns from memory to arithmetic at 139 FLOP/byte.
    assert drawn.ridge("fp16") == pytest.approx(139, abs=0.2)
    assert total.bound == ("compute" if published > 139 else "memory")


def test_generating_a_token_is_bound_by_memory_and_reading_a_prompt_by_compute():
    model = build("gpt2", device="meta").eval().bfloat16()
    token, prompt = (
        roofline(FlopCountAnalysis(model, torch.ones(shape, dtype=torch.int64)), device="H100").total()
        for shape in ((1, 1), (32, 1024))
    )
    # Of each weight of 2 bytes, read once, 2 FLOPs.
    assert token.bound == "memory" and token.intensity == pytest.approx(1.0, abs=0.05)
    weights = sum(parameter.numel() for parameter in model.parameters())
    tables = (model.get_parameter("wte.weight").numel(), model.get_parameter("wpe.weight").numel())
    assert token.bytes == pytest.approx(2 * (weights - tables[1]), rel=0.02)
    assert prompt.bound == "compute" and prompt.intensity > 295


def test_resnet50_on_an_a100():
    model = build("resnet50", device="meta").eval()
    analysis = FlopCountAnalysis(model, torch.ones(1, 3, 224, 224), table="exact")
    drawn = roofline(analysis, device="A100")
    total = drawn.total()
    assert total.flops == analysis.total()
    assert total.bytes == ByteCountAnalysis.from_trace(analysis.trace()).total()
    # Convolutions run in tf32 unless told otherwise, and a larger batch uses each weight more often.
    assert {entry.dtype for entry in drawn.entries if entry.label == "conv"} == {"tf32"}
    ieee = roofline(analysis, device="A100", float32_matmul="ieee")
    assert ieee.total().seconds > total.seconds and ieee.total().bytes == total.bytes
    larger = roofline(FlopCountAnalysis(model, torch.ones(16, 3, 224, 224), table="exact"), device="A100").total()
    assert total.intensity < larger.intensity < 2 * total.intensity
    assert larger.seconds < 16 * total.seconds
    sums = [drawn.by_module()[name] for name in ("conv1", "bn1", "relu", "maxpool", "avgpool", "fc")]
    sums += [drawn.by_module()[f"layer{number}"] for number in (1, 2, 3, 4)]
    assert sum(load.bytes for load in sums) == total.bytes
    assert math.fsum(load.seconds for load in sums) == pytest.approx(total.seconds)


def test_fused_attention_is_bound_by_compute_and_attention_in_parts_by_memory():
    q = torch.ones(1, 16, 2048, 64, dtype=torch.bfloat16)

    def in_parts(q, k, v):
        return torch.softmax(q @ k.mT / 8, -1) @ v

    fused, apart = (
        roofline(FlopCountAnalysis(function, (q, q.clone(), q.clone())), device="H100").total()
        for function in (F.scaled_dot_product_attention, in_parts)
    )
    assert (fused.bound, apart.bound) == ("compute", "memory")
    assert apart.bytes > 10 * fused.bytes and apart.seconds > fused.seconds


def test_a_training_step_has_phases():
    step = TrainingStepAnalysis(
        nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)).train(),
        torch.ones(16, 64),
        loss=lambda y: y.mean(),
        optimizer=torch.optim.SGD,
    )
    drawn = roofline(step, device=SLOW)
    phases = drawn.by_phase()
    assert set(phases) == {"forward", "backward", "optimizer"} and not drawn.unknown_traffic
    assert phases["backward"].flops > phases["forward"].flops > phases["optimizer"].flops
    assert phases["optimizer"].bound == "memory"
    assert sum(load.seconds for load in phases.values()) == pytest.approx(drawn.total().seconds)


def test_a_dtype_of_ones_own_and_dtypes_without_a_peak():
    layer = nn.Linear(64, 64, bias=False).double()
    analysis = FlopCountAnalysis(
        nn.Sequential(layer, Applied(lambda self, x: x.float() + 1)), torch.ones(8, 64).double()
    )
    drawn = roofline(analysis, device=SLOW)
    assert drawn.without_peak == {"fp64": 2 * 8 * 64 * 64}
    text = write_document(roofline_report(drawn))
    assert "Without a peak on slow, so not in the least time: fp64 (65.5K FLOPs)." in text
    assert "fp64" not in drawn.peaks and drawn.total().bytes > 0
    faster = roofline(analysis, device=SLOW, dtype="bfloat16")
    assert set(faster.peaks) == {"bf16"} and not faster.without_peak
    with pytest.raises(ValueError, match="slow has no peak for fp64: it has fp32, bf16"):
        roofline(FlopCountAnalysis(layer, torch.ones(8, 64).double()), device=SLOW)


def test_what_is_unknown_is_told():
    @torch.library.custom_op("fvflops_roofline::scan", mutates_args=())
    def scan(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    trace = record_call(lambda x: scan(x).t().reshape(-1), (torch.ones(8, 4),), execution="real")
    drawn = roofline(trace, device=SLOW)
    assert drawn.unsupported == {"fvflops_roofline::scan": 1} and not drawn.unknown_traffic
    assert drawn.by_operator()["scan"] == Load(1, 0, 256, 256 / 1e9)
    text = write_document(roofline_report(drawn))
    assert "Unsupported by exact, so not in FLOPs: fvflops_roofline::scan (1 call)." in text
    whole = record_call(
        lambda x: x.t().reshape(-1), (torch.ones(8, 4),), stops_at=FlopCountAnalysis(F.relu)._cost_model().stops_at
    )
    aggregated = roofline(whole.aggregate(), device=SLOW)
    assert aggregated.unknown_traffic == {"aten::reshape": 1}
    text = write_document(roofline_report(aggregated))
    assert "Unknown memory traffic, so not in bytes: aten::reshape (1 call)." in text


def test_a_region_that_a_table_counts_moves_what_crosses_its_edge(tmp_path):
    table = tmp_path / "lstm.yaml"
    table.write_text("extends: exact\nmodules:\n  torch.nn.Sequential: {macs: 1000, flops: 1}\n")
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    inner = nn.ModuleDict({"inner": model[0]})
    inner.forward = lambda x: inner["inner"](x)
    analysis = FlopCountAnalysis(inner, torch.ones(2, 4), table=load_table(str(table)))
    drawn = roofline(analysis, device=SLOW, table=load_table(str(table)))
    (entry,) = drawn.entries
    assert entry.load[:3] == (1, 2001, 4 * (8 + 6 + 15))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "H10"}, "no device 'H10': did you mean 'H100'?"),
        ({"device": Device("m", matrix={"fp32": 1e12})}, "m has no bandwidth, which a roofline needs"),
        ({"device": SLOW, "dtype": "bloat16"}, "no device has a peak for the dtype 'bloat16'"),
        ({"device": SLOW, "float32_matmul": "fast"}, "float32_matmul must be 'ieee', 'tf32' or None; got 'fast'"),
        ({"device": SLOW, "table": "exactly"}, "exactly"),
    ],
    ids=["device", "bandwidth", "dtype", "float32_matmul", "table"],
)
def test_bad_input_is_told(options, message):
    with pytest.raises((ValueError, LookupError), match=message.replace("?", r"\?")):
        roofline(record_call(F.relu, (torch.ones(2),)), **options)


def test_an_empty_run_takes_no_time():
    drawn = analyse(nn.Identity(), torch.ones(2))
    assert drawn.total() == Load() and drawn.total().bound == "" and drawn.total().intensity == 0
    assert "Least time: 0 ns, 0.0% of it compute-bound." in write_document(roofline_report(drawn))
    assert Load(1, 5, 0, 1.0, 1.0).intensity == math.inf


def test_measured_peaks_are_written_and_read_back(tmp_path):
    measured = measure_device("cpu", dtypes=["fp32", "bf16"], seconds=0.05)
    assert measured.dtypes() == ("fp32", "bf16") and measured.bandwidth > 1e8 and measured.peak("fp32") > 1e8
    assert measured.memory > 2**30 and "thread" in measured.unit
    path = tmp_path / "mine.yaml"
    path.write_text(write_device(measured))
    assert find_device(measured.name, file=str(path)) == measured
    # A name and a source that YAML would take for something else.
    odd = Device('a: "b" #\\', matrix={"bf16": 1e12}, vector={"fp32": 1e9}, bandwidth=1e9, source="- x: {", note="n")
    path.write_text(write_device(odd))
    assert find_device(odd.name, file=str(path)) == odd
    layer = FlopCountAnalysis(nn.Linear(8, 8), torch.ones(8, 8))
    assert roofline(layer, device=str(path)).total() == roofline(layer, device=odd).total()
    assert read_peaks(str(path)) == read_peaks(odd)


def test_on_a_busy_machine_the_peak_is_that_of_large_products(monkeypatch):
    """Threads that wait for each other make a small product take as long as a large one."""

    def best_time(device, run, seconds):
        side = run.args[0].shape[0] if run.func is torch.mm else 1
        return max(0.03, 2 * side**3 / 1e11)

    monkeypatch.setattr("fvflops.devices.device_benchmark._best_time", best_time)
    assert measure_device("cpu", dtypes=["fp32"], seconds=0.5).peak("fp32") > 0.5e11


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"where": "mps"}, "device must be 'cpu' or 'cuda'; got 'mps'"),
        ({"where": "H100"}, "device must be 'cpu' or 'cuda'; got 'H100'"),
        ({"where": "cuda:99"}, "this machine has no device cuda:99: use 'cpu'"),
        ({"where": "cpu", "dtypes": ["fp8"]}, "dtypes must be among fp64, fp32, tf32, fp16, bf16; got 'fp8'"),
        ({"where": "cpu", "seconds": 0}, "seconds must be positive; got 0"),
    ],
    ids=["type", "name", "absent", "dtype", "seconds"],
)
def test_what_cannot_be_measured_is_told(options, message):
    with pytest.raises(ValueError, match=message):
        measure_device(**options)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_measured_peaks_of_a_gpu_are_near_the_published_ones():
    measured = measure_device("cuda", seconds=0.5)
    published = find_device(torch.cuda.get_device_name())
    before = torch.backends.cuda.matmul.allow_tf32
    for dtype in ("bf16", "fp16"):
        assert 0.4 < measured.peak(dtype) / published.peak(dtype) < 1.05
    assert 0.6 < measured.bandwidth / published.bandwidth < 1.05
    assert torch.backends.cuda.matmul.allow_tf32 == before


def run(capsys, *argv):
    code = main(["roofline", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def rows(text):
    lines = [line.split() for line in text.split("\n\n")[1].splitlines()]
    return {words[0]: words[1:] for words in lines[2:]}


def test_the_command_draws_a_model_by_module_operator_and_op(capsys):
    code, out, err = run(capsys, "zoo:resnet50", "--device", "A100", "--depth", "1")
    assert (code, err) == (0, "")
    assert out.startswith("zoo:resnet50 on A100 SXM 80GB: at least 214 µs, memory-bound\n\nmodule ")
    peaks = out.split("\n\n")[-1].splitlines()
    assert peaks[0] == "Peaks of A100 SXM 80GB"
    words = " ".join(out.split())
    assert "Convention: default (1 FLOP per multiply-add): 4.11G FLOPs. A roofline has 2 per multiply-add" in words
    assert [line.split() for line in peaks[3:]] == [
        ["tf32", "156T", "2.04T", "76.5"],
        ["fp32", "19.5T", "2.04T", "9.56"],
    ]
    table = rows(out)
    assert next(iter(table)) == "model" and "layer1" in table and "layer1.0" not in table
    assert table["model"][2:5] == ["100.0%", "memory", "8.2G"] and table["fc"][3] == "memory"
    code, out, _ = run(capsys, "zoo:resnet50", "--device", "H100", "--dtype", "bf16", "--by", "operator")
    assert code == 0 and rows(out)["conv"][0] == "53" and rows(out)["total"][3] == "100.0%"
    by_op = ["zoo:resnet50", "--device", "H100", "--by", "op", "--backward", "--train"]
    code, out, _ = run(capsys, *by_op, "--top", "3", "--format", "markdown")
    assert code == 0 and out.count("| convolution_backward |") == 3
    assert re.search(r"\n\n\d+ more ops\.\n", out)
    ranked = [len(run(capsys, *by_op, *options)[1].split("\n\n")[1].splitlines()) for options in ([], ["--top", "3"])]
    assert ranked == [2 + 20 + 2, 2 + 3 + 2]  # a heading and its rule, and how many ops and which columns are not shown


@pytest.mark.parametrize("by", VIEWS)
@pytest.mark.parametrize("format", ["text", "csv", "json"])
def test_a_report_has_the_loads_of_a_saved_trace(format, by):
    name = "a_module_with_a_name_that_is_much_longer_than_a_line_of_a_terminal_" * 2
    model = nn.Sequential()
    model.add_module(name, nn.Sequential(nn.Linear(100, 50, bias=False)))
    trace = FlopCountAnalysis(model, torch.ones(10, 100), table="exact").trace()
    drawn = roofline(type(trace).from_json(trace.to_json()), device=SLOW)
    text = write_document(roofline_report(drawn, by=by, subject=name), format, width=80)
    # 100,000 FLOPs at 10^9 FLOP/s.
    if format == "csv":
        (row, *_) = csv.DictReader(io.StringIO(text))
        assert (row["flops"], row["bytes"], row["seconds"], row["bound"]) == ("100000", "26000", "0.0001", "compute")
    elif format == "json":
        written = json.loads(text)
        assert written["format"] == "fvflops.roofline" and list(written["tables"]) == [f"{by}s", "peaks"]
        row = written["tables"][f"{by}s"]["rows"][-1]
        assert (row["flops"], row["bytes"], row["seconds"], row["share"]) == (100_000, 26_000, 1e-4, 1.0)
        assert written["tables"]["peaks"]["rows"] == [
            {"dtype": "fp32", "peak": 10**9, "bandwidth": 10**9, "ridge": 1.0}
        ]
    else:
        assert max(map(display_width, text.splitlines())) <= 80
        assert "100 µs" in text and "compute" in text


def test_infinite_intensity_is_null_in_json():
    drawn = analyse(nn.Linear(10, 5, bias=False), torch.ones(10, 10))
    still = drawn.entries[0]._replace(load=Load(1, 5, 0, 1.0, 1.0))
    report = roofline_report(type(drawn)("slow", 1, {"fp32": 1}, "exact", drawn.modules, (still,)))
    assert json.loads(write_document(report, "json"))["tables"]["modules"]["rows"][0]["intensity"] is None
    assert "∞" in write_document(report) and "inf" in write_document(report, "csv")


def test_the_command_measures_and_takes_what_it_measured(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "fvflops.cli.commands.roofline.measure_device", lambda where: measure_device(where, seconds=0.02)
    )
    path = tmp_path / "mine.yaml"
    assert run(capsys, "--measure", "--device", "cpu", "--output", str(path)) == (0, "", "")
    code, out, err = run(capsys, "zoo:lenet5", "--device", str(path))
    assert (code, err) == (0, "") and rows(out)["model"][2] == "100.0%"
    name = out.partition(": at least ")[0].removeprefix("zoo:lenet5 on ")
    assert run(capsys, "zoo:lenet5", "--device", f"{path}:{name}")[1] == out
    code, out, _ = run(capsys, "zoo:lenet5", "--measure", "--device", "cpu")
    assert code == 0 and out.startswith(f"zoo:lenet5 on {name}: at least ")
    path.write_text(path.read_text() + write_device(SLOW).partition("\n")[2])
    code, _, err = run(capsys, "zoo:lenet5", "--device", str(path))
    assert code == 2 and f"write {path}:{name}" in err
