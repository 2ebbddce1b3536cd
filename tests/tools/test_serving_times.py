"""Measured serving runs: how rows are read, and that the tool compares, fits and holds out on a sample."""

import re
import shutil
from collections import Counter
from dataclasses import replace

import pytest

from fvflops.serve.engine_kernels import EngineFigures, load_engines
from tests.support.checkout import DATA
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas
from tests.support.tools import load_tool

pytest.importorskip("transformers")
pytest.importorskip("scipy")
rows = load_tool("serving_runs.rows")
SAMPLE = DATA / "serving_times" / "ttft_tpot.csv"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the sample, and a file that keeps the models."""
    define_torchvision_schemas()
    folder = tmp_path_factory.mktemp("runs")
    shutil.copy(SAMPLE, folder)
    return folder


def run_tool(folder, *arguments):
    tool = load_tool("serving_times.py")
    return tool.main([str(folder), "--jobs", "1", "--models", str(folder / "models.pickle"), *arguments])


def test_rows_are_read_or_left_out_with_a_reason():
    runs = rows.read_runs(SAMPLE)
    assert len(runs) == 29  # one of 30 has prefill and decode on other GPUs
    reasons = Counter(run.unused.partition(":")[0] for run in runs if run.unused)
    assert sorted(reasons) == [
        "its columns do not tell the number of GPUs",
        "its number of clients is not given",
        "of 512 clients only 94 ran",
    ]
    llama = next(run for run in runs if run.engine == "vllm" and run.gpu == "H100 SXM")
    assert (llama.launch.cache, llama.launch.shortest, llama.layout.weights) == ("fp8", 0.8, "fp8")
    assert llama.tokens == (pytest.approx(0.9 * 1024), pytest.approx(0.9 * 1024))
    # Little's law: clients / (time of a request) is the rate of requests.
    assert llama.throughput(1.0, 0.01) == pytest.approx(llama.clients * 921.6 / (1 + 920.6 * 0.01))


def test_a_row_that_contradicts_others_is_left_out(tmp_path):
    text = SAMPLE.read_text().splitlines()
    chosen = ("vllm,,meta-llama", "h100_sxm", "concurrency=4;")
    first = next(line for line in text if all(part in line for part in chosen))
    slow = ",".join([*first.split(",")[:-1], "99.0"])
    path = tmp_path / "runs.csv"
    path.write_text("\n".join([*text, slow]))
    (run,) = [run for run in rows.read_runs(path) if "fewer sequences" in run.unused]
    assert run.tpot == pytest.approx(0.099) and run.line == len(text) + 1


def test_a_row_that_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "runs.csv"
    lines = SAMPLE.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1].replace("h100_sxm", "h900_sxm")]))
    with pytest.raises(ValueError, match=r"runs.csv:2: 'h900_sxm'"):
        rows.read_runs(path)


def test_the_tool_compares_and_holds_out(folder, capsys):
    assert run_tool(folder, "--held-out", "--worst", "2") == 0
    shown = capsys.readouterr().out
    assert re.search(r"^26 runs", shown)
    errors = {
        kind: float(found.group(1))
        for kind in ("", "held-out models", "held-out GPUs")
        if (found := re.search(rf"^all +{kind} +26 +([\d.]+)%", shown, re.MULTILINE))
    }
    assert set(errors) == {"", "held-out models", "held-out GPUs"}
    assert errors[""] < 12 and errors["held-out GPUs"] < 16
    assert shown.count(": measured ") == 2 and "its number of clients is not given" in shown


def test_a_fit_writes_figures_that_are_read(folder, tmp_path, capsys):
    path = tmp_path / "engines.yaml"
    path.write_text("# kept\n")
    assert run_tool(folder, "--fit", str(path), "--every", "4") == 0
    found = load_engines(str(path))
    assert set(found) == set(load_engines()) and path.read_text().startswith("# kept\n")
    assert "fitted to" in found["vllm"].source and found["vllm"] != load_engines()["vllm"]


def test_a_fit_finds_the_figures_that_made_the_times(folder, monkeypatch):
    fitting = load_tool("serving_runs.fitting")
    monkeypatch.setattr(fitting, "_PRIOR", 0.1)
    prediction = load_tool("serving_runs.prediction")
    models = load_tool("serving_runs.served_models")
    runs = [run for run in rows.read_runs(SAMPLE) if run.engine == "vllm" and not run.unused]
    predictor = prediction.Predictor(models.record_models({run.model for run in runs}, folder / "models.pickle"))
    base = load_engines()["vllm"]
    truth = replace(base, kernel=3e-6, rendezvous=1e-5, request=0.05, source="")
    times = [predictor.simulate(run, truth) for run in runs]
    made = [replace(run, ttft=item.ttft, tpot=item.tpot) for run, item in zip(runs, times, strict=True)]
    simulated = [predictor.simulate(run, base) for run in runs]
    batch = fitting.Batch(made, fitting.find_features(predictor, made), base, simulated)
    found = batch.fit("made")
    for run, before, ttft, tpot in zip(made, simulated, *batch.predict(found), strict=True):
        assert tpot == pytest.approx(run.tpot, rel=0.03) and abs(tpot / run.tpot - 1) <= abs(before.tpot / run.tpot - 1)
        assert ttft == pytest.approx(run.ttft, rel=0.15)
    assert isinstance(found, EngineFigures) and found.kernel > base.kernel and found.request > base.request
