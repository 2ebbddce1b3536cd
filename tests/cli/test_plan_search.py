"""`fvflops plan --search`: command lines and their outputs."""

import argparse
import json
import shlex

import pytest

from fvflops.cli import main
from fvflops.cli.commands import plan
from fvflops.cli.planning.search_options import CHOSEN, KEPT, describe_command
from fvflops.plan.search.candidates import Candidate
from fvflops.reports.formats import FORMATS
from tests.support.reports.report_formats import check_report, write_as

MODEL = ["plan", "zoo:llama_tiny", "--input", "1,16:int64", "--jobs", "1"]
FEW = ["--choices", "tp=1", "--choices", "pp=1", "--choices", "micro-batch=1,2", "--choices", "checkpoint=none"]
SEARCH = [*MODEL, "--search", "--gpus", "2", "--global-batch", "4", "--device", "H100", *FEW]


@pytest.mark.parametrize("format", FORMATS)
def test_every_format(format):
    report = check_report(format, write_as(format, *SEARCH), "layout_search")
    if format == "html":
        assert report.count("<circle") > 3 and "Pareto front" in report
    if format == "json":
        statuses = {layout["status"] for layout in report["layouts"]}
        assert statuses == {"fits"} and report["gpus"] == 2
        assert sum(layout["on_pareto_front"] for layout in report["layouts"]) >= 1
    if format == "csv":
        assert [row["rank"] for row in report][:2] == ["1", "2"]
        assert float(report[0]["seconds"]) <= float(report[1]["seconds"])


def test_the_command_of_the_best_layout_has_its_figures(capsys):
    """The report says how the first layout is planned in full."""
    reports = {format: write_as(format, *SEARCH) for format in FORMATS}
    best = json.loads(reports["json"])["layouts"][0]
    after = reports["text"].partition("The first in full:\n")[2].partition("\n\n")[0]
    command = shlex.split(after.replace("\\\n", ""))
    assert f"<code>{shlex.join(command)}</code>" in reports["html"]
    assert f"```sh\n{shlex.join(command)}\n```" in reports["markdown"]
    assert f"{{verbatim}}\n{shlex.join(command)}\n" in reports["latex"]
    assert main([*command[1:], "--format", "json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["seconds"] == best["seconds"] and planned["mfu"] == best["mfu"]


def test_a_larger_microbatch_is_suggested_where_the_largest_that_was_tried_is_best(capsys):
    assert "with --choices micro-batch" not in write_as(
        "text", *SEARCH
    )  # one microbatch of the largest size is all there is
    assert main([*SEARCH[:-4], "--choices", "micro-batch=1", "--choices", "checkpoint=none"]) == 0
    assert "with --choices micro-batch=1,2." in " ".join(capsys.readouterr().out.split())


def test_every_option_is_chosen_by_a_search_or_kept_in_the_command_of_one_layout():
    parser = argparse.ArgumentParser()
    plan.add_arguments(parser)
    of_reports = {"model", "table", "format", "formats", "sort", "top", "output", "digits"}
    of_searches = {"search", "gpus", "global_batch", "choices", "best", "jobs"}
    options = vars(parser.parse_args(["MODEL"])).keys()
    assert sorted(options) == sorted([*KEPT, *CHOSEN, *of_reports, *of_searches])
    typed = ["a b.py:f", "--image-size", "8x9", "--arg", "n=1", "--arg", "m=2", "--no-reduce-each-microbatch"]
    arguments = parser.parse_args([*typed, "--device", "H100 SXM", "--master-weights"])
    assert "--no-reduce" not in describe_command(arguments, Candidate({"dp": 2}, 4, 1))  # is of FSDP2
    assert describe_command(arguments, Candidate({"fsdp": 2}, 4, 1)) == (
        "fvflops plan 'a b.py:f' --image-size 8x9 --arg n=1 --arg m=2 --no-reduce-each-microbatch --master-weights "
        "--device 'H100 SXM' --mesh fsdp=2 --batch 4 --microbatches 1"
    )
    arguments = parser.parse_args(["zoo:gpt2", "--seq", "64", "--device", "H100"])
    assert "--seq 32 " in describe_command(arguments, Candidate({"cp": 2}, 4, 1))


NET = """
import torch
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

def build():
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 64))
    return model, torch.ones(1, 64)

def split(model, mesh):
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
"""


def test_a_model_of_the_users_own(tmp_path, capsys):
    """`--shard` applies to the layouts with tp alone, and the report says why there is no pipeline."""
    (tmp_path / "net.py").write_text(NET)
    net = str(tmp_path / "net.py")
    few = ["--choices", "tp=1,2", "--choices", "micro-batch=2", "--choices", "checkpoint=none"]
    options = ["--search", "--gpus", "2", "--global-batch", "4", "--device", "H100", "--shard", f"{net}:split", *few]
    assert main(["plan", f"{net}:build", *options, "--jobs", "1"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "5 fit" in text and "cannot be planned" not in text
    assert "No pipeline was tried: no pipeline stages are known for torch.nn.modules.container.Sequential" in text
    assert main(["plan", f"{net}:build", *options, "--jobs", "1", "--choices", "pp=2"]) == 2
    assert "pp=2: no pipeline stages are known" in capsys.readouterr().err
    options.remove("--shard"), options.remove(f"{net}:split"), options.remove("tp=1,2")
    options.remove("--choices")
    assert main(["plan", f"{net}:build", *options, "--jobs", "1"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "No tensor parallelism was tried: no tensor-parallel plan is known for " in text and "failed" not in text
    (tmp_path / "fixed.py").write_text(
        "def loss(y):\n    if len(y) != 2: raise ValueError('labels')\n    return y.sum()\n"
    )
    options[options.index("micro-batch=2")] = "micro-batch=1,2"
    assert main(["plan", f"{net}:build", *options, "--jobs", "1", "--loss", str(tmp_path / "fixed.py:loss")]) == 0
    text = capsys.readouterr().out
    assert text.index("These layouts failed, and one of them may be faster:") < text.index("The fastest layouts")
    assert "layouts: labels" in text or "layout: labels" in text


def test_checkpointing_by_policy(capsys):
    command = ["plan", "zoo:llama_tiny", "--input", "1,16:int64", "--mesh", "dp=1", "--device", "H100"]
    recomputed = {}
    for policy in ("full", "every 2", "selective"):
        assert main([*command, "--checkpoint", policy, "--format", "json"]) == 0
        recomputed[policy] = json.loads(capsys.readouterr().out)["slowest_rank"]["kernels_by_phase"]["recompute"]
    assert recomputed["full"] > recomputed["selective"] and recomputed["full"] > recomputed["every 2"] > 0
