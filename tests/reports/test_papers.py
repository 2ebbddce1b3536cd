"""The files that others read: tables as papers have them, columns and data frames, the schema of JSON, and CSV."""

import csv
import io
import json
import re
import subprocess
import sys
from dataclasses import replace
from shutil import which

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from torch import nn

import fvflops
from fvflops import ActivationCountAnalysis, FlopCountAnalysis, TrainingStepAnalysis
from fvflops.analysis.fvcore_text import summarise
from fvflops.analysis.model_analysis import ModelAnalysis
from fvflops.reports import REPORTS
from fvflops.reports import count_json as json_report
from fvflops.reports.escaping import escape_latex, printable
from fvflops.reports.terminal import op_coverage
from fvflops.trace import ModuleInfo, ModuleTree, Summary
from fvflops.units import format_in
from tests.support.reports import summaries
from tests.support.reports.hostile_names import CELLS
from tests.support.reports.report_formats import output_of

# A convolution 3 → 8 of 3 by 3 on 8 by 8: 216 weights, 8 biases, 6 * 6 * 8 = 288 outputs, 288 * 27 = 7,776
# multiply-adds. A Linear 288 → 10: 2,880 weights and multiply-adds, 10 biases and outputs.
PARAMETERS, FLOPS, ACTIVATIONS = 216 + 8 + 2880 + 10, 7776 + 2880, 288 + 10
NAMES = st.one_of(
    st.sampled_from(CELLS),
    st.text(st.characters(exclude_characters=".", exclude_categories=["Cs"]), min_size=1),
    st.text(" x\\{}$&#^_~%<>|'\"`-,*[]", min_size=1),
)


def build():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(288, 10))


def analyse(**options):
    return FlopCountAnalysis(build(), torch.ones(1, 3, 8, 8), **options)


def summarise_net():
    flops = analyse()
    return summarise(flops, ActivationCountAnalysis.from_trace(flops.trace()))


def name_everything(name):
    return replace(summaries.name_everything(name), about={"table": name, "model": name})


@given(count=st.integers(-(10**30), 10**30), power=st.sampled_from([6, 9]))
def test_a_count_in_a_unit_is_right_to_three_figures_and_never_a_made_up_zero(count, power):
    text = format_in(count, power)
    assert abs(float(text.replace(",", "")) * 10**power - count) <= 0.0051 * abs(count)
    assert (text == "0") == (count == 0)


UNESCAPED = {f"\\{mark}": mark for mark in "{}$&#_%"} | {f"{{{mark}}}": mark for mark in "-,*[]"}
UNESCAPED |= {f"\\text{word}{{}}": mark for word, mark in (("backslash", "\\"), ("less", "<"), ("greater", ">"))}
UNESCAPED |= {f"\\text{word}{{}}": mark for word, mark in (("bar", "|"), ("asciitilde", "~"), ("asciicircum", "^"))}
UNESCAPED |= {"\\textasciigrave{}": "`", "\\textquotesingle{}": "'", "{\\char34}": '"', "\\mbox{ }": " "}
TOKEN = re.compile("|".join(map(re.escape, UNESCAPED)) + r"|([^\\{}$&#^_~%])", re.DOTALL)


def read_text(latex):
    """Return what LaTeX typesets of a cell; a mark that TeX would obey or a blank it would drop raises ValueError."""
    if latex != latex.strip(" ") or "  " in latex:
        raise ValueError(f"TeX drops a blank of {latex!r}")
    shown, place = [], 0
    while place < len(latex):
        found = TOKEN.match(latex, place)
        if found is None:
            raise ValueError(f"TeX obeys {latex[place:]!r}")
        shown.append(found[1] or UNESCAPED[found[0]])
        place = found.end()
    return "".join(shown)


def test_the_reader_of_latex_sees_a_mark_that_is_not_escaped():
    for text in ("a_b", "50%", "\\input{x}", "{", "x & y", "#1", "$"):
        with pytest.raises(ValueError, match="TeX obeys"):
            read_text(text)
    for text in (" ", " x", "x ", "x  y"):
        with pytest.raises(ValueError, match="TeX drops"):
            read_text(text)


