"""`fvflops annotate`: files that it reads and writes, outputs and errors."""

import csv
import gzip
import io
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from fvflops.cli import main
from tests.support.checkout import ROOT

CUDA_TRACE = ROOT / "tests" / "data" / "cuda_chrome_trace.json"
FACTORY = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(64, 128)), torch.ones(32, 64)
"""
STEP = ("--train", "--backward", "--optimizer", "sgd")
MACS = 32 * 64 * 128


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(FACTORY)
    (tmp_path / "trace.json").write_bytes(CUDA_TRACE.read_bytes())


def run(capsys, *argv):
    code = main(["annotate", *argv])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def products(path):
    data = Path(path).read_bytes()
    events = json.loads(gzip.decompress(data) if path.endswith(".gz") else data)["traceEvents"]
    return {event["name"]: event["args"] for event in events if event.get("args", {}).get("MACs")}


def test_a_trace_is_written_beside_with_modules_and_flops(capsys):
    code, out, err = run(capsys, "trace.json", "--model", "nets.py:build", *STEP)
    assert (code, err) == (0, "")
    args = products("trace.annotated.json")
    assert args["ampere_sgemm_64x32_sliced1x4_nt"]["MACs"] == MACS
    assert args["aten::addmm"]["module"] == args["aten::mm"]["module"] == "0"
    assert [args[name]["phase"] for name in ("aten::addmm", "aten::mm")] == ["forward", "backward"]
    assert "trace.annotated.json" in out and "100.0% of the model's FLOPs have an event" in out
    assert {line.split()[0] for line in out.splitlines() if line.startswith("aten::")} == {"aten::mm", "aten::addmm"}


def test_a_saved_trace_stands_for_the_model(capsys):
    assert run(capsys, "trace.json", "--model", "nets.py:build", *STEP, "--save-trace", "step.json.gz")[0] == 0
    expected = products("trace.annotated.json")
    code, _, err = run(capsys, "trace.json", "--model", "step.json.gz", "--output", "again.json")
    assert (code, err) == (0, "") and products("again.json") == expected
    code, _, err = run(capsys, "trace.json", "--model", "step.json.gz", *STEP, "--output", "again.json")
    assert code == 2 and "step.json.gz is a saved Trace and contains its inputs: omit --train" in err
    for option, value in (("--save-trace", "step.json"), ("--loss", "nets.py:loss")):
        code, _, err = run(capsys, "trace.json", option, value)
        assert code == 2 and f"{option} describes the model's run: add --model" in err


def test_without_a_model_the_shapes_are_enough(capsys):
    Path("new").mkdir()
    code, out, err = run(capsys, "trace.json", "--output", "new/out.json.gz", "--format", "csv")
    assert (code, err) == (0, "")
    assert products("new/out.json.gz")["aten::mm"]["FLOPs"] == 2 * MACS
    rows = {row["event"]: row for row in csv.DictReader(io.StringIO(out))}
    assert int(rows["aten::mm"]["macs"]) == MACS and int(rows["aten::linear"]["flops"]) == 2 * MACS


def test_several_traces_go_to_a_folder(capsys):
    Path("rank1.json").write_bytes(CUDA_TRACE.read_bytes())
    code, out, err = run(capsys, "trace.json", "rank1.json", "--folder", "out", "--format", "json")
    assert (code, err) == (0, "")
    assert sorted(path.name for path in Path("out").iterdir()) == ["rank1.json", "trace.json"]
    tables = json.loads(out)["tables"]
    assert [row["trace"] for row in tables["traces"]["rows"]] == ["out/trace.json", "out/rank1.json"]
    (product,) = [row for row in tables["events"]["rows"] if row["event"] == "aten::mm"]
    assert (product["calls"], product["macs"]) == (2, 2 * MACS)


def test_a_cpu_trace_with_gradient_accumulation(capsys):
    model, x = nn.Sequential(nn.Linear(64, 128)), torch.ones(32, 64)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(2):
            model(x).sum().backward()
    profiler.export_chrome_trace("cpu.json")
    arguments = ("cpu.json", "--model", "nets.py:build", "--train", "--backward", "--micro-batches", "2")
    code, out, err = run(capsys, *arguments, "--format", "json")
    assert (code, err) == (0, "")
    (row,) = json.loads(out)["tables"]["traces"]["rows"]
    assert row["macs"] == 2 * 2 * MACS and row["share"] > 0.999 and row["rank"] is None
