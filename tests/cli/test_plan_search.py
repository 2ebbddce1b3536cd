"""`fvflops plan --search`: what a person types, and what comes out."""

from __future__ import annotations

import argparse
import json

import pytest

from fvflops.cli import main
from fvflops.cli.commands import plan
from fvflops.cli.planning.layout_search import CHOSEN
from fvflops.reports.formats import FORMATS
from tests.support.reports.report_formats import check_report

MODEL = ["plan", "zoo:llama_tiny", "--input", "1,16:int64", "--jobs", "1"]
FEW = ["--choices", "tp=1", "--choices", "pp=1", "--choices", "micro-batch=1,2", "--choices", "checkpoint=none"]
SEARCH = [*MODEL, "--search", "--gpus", "2", "--global-batch", "4", "--device", "H100", *FEW]


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The report in each format, as written to a file."""
    folder = tmp_path_factory.mktemp("search")
    texts = {}
    for format in FORMATS:
        assert main([*SEARCH, "--format", format, "--output", str(folder / format)]) == 0
        texts[format] = (folder / format).read_text()
    return texts


@pytest.mark.parametrize("format", FORMATS)
def test_every_format(reports, format):
    report = check_report(format, reports[format], "layout_search")
    if format == "html":
        assert report.count("<circle") > 3 and "Pareto front" in report
    if format == "json":
        statuses = {layout["status"] for layout in report["layouts"]}
        assert statuses == {"fits"} and report["gpus"] == 2
        assert sum(layout["on_pareto_front"] for layout in report["layouts"]) >= 1
    if format == "csv":
        assert [row["rank"] for row in report][:2] == ["1", "2"]
        assert float(report[0]["seconds"]) <= float(report[1]["seconds"])


def test_the_command_of_the_best_layout_has_its_figures(reports, capsys):
    """The report says how the first layout is planned in full."""
    best = json.loads(reports["json"])["layouts"][0]
    assert best["options"] in " ".join(reports["text"].split())
    options = best["options"].split()
    assert main(["plan", "zoo:llama_tiny", "--seq", "16", "--device", "H100", *options, "--format", "json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["seconds"] == best["seconds"] and planned["mfu"] == best["mfu"]


def test_the_options_that_a_search_chooses_are_listed_with_their_defaults():
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    assert {name: parser.get_default(name) for name in CHOSEN} == CHOSEN


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*MODEL, "--gpus", "2", "--mesh", "dp=2"], "--gpus is for a search: add --search"),
        (["plan", "zoo:llama_tiny"], "a plan needs --mesh, such as --mesh fsdp=8, or --search"),
        ([*SEARCH, "--mesh", "dp=2"], "a search chooses --mesh: omit it, or limit what is tried by --choices"),
        ([*SEARCH, "--sequence-parallel"], "a search chooses --sequence-parallel"),
        ([*MODEL, "--search", "--gpus", "2", "--global-batch", "2"], "--search needs --device"),
        ([*SEARCH, "--choices", "cp"], "--choices cp: write each NAME=A,B once"),
        ([*SEARCH, "--choices", "tq=1"], "no choice 'tq': a search chooses tp, pp"),
        ([*SEARCH, "--choices", "dp=3"], "no layout has a global batch of 4 on 2 GPUs"),
    ],
)
def test_mistakes(capsys, arguments, message):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_checkpointing_by_policy(capsys):
    command = ["plan", "zoo:llama_tiny", "--input", "1,16:int64", "--mesh", "dp=1", "--device", "H100"]
    recomputed = {}
    for policy in ("full", "every 2", "selective"):
        assert main([*command, "--checkpoint", policy, "--format", "json"]) == 0
        recomputed[policy] = json.loads(capsys.readouterr().out)["slowest_rank"]["kernels_by_phase"]["recompute"]
    assert recomputed["full"] > recomputed["selective"] and recomputed["full"] > recomputed["every 2"] > 0
