"""`--save-trace`, and commands whose MODEL is a saved Trace: their reports are the model's."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from fvflops import FlopCountAnalysis, Trace
from fvflops.analysis.trace_file import load_trace
from fvflops.cli import main
from fvflops.formulas import shipped_tables
from fvflops.trace import TraceError
from fvflops.zoo import build

MODEL = "zoo:lenet5"


def report(capsys, *arguments):
    code = main([*arguments])
    output = capsys.readouterr()
    assert code in (0, 1), output.err
    return output.out


@pytest.fixture(params=["trace.json", "trace.json.gz"])
def saved(tmp_path, request, capsys):
    path = str(tmp_path / request.param)
    report(capsys, "count", MODEL, "--save-trace", path)
    return path


def test_a_saved_trace_is_the_models(saved):
    data = Path(saved).read_bytes()
    assert data.startswith(b"\x1f\x8b") == saved.endswith(".gz")
    text = (gzip.decompress(data) if saved.endswith(".gz") else data).decode()
    assert Trace.from_json(text) == load_trace(saved)
    assert FlopCountAnalysis.from_trace(load_trace(saved)).total() == 416_520


@pytest.mark.parametrize("by", ["module", "operator", "both", "op", "call", "line"])
@pytest.mark.parametrize("format", ["text", "csv"])
def test_count_reports_a_trace_as_the_model(saved, by, format, capsys):
    options = ["--by", by, "--format", format]
    assert report(capsys, "count", saved, *options) == report(capsys, "count", MODEL, *options)


@pytest.mark.parametrize("format", ["json", "html", "latex", "model-explorer", "trace"])
def test_count_writes_the_files_of_a_trace_as_of_the_model(saved, format, tmp_path, capsys):
    for name, path in ((saved, "a"), (MODEL, "b")):
        report(capsys, "count", name, "--format", format, "--output", str(tmp_path / path))
    # A page's title is the model as it was named.
    assert (tmp_path / "a").read_text().replace(str(saved), MODEL) == (tmp_path / "b").read_text()


def test_other_commands_report_a_trace_as_the_model(saved, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved = Path(saved).name  # about as long as MODEL: headings shorten long names
    budget = tmp_path / "budget.yaml"
    budget.write_text("models:\n  lenet: {flops: 400K, parameters: 61706, activations: 6518, unknown: 0}\n")
    for command, *options in (
        ("compare", "--tables", "default,exact,fvcore"),
        ("roofline", "--device", "H100"),
        ("roofline", "--device", "H100", "--by", "op", "--format", "csv"),
        ("check", "--budget", str(budget), "--name", "lenet"),
    ):
        texts = [report(capsys, command, name, *options).replace(name, "MODEL") for name in (saved, MODEL)]
        words = [text.split() for text in texts]  # lines are wrapped by the length of the name
        assert words[0] == words[1] and len(texts[0]) > 100
    for pair in ((saved, MODEL), (MODEL, saved), (saved, saved)):
        assert "FLOPs unchanged" in report(capsys, "diff", *pair)


def test_a_trace_of_a_training_step_and_one_of_a_profile_are_counted(tmp_path, capsys):
    step, profile = str(tmp_path / "step.json"), str(tmp_path / "profile.json")
    report(capsys, "roofline", MODEL, "--device", "H100", "--backward", "--save-trace", step)
    assert "backward" in report(capsys, "count", step, "--table", "exact")
    report(capsys, "profile", MODEL, "--repeat", "1", "--save-trace", profile)
    measured = load_trace(profile)
    assert measured.events is not None and any(event.duration_ns for event in measured.events)
    assert "900K" in report(capsys, "count", profile, "--table", "exact")


def test_a_trace_is_counted_by_the_conventions_that_it_can_be_counted_by(saved, capsys):
    model, inputs = build("lenet5").eval(), load_trace(saved).info.inputs
    assert inputs == "float32[1, 1, 28, 28]"
    text = report(capsys, "compare", saved, "--format", "json")
    totals = {name: item["total"] for name, item in json.loads(text)["conventions"].items()}
    for table in shipped_tables():
        expected = FlopCountAnalysis(model, torch.randn(1, 1, 28, 28), table=table, warn=False).total()
        if table in totals:
            assert totals[table] == expected, table
        else:
            with pytest.raises(TraceError, match="record the model again"):
                FlopCountAnalysis.from_trace(load_trace(saved), table=table, warn=False).total()
    assert {"default", "exact", "fvcore"} <= set(totals) and "torch" not in totals


@pytest.mark.parametrize("report", [("plan", "--mesh", "dp=2"), ("memory", "--no-savings"), ("count",)])
def test_the_json_of_a_report_is_refused_with_what_can_be_compared(tmp_path, capsys, report):
    command, *options = report
    path = str(tmp_path / "report.json")
    assert main([command, "zoo:llama_tiny", *options, "--format", "json", "--output", path]) == 0
    for argv in (["diff", path, path], ["diff", MODEL, path], ["count", path]):
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"fvflops: error: {path}: a report (fvflops.") and error.count("\n") == 1
        assert "give the model, or its trace by `fvflops count --save-trace`; plans of several layouts are" in error


def test_a_compressed_trace_is_not_decompressed_beyond_the_limit(tmp_path):
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b" " * 10_000_000))
    with pytest.raises(TraceError, match="more than 1,000,000 characters"):
        load_trace(path, limit=1_000_000)
