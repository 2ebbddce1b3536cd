"""The report of predicted memory: what adds up, which rows stand for several, and its files."""

from functools import partial

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, TrainingStepAnalysis, predict_memory, record, record_call
from fvflops.plan.memory.memory_report import MemorySaving, MemorySavings
from fvflops.reports.formats import FORMATS, write_document
from tests.support.models.parts import Applied
from tests.support.reports.hostile_names import NAMES
from tests.support.reports.report_formats import check_report

ROWS, WIDTH = 64, 16


def layers(count=4):
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(count))
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 2))


def predict(model=None, **options):
    step = TrainingStepAnalysis(
        layers() if model is None else model, torch.ones(ROWS, WIDTH), loss=lambda y: y.square().sum(), **options
    )
    return predict_memory(step)


def table_of(report, name):
    return next(table for table in report.tables() if table.name == name)


def rows_of(report, name):
    return [dict(row) for row in table_of(report, name).records()]


def test_layers_that_are_equal_at_the_peak_are_one_row_with_their_sum():
    timeline = predict(optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9))
    each = {row["module"]: row for row in rows_of(timeline.report(collapsed=False, depth=None), "modules")}
    collapsed = {row["module"]: row for row in rows_of(timeline.report(), "modules")}
    assert {name for name in collapsed if "×" in name and "." not in name} != set()
    for name, row in collapsed.items():
        if name.count("×") == 1 and "." not in name:
            first, last = map(int, name.partition(" ")[0].split("–"))
            members = [each[str(number)] for number in range(first, last + 1)]
            assert int(name.rpartition(" ")[2]) == len(members)
            counts = [key for key in row if key not in ("module", "share")]
            assert all(row[key] == sum(member[key] for member in members) for key in counts)
    top_level = {name: row["bytes"] for name, row in collapsed.items() if name and "." not in name}
    own = timeline.peak - sum(row["bytes"] for name, row in each.items() if name and "." not in name)
    assert collapsed[""]["bytes"] == timeline.peak == sum(top_level.values())
    assert top_level["(itself)"] == own and "(itself)" not in each


@pytest.mark.parametrize("options", [{}, {"optimizer": torch.optim.AdamW}, {"checkpoint": ["body.0"]}])
def test_rows_of_modules_add_up_to_that_of_the_model(options):
    timeline = predict(
        Applied(lambda self, x: (self.head(self.body(x).sin())).exp(), body=layers(), head=nn.Linear(2, WIDTH)),
        **options,
    )
    report = timeline.report()
    rows = {row["module"]: row for row in rows_of(report, "modules")}
    for key in ("bytes", *(kind.replace(" ", "_") for kind, nbytes in timeline.at_peak().by_kind.items() if nbytes)):
        for parent in ("", "body"):
            children = [row[key] for name, row in rows.items() if name and name.rpartition(".")[0] == parent]
            assert 0 <= rows[parent][key] - sum(children) <= 0.01 * timeline.peak, (key, parent)
    assert rows["(itself)"]["bytes"] > 0 and "(itself) of the model" in table_of(report, "modules").notes[-1]


def test_kinds_and_phases_are_those_of_the_timeline():
    timeline = predict(optimizer=torch.optim.AdamW, checkpoint=["0", "1"])
    report = timeline.report()
    kinds = table_of(report, "kinds")
    assert sum(row[1] for row in kinds.rows) == timeline.peak == kinds.total[1]
    assert {row[0]: row[3] for row in kinds.rows} == {kind: max(timeline.curve(kind)) for kind, *_ in kinds.rows}
    phases = rows_of(report, "phases")
    assert [row["phase"] for row in phases] == ["forward", "recompute", "backward", "optimizer"]
    assert {row["phase"]: row["bytes"] for row in phases} == timeline.by_phase()
    top = max(phases, key=lambda row: row["bytes"])
    assert (top["op"], top["module"], top["phase"]) == timeline.at_peak()[1:4]


