"""`fvflops serve`: command lines and their outputs."""

import json
import shlex

import pytest

from fvflops.cli import main
from fvflops.reports.formats import FORMATS
from tests.support.reports.report_formats import check_report, write_as

SERVE = ["serve", "zoo:llama_tiny", "--device", "H100", "--input-len", "64", "--output-len", "16"]
LOADS = {"serve": ["--concurrency", "2"], "serving_search": ["--search", "--gpus", "2", "--weights", "bf16"]}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", LOADS)
def test_every_format(kind, format):
    report = check_report(format, write_as(format, *SERVE, *LOADS[kind]), kind)
    if format == "json" and kind == "serve":
        assert report["requests"]["ttft"]["p99"] >= report["requests"]["ttft"]["p50"] > 0
        assert report["weights"] == "bf16" and report["memory"]["tokens"] > 1000
    if format == "json" and kind == "serving_search":
        assert report["gpus"] == 2 and report["best"][0]["per_gpu"] >= report["best"][-1]["per_gpu"]
    if format == "html" and kind == "serving_search":
        assert report.count("<circle") > 3


def test_the_first_layout_of_a_search_can_be_estimated(capsys):
    """With the load and the engine of the search."""
    load = ["--hit-rate", "0.5", "--engine=sglang", "--arg", "rope_theta=500000"]
    assert main([*SERVE, *LOADS["serving_search"], *load, "--ttft", "1s", "--format", "text"]) == 0
    text = capsys.readouterr().out.replace(" \\\n", "")
    command = shlex.split(next(line for line in text.splitlines() if "fvflops serve" in line))
    assert set(command) >= {*SERVE, *load} and not {"--search", "--gpus", "--ttft"} & set(command)
    assert main(command[1:]) == 0
    assert "To start the engine so" in capsys.readouterr().out


def test_drafted_tokens_that_are_accepted_save_time(capsys):
    times = []
    for options in ([], ["--draft-tokens", "3", "--acceptance", "1"]):
        assert main([*SERVE, "--concurrency", "1", *options, "--format", "json"]) == 0
        times.append(json.loads(capsys.readouterr().out)["requests"]["tpot"]["mean"])
    assert times[1] < 0.9 * times[0]


def test_requests_of_a_file(tmp_path, capsys):
    file = tmp_path / "requests.csv"
    file.write_text("arrival,input_tokens,output_tokens\n0,40,8\n0.5,20,4\n")
    assert main([*SERVE, "--requests", str(file), "--format", "json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["requests"]["ttft"]["mean"] > 0 and report["requests"]["preemptions"] == 0