def test_latex_has_one_row_for_the_model():
    lines = REPORTS["latex"](summarise_net()).splitlines()
    notes = [line for line in lines if line.startswith("% ")]
    assert notes[:2] == ["% Model: Sequential.", "% Convention: default (1 FLOP per multiply-add)."]
    assert notes[-2:] == [
        f"% Made with fvflops {fvflops.__version__} and torch {torch.__version__}.",
        r"% Needs \usepackage{booktabs}.",
    ]
    assert lines[len(notes) :] == [
        r"\begin{tabular}{lrrr}",
        r"  \toprule",
        r"  Model & Params (M) & FLOPs (G) & Acts (M) \\",
        r"  \midrule",
        r"  Sequential & 0.00311 & 0.0000107 & 0.000298 \\",
        r"  \bottomrule",
        r"\end{tabular}",
    ]
    assert (PARAMETERS, FLOPS, ACTIVATIONS) == (3114, 10656, 298)


def test_latex_has_a_row_for_each_module_that_counts_down_to_the_depth():
    rows = [line.split(" & ") for line in REPORTS["latex"](summarise_net(), depth=1).splitlines() if " & " in line]
    assert [[cell.strip(" \\") for cell in row] for row in rows] == [
        ["Module", "Params (M)", "FLOPs (G)", "Acts (M)"],
        ["Sequential", "0.00311", "0.0000107", "0.000298"],
        ["0", "0.000224", "0.00000778", "0.000288"],
        ["2", "0.00289", "0.00000288", "0.000010"],
    ]
    with pytest.raises(ValueError, match="the paper report has no view by 'operator': use 'module'"):
        REPORTS["paper"](summarise_net(), by="operator")


@pytest.mark.parametrize("name", ["latex", "paper"])
def test_papers_rows_are_ranked_below_the_model(name):
    text = REPORTS[name](summarise_net(), depth=1, sort="parameters", top=1)
    first = [line.lstrip(" |").split(" ")[0] for line in text.splitlines() if " & " in line or line.startswith("|")]
    assert [cell.strip("*") for cell in first if cell != ":---"] == ["Module", "Sequential", "2"]
    assert "1 more module." in text


def test_latex_by_operator_has_the_rows_of_the_csv():
    summary = summarise_net()
    for by in ("operator", "both"):
        text = REPORTS["latex"](summary, by=by)
        rows = [split_row(line.strip()) for line in text.splitlines() if " & " in line]
        expected = list(csv.reader(io.StringIO(REPORTS["csv"](summary, by=by))))
        assert len(rows) == len(expected) and {len(row) for row in rows} == {len(expected[0])}
        names = len(expected[0]) - 2
        assert [row[:names] for row in rows[1:]] == [[cell or "model" for cell in row[:names]] for row in expected[1:]]
        assert text.count(r"\begin{") == text.count(r"\end{") == 2


def split_row(line):
    assert line.endswith(" \\\\")
    return [cell.strip(" ") for cell in re.split(r"(?<!\\)&", line.removesuffix(" \\\\"))]


@given(name=NAMES)
def test_latex_shows_any_name_as_text(name):
    assert read_text(escape_latex(name)) == printable(name)
    lines = REPORTS["latex"](name_everything(name), depth=1).split("\n")
    assert all(line.isprintable() for line in lines)
    start = lines.index(r"\begin{tabular}{lr}")
    assert all(line.startswith("% ") for line in lines[:start])
    table = lines[start:]
    assert len(table) == 10 and table[-1] == r"\end{tabular}"
    for row in (table[4], table[6]):
        cell, number = split_row(row)
        assert (read_text(cell), number) == (printable(name), "0.000000005")
        # After the end of a row LaTeX looks for a star or a length in brackets.
        assert not cell.startswith(("*", "["))
    warning = table[8].removeprefix(r"  \multicolumn{2}{l}{\footnotesize ").removesuffix(r"} \\")
    assert read_text(warning) == f"Unsupported, so not counted: {printable(name)}."


def test_latex_says_what_is_missing_only_where_something_is():
    assert "not counted" not in REPORTS["latex"](summarise_net())
    unknown = replace(summarise_net(), ledger={"unsupported": {"mylib::scan": 2}})
    assert r"{\footnotesize Unsupported, so not counted: mylib::scan.}" in REPORTS["latex"](unknown)
    assert "% Unsupported, so not counted: mylib::scan (2 calls)." in REPORTS["latex"](unknown)


def test_a_module_that_did_not_run_has_no_number():
    summary = replace(summarise_net(), uncalled={"flops": frozenset({"2"})})
    assert [line for line in REPORTS["paper"](summary, depth=1).splitlines() if line.startswith("| 2 ")] == [
        "| 2 | 0.00289 | not called | 0.000010 |"
    ]