def test_the_chart_has_the_peak_and_the_phases():
    timeline = predict(optimizer=torch.optim.AdamW, checkpoint=["0", "1"], micro_batches=2)
    chart = timeline.report().parts[3]
    assert max(chart.totals()) == timeline.peak
    assert [name for name, _ in chart.sections] == ["forward", "backward", "forward", "backward", "optimizer"]


def test_files_and_texts(tmp_path):
    timeline = predict()
    assert str(timeline) == write_document(timeline.report(), width=80)
    page = timeline.to_html(tmp_path / "memory.html")
    assert (tmp_path / "memory.html").read_text(encoding="utf-8") == page and page.count("<svg ") == 2
    timeline.to_picture(tmp_path / "memory.svg")
    assert (tmp_path / "memory.svg").read_text(encoding="utf-8").startswith("<svg ")
    assert timeline.to_markdown() == timeline._repr_markdown_() == write_document(timeline.report(), "markdown")
    tables = check_report("json", timeline.to_json() + "\n", "memory")["tables"]
    assert tables["peak"]["rows"][0]["bytes"] == timeline.peak
    with pytest.raises(OSError):
        timeline.to_html(tmp_path)


def test_other_runs_than_steps():
    forward = predict_memory(FlopCountAnalysis(layers(), torch.ones(ROWS, WIDTH))).report()
    assert forward.parts[2].startswith("Predicted for a forward pass on cpu: the peak of ")
    function = predict_memory(record_call(torch.relu, (torch.ones(4),)))
    assert "peak memory 32 B" in str(function) and "at relu of the model" in str(function)
    nothing = predict_memory(record_call(lambda x: x, (torch.ones(4),)))
    assert "a run without ops" in str(nothing) and "before it begins" in str(nothing)
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(ROWS, WIDTH)).sum().backward()
    with record(model) as run:
        optimizer.step()
    assert "an optimizer step" in str(predict_memory(run))


@pytest.mark.parametrize("format", list(FORMATS))
def test_hostile_names(format):
    model = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in NAMES if name})
    model.forward = lambda x: sum(module(x) for module in model.values()).sum()
    timeline = predict_memory(TrainingStepAnalysis(model, torch.ones(2, WIDTH)))
    change = MemorySaving("checkpoint", NAMES[0], tuple(NAMES), 1, timeline.peak - 1, 5)
    savings = MemorySavings(timeline.peak, 7, "exact", (change,), (change,), {NAMES[1]: NAMES[2]}, (NAMES[3],))
    report = timeline.report(savings=savings, subject=NAMES[0])
    text = write_document(report, format, width=80)
    written = check_report(format, text.rstrip("\n") + "\n", "memory")
    if format == "html":
        assert "<img" not in written and written.count("<script") == 1


def test_savings_say_what_was_tried():
    timeline = predict()
    block = MemorySaving("checkpoint", "Block", ("h.0", "h.1", "h.2"), 60, 40, 25)
    worse = MemorySaving("optimizer", "Adafactor", (), 110, -10, 1)
    failed = {"checkpoint Joins": "CheckpointError: no"}
    savings = MemorySavings(100, 50, "exact", (block,), (worse,), failed, ("checkpoint MLP",))
    report = timeline.report(savings=savings)
    (row,) = rows_of(report, "savings")
    assert row == {
        "change": "checkpoint Block × 3",
        "modules": "h.0–2",
        "peak": 60,
        "saved": 40,
        "share": 0.4,
        "flops": 25,
        "relative": 0.5,
    }
    text = " ".join(write_document(report, width=80).split())
    for said in (
        "40 40.0% +25 +50%",
        "Not lower: optimizer Adafactor.",
        "Not predicted: checkpoint Joins: CheckpointError: no.",
        "Not tried: checkpoint MLP.",
        "FLOPs: convention exact.",
    ):
        assert said in text
    assert "No change that was tried lowers the peak." in write_document(
        timeline.report(savings=MemorySavings(100, 50, "exact", ())), width=80
    )
