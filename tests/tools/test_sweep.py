"""The sweep over a library's models, without a library: its CSV, the ways it tries, its summary and its exit code."""

import pytest
import torch
from torch import nn

from fvflops import load_table
from tests.support.models.unseen_work import KINDS, Net
from tests.support.tools import load_tool

Case = load_tool("sweeping.case").Case
pools = load_tool("sweeping.pool")
results = load_tool("sweeping.result")
workers = load_tool("sweeping.worker")
quick_weights = load_tool("sweeping.weights").quick_weights
Pool, plan_attempts = pools.Pool, pools.plan_attempts
COLUMNS, Result = results.COLUMNS, results.Result
append_result, read_results, write_results = results.append_result, results.read_results, results.write_results
Answer, Task, answer, count_case = workers.Answer, workers.Task, workers.answer, workers.count_case


@pytest.fixture
def tool():
    return load_tool("sweep.py")


class Scans:
    """A library of one model, which works with NumPy."""

    ways = ("meta", "random", "small")

    def build(self, name, way):
        return Case(Net(KINDS["from_numpy"].compute), lambda: (torch.ones(4, 8),), f"{name}, {way}")


def count(execution):
    return answer(Scans(), load_table("default"), Task("scan", "small", heavy=False), execution).result


@pytest.mark.parametrize("execution", ["auto", "real"])
def test_a_row_names_unseen_work_with_its_module_and_line(execution):
    result = count(execution)
    assert result.error == ""
    assert result.unknown_ops == "unseen::from_numpy 1"
    assert result.unseen.startswith("unseen::from_numpy 1 in 'scan' at tests/support/models/unseen_work.py:")
    assert execution == "auto" or result.execution == "real"


def test_a_row_of_a_seen_model_names_none():
    result = count_case("linear", Case(nn.Linear(8, 8), lambda: (torch.ones(4, 8),), "Linear"), load_table("default"))
    assert (result.flops, result.unseen) == (256, "")


def test_the_csv_gives_back_what_was_written(tmp_path):
    result = count("real")
    write_results(tmp_path / "rows.csv", [])
    append_result(tmp_path / "rows.csv", result)
    assert read_results(tmp_path / "rows.csv") == {"scan": result}


def test_a_csv_of_an_earlier_sweep_or_of_another_execution_is_refused(tool, tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(",".join(name for name in COLUMNS if name != "unseen") + "\n")
    with pytest.raises(tool.BadInput, match="is of an earlier sweep, without the column 'unseen': name another file"):
        tool.open_results(path, (), failed=False)
    path.write_text("a,b\n")
    with pytest.raises(tool.BadInput, match="starts with 'a,b', not with the columns of a sweep"):
        tool.open_results(path, (), failed=False)
    write_results(path, [Result("a", flops=1, execution="shapes")])
    assert list(tool.open_results(path, (), failed=False)) == ["a"]
    with pytest.raises(tool.BadInput, match="is of a sweep by shapes: name another file"):
        tool.open_results(path, (), failed=False, real=True)


def test_unseen_work_is_an_error_unless_it_is_expected(tool, monkeypatch):
    plain = Result("plain", flops=1, execution="real")
    scan = Result("scan", flops=1, execution="real", unseen="unseen::f 1 in 'scan' at net.py:42")
    assert tool.find_unexpected("timm", [plain, scan]) == [scan]
    text = tool.summarise("timm", "1.0", [plain, scan], 1.0, 2)
    assert "unseen work: in 1 models, 1 of them unexpected" in text
    assert "  unseen in scan: unseen::f 1 in 'scan' at net.py:42 (unexpected)" in text
    monkeypatch.setitem(tool.EXPECTED_UNSEEN["timm"], "scan", "it sorts in NumPy")
    assert tool.find_unexpected("timm", [plain, scan]) == []
    assert "(expected: it sorts in NumPy)" in tool.summarise("timm", "1.0", [plain, scan], 1.0, 2)


@pytest.mark.parametrize(
    ("ways", "attempts"),
    [
        (("meta", "random", "small"), [("meta", False), ("random", True), ("small", True)]),
        (("quick", "random"), [("quick", False), ("quick", True), ("random", True)]),
    ],
)
def test_weights_are_tried_with_little_memory_first(ways, attempts):
    assert [(attempt.way, attempt.heavy) for attempt in plan_attempts(ways)] == attempts


def test_quick_weights_are_random_and_leave_torch_as_it_was():
    before = torch.Tensor.normal_
    with quick_weights():
        weight = nn.init.trunc_normal_(torch.empty(300, 100))
    assert torch.Tensor.normal_ is before and "erfinv_" not in vars(torch.Tensor)
    assert weight.isfinite().all() and len(weight.unique(dim=0)) == 300


@pytest.mark.parametrize(("cause", "again"), [("can't allocate memory", True), ("ValueError: no", False)])
def test_the_same_way_is_tried_again_only_for_want_of_memory(cause, again):
    pool = Pool("timm", ("quick",), "default", execution="real", jobs=1, timeout=1, memory=1 << 30)
    results = pool._settle(
        Task("a", "quick", heavy=False), Answer(Result("a", error=cause), 8, final=False, exhausted=True)
    )
    assert [result.error for result in results] == ([] if again else [f"quick: {cause}"])
