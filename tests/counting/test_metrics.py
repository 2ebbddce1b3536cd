"""A metric is one entry of METRICS: every table, file, page, budget and sort key has it then."""

import csv
import io
import json
import re

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, load_table
from fvflops.cli import main
from fvflops.counting.metrics import METRICS, Metric, MetricCounts, derive

MODEL = """import torch
def build():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)), torch.ones(3, 4)
"""
# Of the calls of linear 3 * 4 * 8 and 3 * 8 * 2 multiply-adds; doubled, so that it is no other metric's number.
FIRST, LAST = 192, 96


@pytest.fixture
def with_metric(tmp_path, monkeypatch):
    """A folder with a model, and a metric "double" in METRICS, twice the multiply-adds."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    double = Metric(
        "Doubles",
        "Dbl",
        "twice the multiply-adds",
        lambda counts: derive(counts["flops"], "double", lambda entry: 2 * entry.macs),
        column=True,
        of="flops",
    )
    monkeypatch.setitem(METRICS, "double", double)


def count(capsys, *arguments):
    assert main(["count", "net.py:build", *arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.usefixtures("with_metric")
def test_a_metric_of_one_entry_is_in_every_report(capsys):
    assert re.search(r"  doubles .*\n.*\nmodel .* 288 .*\n(.*\n)*  0 .* 192 .*\n", count(capsys))
    fvcore = count(capsys, "--format", "fvcore")
    assert re.search(r"#double.*\n.*\n.* 0.288K *\|\n(.*\n)*\|  0 .* 0.192K *\|\n", fvcore)
    rows = list(csv.DictReader(io.StringIO(count(capsys, "--format", "csv"))))
    assert [row["double"] for row in rows] == [str(FIRST + LAST), str(FIRST), "0", str(LAST)]
    assert [row["module"] for row in csv.DictReader(io.StringIO(count(capsys, "--format", "csv", "--sort", "double")))][
        1
    ] == "0"
    assert json.loads(count(capsys, "--format", "json"))["columns"]["double"][""] == FIRST + LAST
    assert '"Doubles"' in count(capsys, "--format", "html")
    assert "Dbl (M)" in count(capsys, "--format", "paper")


@pytest.mark.usefixtures("with_metric")
def test_a_metric_of_one_entry_has_a_budget_and_a_scale(tmp_path, capsys):
    (tmp_path / "budget.yaml").write_text(f"models: {{net: {{double: {FIRST + LAST - 1}}}}}\n")
    budget = ["check", "net.py:build", "--name", "net", "--budget", "budget.yaml"]
    assert main(budget) == 1
    assert "\nDoubles  max       287     288" in capsys.readouterr().out
    (tmp_path / "budget.yaml").write_text(f"models: {{net: {{double: {FIRST + LAST}}}}}\n")
    assert main(budget) == 0
    capsys.readouterr()
    vary = ["--input", "batch,4", "--vary", "batch=1..9", "--metric", "double"]
    assert main(["scale", "net.py:build", *vary]) == 0
    assert "96·B" in capsys.readouterr().out


def test_every_metric_is_counted_once_and_as_by_hand():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    analysis = FlopCountAnalysis(model, torch.ones(3, 4))
    counts = MetricCounts(analysis.trace(), load_table("default"), analysis.counts())
    assert counts["flops"] is analysis.counts()
    assert {name: counts[name].total() for name in counts.names()} == {
        "flops": 144,
        "macs": 144,
        "activations": 30,
        "parameters": 58,
        "bytes": 688,
    }
    assert counts["bytes"] is counts["bytes"]


def test_without_a_table_only_what_needs_none_is_counted():
    counts = MetricCounts(FlopCountAnalysis(nn.Linear(3, 2), torch.ones(4, 3)).trace(), None)
    assert {"parameters", "bytes"} <= set(counts.names())
    assert not {"flops", "macs", "activations"} & set(counts.names())
    with pytest.raises(ValueError, match="flops needs a formula table"):
        counts["macs"]