@pytest.mark.skipif(which("pdflatex") is None, reason="no LaTeX is installed")
def test_latex_compiles(tmp_path):
    names = [name for name in CELLS if len(name) < 100]
    tables = "\n\n".join(REPORTS["latex"](name_everything(name), depth=1) for name in names)
    document = (
        rf"\documentclass{{article}}\usepackage{{booktabs}}\begin{{document}}{chr(10)}{tables}{chr(10)}\end{{document}}"
    )
    (tmp_path / "table.tex").write_text(document)
    subprocess.run(["pdflatex", "-halt-on-error", "table.tex"], cwd=tmp_path, check=True, capture_output=True)


def test_the_paper_table_in_markdown():
    summary = summarise_net()
    text = REPORTS["paper"](summary)
    assert text.startswith(
        "| Model | Params (M) | FLOPs (G) | Acts (M) |\n"
        "| :--- | ---: | ---: | ---: |\n"
        "| Sequential | 0.00311 | 0.0000107 | 0.000298 |\n\n"
        "- Model: Sequential.\n- Convention: default (1 FLOP per multiply-add).\n"
    )
    assert text.endswith(f"- Made with fvflops {fvflops.__version__} and torch {torch.__version__}.")
    assert [line.split(" | ")[0] for line in REPORTS["paper"](summary, depth=2).splitlines()[:5]] == [
        "| Module",
        "| :---",
        "| **Sequential**",
        "| 0",
        "| 2",
    ]


@given(name=NAMES)
def test_the_paper_table_shows_any_name_as_text(name):
    renderer = MarkdownIt("gfm-like", {"linkify": False})
    summary = name_everything(name)
    inlines = [token for token in renderer.parse(REPORTS["paper"](summary, depth=1)) if token.type == "inline"]
    cells = ["".join(child.content for child in inline.children) for inline in inlines]
    assert cells[:2] == ["Module", "FLOPs (G)"]
    assert cells[2::2][:2] == [printable(name)] * 2 and cells[3::2][:2] == ["0.000000005"] * 2
    strong, plain = ({child.type for child in inline.children} for inline in inlines[2::2][:2])
    assert {"strong_open", "strong_close"} <= strong and plain <= {"text", "text_special"}
    assert cells[6:] == [f"Model: {printable(name)}.", *op_coverage.render(summary).split("\n")]


def test_a_class_without_a_name_is_the_model():
    net = Summary(ModuleTree({"": ModuleInfo("", "", "")}), {"flops": {"": 5}})
    assert "| **model** | 0.000000005 |" in REPORTS["paper"](net, depth=1)
    assert r"  model & 0.000000005 \\" in REPORTS["latex"](net)


def test_the_command_line_writes_both(capsys):
    for name, row in (
        ("latex", r"  LeNet5 & 0.0617 & 0.000417 & 0.00652 \\"),
        ("paper", "| LeNet5 | 0.0617 | 0.000417"),
    ):
        lines = output_of(capsys, "count", "zoo:lenet5", "--format", name).splitlines()
        assert len([line for line in lines if line.startswith(row)]) == 1
        assert any("default" in line for line in lines)


def list_subjects():
    counts = ["parameters", "flops", "activations"]
    yield "flops", analyse, counts
    yield "exact", lambda: analyse(table="exact"), counts
    yield "activations", lambda: ActivationCountAnalysis(build(), torch.ones(1, 3, 8, 8)), ["parameters", "activations"]
    yield "handles", lambda: analyse().clear_op_handles(), ["parameters", "flops"]
    yield (
        "step",
        lambda: TrainingStepAnalysis(build(), torch.ones(1, 3, 8, 8), loss=lambda y: y.sum()),
        [*counts, "forward", "backward"],
    )


SUBJECTS = {name: (make, headings) for name, make, headings in list_subjects()}


@pytest.mark.parametrize("name", SUBJECTS)
def test_the_columns_are_those_of_the_analysis(name):
    make, headings = SUBJECTS[name]
    analysis = make()
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    columns = analysis.to_dict()
    assert list(columns) == ["module", "class", *headings, "called"]
    assert columns["module"] == ["", "0", "1", "2"]
    metric = "activations" if name == "activations" else "flops"
    assert columns[metric] == [analysis.by_module()[module] for module in columns["module"]]
    assert columns["parameters"] == [PARAMETERS, 224, 0, 2890]
    if name == "step":
        assert [sum(pair) for pair in zip(columns["forward"], columns["backward"], strict=True)] == columns["flops"]


