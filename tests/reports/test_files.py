"""The reports that fvcore does not have: by operator, CSV, Markdown and the op_coverage, against goldens."""

import csv
import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from fvflops.reports import REPORTS, escaping, fvcore_format
from fvflops.reports.count_json import parse
from fvflops.reports.terminal import op_coverage
from fvflops.trace import Status, Summary
from fvflops.views.breakdown import Breakdown, Cell, Measure
from tests.support.reports.hostile_names import CELLS
from tests.support.reports.summaries import NET, make_deep, name_everything

LEDGER = """\
Convention: default (1 FLOP per multiply-add).
14 op calls: 3 counted, 3 zero-FLOP, 6 ignored, 2 unsupported.
Ignored by this convention: aten::add.Tensor (4 calls), aten::sigmoid (2 calls).
Unsupported, so not counted: mylib::scan (2 calls, 4,096 output elements)."""

TABLES = {
    "operator": """\
| operator   | #flops   | share   |   #activations |
|:-----------|:---------|:--------|---------------:|
| linear     | 0.6K     | 65.2%   |             50 |
| gelu       | 0.32K    | 34.8%   |              0 |
| total      | 0.92K    | 100.0%  |             50 |""",
    "both": """\
| module     | operator   | #flops   | share   |   #activations |
|:-----------|:-----------|:---------|:--------|---------------:|
| model      | linear     | 0.6K     | 65.2%   |             50 |
|            | gelu       | 0.32K    | 34.8%   |              0 |
|  fc1       | linear     | 0.4K     | 43.5%   |             40 |
|  head      | gelu       | 0.32K    | 34.8%   |              0 |
|            | linear     | 0.2K     | 21.7%   |             10 |
|   head.fc2 | linear     | 0.2K     | 21.7%   |             10 |
|   head.act | gelu       | 0.32K    | 34.8%   |              0 |""",
}

CSVS = {
    "module": """\
module,class,parameters,flops,activations,called
,Net,337,920,50,yes
fc1,Linear,220,400,40,yes
head,Head,105,520,10,yes
head.fc2,Linear,105,200,10,yes
head.act,GELU,0,320,0,yes
aux,Linear,12,0,0,no
""",
    "operator": """\
operator,flops,activations
linear,600,50
gelu,320,0
""",
    "both": """\
module,operator,flops,activations
,linear,600,50
,gelu,320,0
fc1,linear,400,40
head,gelu,320,0
head,linear,200,10
head.fc2,linear,200,10
head.act,gelu,320,0
""",
}

MARKDOWNS = {
    "module": """\
| module | class | parameters | FLOPs | activations |
| :--- | :--- | ---: | ---: | ---: |
| **model** | Net | 337 | 920 | 50 |
| fc1 | Linear | 220 | 400 | 40 |
| head | Head | 105 | 520 | 10 |
| head.fc2 | Linear | 105 | 200 | 10 |
| head.act | GELU |  | 320 | 0 |
| aux | Linear | 12 | not called | not called |
""",
    "operator": """\
| operator | FLOPs | share | activations |
| :--- | ---: | ---: | ---: |
| linear | 600 | 65.2% | 50 |
| gelu | 320 | 34.8% | 0 |
| **total** | 920 | 100.0% | 50 |
""",
    "both": """\
| module | operator | FLOPs | share | activations |
| :--- | :--- | ---: | ---: | ---: |
| **model** | linear | 600 | 65.2% | 50 |
| **model** | gelu | 320 | 34.8% | 0 |
| fc1 | linear | 400 | 43.5% | 40 |
| head | gelu | 320 | 34.8% | 0 |
| head | linear | 200 | 21.7% | 10 |
| head.fc2 | linear | 200 | 21.7% | 10 |
| head.act | gelu | 320 | 34.8% | 0 |
""",
}


@pytest.mark.parametrize("by", TABLES)
def test_the_table_by_operator(by):
    assert REPORTS["fvcore"](NET, by=by) == f"{TABLES[by]}\n\n{LEDGER}"


@pytest.mark.parametrize("by", CSVS)
def test_the_csv(by):
    assert REPORTS["csv"](NET, by=by) == CSVS[by]


@pytest.mark.parametrize("by", MARKDOWNS)
def test_the_markdown(by):
    notes = "".join(f"\n- {line}" for line in LEDGER.splitlines())
    assert REPORTS["markdown"](NET, by=by) == MARKDOWNS[by] + notes


def test_the_modules_of_a_golden_add_up():
    """What the golden by both says of a module is what the golden by module says of it."""
    by_module = {row["module"]: row for row in csv.DictReader(io.StringIO(CSVS["module"]))}
    for heading in ("flops", "activations"):
        sums = dict.fromkeys(by_module, 0)
        for row in csv.DictReader(io.StringIO(CSVS["both"])):
            sums[row["module"]] += int(row[heading])
        assert sums == {name: int(row[heading]) for name, row in by_module.items()}


def test_depth_counts_levels_below_the_root():
    for depth, modules in {0: [""], 1: ["", "fc1", "head", "aux"], 2: list(NET.modules.by_name)}.items():
        rows = list(csv.DictReader(io.StringIO(REPORTS["csv"](NET, depth=depth))))
        assert [row["module"] for row in rows] == modules
        assert REPORTS["markdown"](NET, depth=depth).count("\n| ") == len(modules) + 1
    assert REPORTS["csv"](NET, by="both", depth=0) == "".join(CSVS["both"].splitlines(keepends=True)[:3])
    # The table is the only one that stops by itself.
    deep = make_deep(6)
    assert len(fvcore_format.write_table(deep, by="both").splitlines()) == 2 + 7
    assert len(REPORTS["markdown"](deep, by="both").splitlines()) == 2 + 13


