"""The right finding first in synthetic GPU traces with a planted defect, and none in those without."""

import json
from functools import cache

import pytest

from fvflops.cli import main
from fvflops.explain.explained_trace import explain_trace
from fvflops.explain.findings.find_losses import LEAST, find_losses
from fvflops.explain.findings.planned_step import compare_step, expect_step
from tests.support.planted.gpu_defects import AGAINST_PLAN, CLEAN, CLEAN_WITH_PLAN, DEFECTS, plant
from tests.support.planted.planned_work import plan, work_of
from tests.support.planted.synthetic_trace import lay_out, write


def _explain(work, case, folder):
    gpu = "A100" if case == "a100" else "H100"
    return explain_trace(write(lay_out(work, world=8, gpu=gpu), folder / "trace.json"))


@pytest.fixture(scope="module")
def explain_clean(tmp_path_factory):
    return cache(lambda case: _explain(work_of(case), case, tmp_path_factory.mktemp("clean")))


@cache
def _planned(case):
    return expect_step(plan(case)[0], rank=0)


def _mark(defects):
    """Mark as long all but the first defect of a finding in a model."""
    firsts = {(defect.code, defect.case): defect for defect in reversed(defects)}.values()
    return [
        pytest.param(defect, id=defect.name, marks=() if defect in firsts else pytest.mark.long) for defect in defects
    ]


@pytest.mark.parametrize("defect", _mark(DEFECTS))
def test_planted_defect_is_found_first(defect, tmp_path):
    found = find_losses(_explain(plant(defect), defect.case, tmp_path))
    assert [finding.code for finding in found][:1] == [defect.code]
    assert found[0].seconds > 0 and found[0].evidence and any(letter.isdigit() for letter in found[0].text)


@pytest.mark.parametrize("case", CLEAN)
def test_clean_step_has_no_findings(case, explain_clean):
    assert find_losses(explain_clean(case)) == []


@pytest.mark.parametrize("defect", AGAINST_PLAN, ids=lambda defect: defect.name)
def test_planted_defect_is_found_against_the_plan(defect, tmp_path):
    found = find_losses(_explain(plant(defect), defect.case, tmp_path), _planned(defect.case))
    assert [finding.code for finding in found][:1] == [defect.code]


@pytest.mark.parametrize("case", CLEAN_WITH_PLAN)
def test_clean_step_is_as_planned(case, explain_clean):
    trace, planned = explain_clean(case), _planned(case)
    assert find_losses(trace, planned) == []
    # The rows add up to the measured step, and to the planned one.
    rows = compare_step(trace, planned)
    total = trace.total_ns() / len(trace.steps()) / 1e9
    assert sum(row.measured for row in rows) == pytest.approx(total, rel=1e-6)
    assert sum(row.expected for row in rows) == pytest.approx(planned.seconds, rel=LEAST)


def test_command_compares_with_a_plan(tmp_path, capsys):
    path = write(lay_out(work_of("one GPU")), tmp_path / "trace.json")
    options = ["--model", "zoo:gpt2", "--batch", "2", "--seq", "1024", "--dtype", "bf16"]
    assert main(["explain", path, *options, "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {row["part"] for row in data["compared"]} >= {"matmul", "attention", "optimizer", "idle"}
    total = sum(row["measured"] for row in data["compared"])
    assert total == pytest.approx(explain_trace(path).total_ns() / 2e9, rel=1e-6)
    # The trace has a batch of 16, the plan one of 2 and more layers.
    assert data["findings"][0]["code"] == "more_work"
    assert main(["explain", path, *options, "--output", str(tmp_path / "page.html")]) == 0
    assert "The expected step and the measured one" in (tmp_path / "page.html").read_text()
    assert "the trace has no work" not in (tmp_path / "page.html").read_text()
    forward = [item for item in work_of("one GPU") if item.phase == "forward"]
    assert main(["explain", write(lay_out(forward), tmp_path / "forward.json"), *options]) == 0
    assert "no work of the phases backward, optimizer" in capsys.readouterr().out
    assert main(["explain", path, "--mesh", "dp=2"]) == 2
    assert "add --model" in capsys.readouterr().err