def test_the_columns_by_hand():
    assert analyse().to_dict(depth=0) == {
        "module": [""],
        "class": ["Sequential"],
        "parameters": [PARAMETERS],
        "flops": [FLOPS],
        "activations": [ACTIVATIONS],
        "called": [True],
    }
    assert analyse().to_dict(by="operator") == {
        "operator": ["conv", "linear"],
        "flops": [7776, 2880],
        "activations": [288, 10],
    }
    with pytest.raises(ValueError, match="has no view by 'layer'"):
        analyse().to_dict(by="layer")


def test_a_handle_alone_is_counted_under_its_own_heading():
    analysis = ModelAnalysis(nn.Linear(3, 2), torch.ones(4, 3)).set_op_handle("aten::linear", lambda call: 7)
    assert analysis.to_dict(by="operator") == {"operator": ["linear"], "handles": [7]}


@pytest.mark.parametrize("by", ["module", "operator", "both"])
def test_the_columns_have_the_rows_of_the_csv_report(by):
    columns = analyse().to_dict(by=by)
    read = list(csv.DictReader(io.StringIO(REPORTS["csv"](summarise_net(), by=by))))
    told = {True: "yes", False: "no"}
    cells = {
        heading: [told[cell] if heading == "called" else str(cell) for cell in column]
        for heading, column in columns.items()
    }
    assert cells == {heading: [row[heading] for row in read] for heading in read[0]}


@pytest.mark.parametrize("by", ["module", "operator", "both"])
def test_a_data_frame_has_the_columns_exactly(by):
    pytest.importorskip("pandas")
    analysis = analyse()
    frame = analysis.to_pandas(by=by)
    assert frame.to_dict(orient="list") == analysis.to_dict(by=by)
    assert frame.attrs["table"] == "default" and frame.attrs["fvflops"] == fvflops.__version__
    assert frame["flops"].dtype == "int64"


def test_numbers_beyond_64_bits_stay_exact():
    pytest.importorskip("pandas")
    analysis = ModelAnalysis(nn.Linear(3, 2), torch.ones(4, 3)).set_op_handle("aten::linear", lambda call: 10**30 + 1)
    assert analysis.to_pandas()["handles"].tolist() == [10**30 + 1]


def test_without_pandas_one_line_says_what_to_do_before_the_model_runs(monkeypatch):
    def refuse(*args):
        raise AssertionError("the model was run")

    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError) as caught:
        FlopCountAnalysis(refuse, torch.ones(1)).to_pandas()
    message = str(caught.value)
    assert message.startswith("pandas is not installed: pip install 'fvflops[pandas]'") and "\n" not in message
    assert "to_dict()" in message


def read_a_draw_and_a_value(x):
    return x * 2 if torch.rand(()) < 2 and (x + 0.5).sum() > 0 else x


def test_the_json_report_is_what_its_schema_says():
    record = json.loads(REPORTS["json"](summarise_net()))
    documented = re.findall(r"^- `(\w+)`|\. `(schema)`:", json_report.__doc__, re.MULTILINE)
    assert {first or second for first, second in documented} == set(record)
    assert f"Schema {json_report.SCHEMA}," in json_report.__doc__
    assert (record["format"], record["schema"]) == ("fvflops.summary", json_report.SCHEMA)
    assert record["about"]["fvflops"] == fvflops.__version__
    place = json_report.__doc__.split("- `modules`")[1]
    assert set(re.findall(r"`(\w+)`", place.split("\n\n")[0])) == set(record["modules"][0])
    told = set(re.findall(r"`(\w+)`", json_report.__doc__.split("- `about`")[1].split("- `columns`")[0]))
    assert told - set(record["about"]) == {"random", "data_dependent"}  # where there are any
    about = summarise(FlopCountAnalysis(read_a_draw_and_a_value, torch.ones(4))).about
    assert told <= set(about)
    assert all(about[key].startswith("read_a_draw_and_a_value at ") for key in ("random", "data_dependent"))


def test_a_new_key_is_passed_over():
    summary = summarise_net()
    record = json.loads(REPORTS["json"](summary))
    assert json_report.parse(json.dumps({**record, "colour": "red"})) == summary