def test_a_summary_without_operators_says_so():
    summary = Summary(NET.modules, NET.columns)
    for report in ("text", "fvcore", "csv", "markdown", "latex"):
        for by in ("operator", "both"):
            with pytest.raises(ValueError, match="no counts by operator"):
                REPORTS[report](summary, by=by)


def test_a_model_without_arithmetic_has_tables_too():
    summary = Summary(NET.modules, {"flops": {"": 0}}, {"flops": {}}, {"flops": {"": {}}})
    assert fvcore_format.write_table(summary, by="operator").splitlines()[2:] == ["| total      |        0 |         |"]
    assert len(fvcore_format.write_table(summary, by="both").splitlines()) == 2
    assert REPORTS["csv"](summary, by="both") == "module,operator,flops\n"


@pytest.mark.parametrize("by", CSVS)
@pytest.mark.parametrize("net", ["short", "long"])
def test_all_six_formats_of_a_saved_summary(net, by):
    summary = parse(REPORTS["json"](NET if net == "short" else name_everything("layer_" * 50)))
    text = REPORTS["text"](summary, by=by, depth=9, width=80)
    assert max(map(len, text.split("\n"))) <= 80 and "Convention:" in text
    rows = list(csv.DictReader(io.StringIO(REPORTS["csv"](summary, by=by))))
    totals = [int(row["flops"]) for row in rows]
    assert (totals[0] if by == "module" else sum(summary.operators["flops"].values())) == summary.columns["flops"][""]
    lines = [line for line in REPORTS["markdown"](summary, by=by, depth=9).split("\n") if line.startswith("|")]
    assert len({line.count("|") for line in lines}) == 1 and len(lines) >= len(rows) + 2
    latex = REPORTS["latex"](summary, by=by, depth=9)
    assert latex.count(r"\begin{tabular}") == latex.count(r"\end{tabular}") == 1
    assert len({line.count(" & ") for line in latex.split("\n") if " & " in line}) == 1
    cells = {Cell(name, "forward", "op"): 1 for name in summary.modules.by_name}
    page = "".join(REPORTS["html"](Breakdown(summary.modules, {"flops": Measure("FLOPs", cells)}, summary.ledger)))
    assert page.startswith("<!doctype html>") and page.count("</script>") == 2


def test_the_ledger_names_few_that_are_left_out_and_all_that_are_unknown():
    omitted = {f"aten::op{index}": 10 - index for index in range(8)}
    unknown = {f"mylib::op{index}": 1 for index in range(8)}
    text = op_coverage.render(
        replace(NET, ledger={"ignored": omitted, "unsupported": unknown}, unsupported_elements={})
    )
    lines = text.splitlines()
    assert lines[2].endswith("aten::op3 (7 calls), aten::op4 (6 calls), and 3 more ops.")
    assert [f"mylib::op{index} (1 call)" in lines[3] for index in range(8)] == [True] * 8


def test_the_ledger_takes_statuses_as_they_are_and_leaves_out_what_it_does_not_know():
    calls = {
        Status.COUNTED: {"aten::mm": 1},
        Status.IGNORED: {},
        Status.UNSUPPORTED: {},
        Status.ZERO_FLOP: {"aten::t": 1},
    }
    assert op_coverage.render(Summary(NET.modules, {}, ledger=calls)) == (
        "2 op calls: 1 counted, 1 zero-FLOP, 0 ignored, 0 unsupported."
    )
    assert op_coverage.render(Summary(NET.modules, {})) == ""
    assert op_coverage.render(replace(NET, about={"table": "exact", "multiply_add": "2"})).startswith(
        "Convention: exact (2 FLOPs per multiply-add).\n"
    )


NAMES = st.one_of(
    st.sampled_from((*CELLS, "＝1")),
    st.text(st.characters(exclude_characters=".", exclude_categories=["Cs"]), min_size=1),
)


@given(name=NAMES)
def test_csv_cells_survive_and_are_no_formulas(name):
    for by in CSVS:
        rows = list(csv.reader(io.StringIO(REPORTS["csv"](name_everything(name), by=by), newline="")))
        assert len(rows) == {"module": 3, "operator": 2, "both": 3}[by]
        assert len({len(row) for row in rows}) == 1
        cells = [cell for row in rows for cell in row if cell and not cell.isdecimal()]
        assert not any(cell.lstrip(" ")[:1] in ("=", "+", "-", "@", "\t", "\r", "＝") for cell in cells)
        shown = escaping.printable(name)
        assert rows[-1][0] in (shown, "'" + shown)


@given(name=NAMES)
def test_markdown_shows_names_as_they_are(name):
    renderer = MarkdownIt("gfm-like", {"linkify": False})
    shown = escaping.printable(name)
    for by, cell in {"module": (2, 0), "operator": (0, 0), "both": (1, 1)}.items():
        text = REPORTS["markdown"](name_everything(name), by=by)
        inlines = [token for token in renderer.parse(text) if token.type == "inline"]
        rows = {"module": 3, "operator": 3, "both": 3}[by]
        width = {"module": 3, "operator": 3, "both": 4}[by]
        row, column = cell if by != "operator" else (1, 0)
        found = inlines[row * width + column]
        assert "".join(child.content for child in found.children) == shown
        assert {child.type for child in found.children} <= {"text", "text_special"}
        notes = ["".join(child.content for child in note.children) for note in inlines[rows * width :]]
        assert notes == op_coverage.render(name_everything(name)).split("\n")
