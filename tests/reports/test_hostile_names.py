"""Hostile names in every output: shown as text, never obeyed, and never a reason for a broken line or file."""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
import torch
from markdown_it import MarkdownIt
from torch import nn

from fvflops import FlopCountAnalysis, ProfileAnalysis, diff, flop_count_str, flop_count_table, roofline, summarise
from fvflops.analysis.model_analysis import analysed_run
from fvflops.comparison import model_budget
from fvflops.comparison.budget_file import Limit, parse_budgets, update_text
from fvflops.comparison.model_budget import BudgetReport, CheckResult, FlopsChange
from fvflops.compat import deepspeed_profile as deepspeed_report
from fvflops.compat.deepspeed_profile import read_profile
from fvflops.formulas import load_table
from fvflops.measure import roofline_plot
from fvflops.measure.op_roofline import roofline_report
from fvflops.reports import REPORTS, fvcore_format
from fvflops.reports.formats import write_document
from fvflops.reports.pictures import picture
from fvflops.reports.terminal import op_coverage
from fvflops.views.breakdown import read_breakdown
from tests.support.reports.hostile_names import NAMES, record_benign, record_hostile

Render = Callable[[FlopCountAnalysis], str]


def count(trace):
    analysis = FlopCountAnalysis.from_trace(trace)
    return analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)


def profile(trace):
    analysis = ProfileAnalysis.from_trace(trace)
    return analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)


def judge_names(analysis):
    """Return a verdict of a budget in which everything bears the model's class as its name."""
    name = analysis.module_tree().root.class_name
    grown = (FlopsChange(name, 1, 2), FlopsChange(name + "2", 0, 2))
    return BudgetReport(name, name, (CheckResult(Limit("flops", 1), 2),), grown, grown, {name: 1})


def report(kind, by="module"):
    return lambda analysis: REPORTS[kind](summarise(analysis), by=by)


def draw_roofline(by):
    return lambda analysis: write_document(roofline_report(roofline(analysis, device="H100"), by=by))


VIEWS = ("module", "operator", "both")
# For the eye, in lines: nothing but what can be printed, and a table has the rows that it has of good names.
TERMINAL = {
    **{f"{kind} by {by}": report(kind, by) for kind in ("fvcore", "text", "csv") for by in VIEWS},
    "tree": report("tree"),
    "ledger": lambda analysis: op_coverage.render(summarise(analysis)),
    "flop_count_table": flop_count_table,
    "flop_count_str": flop_count_str,
    "parameters": lambda analysis: fvcore_format.write_parameter_table(analysis.module_tree()),
    "diff": lambda analysis: str(diff(analysis.trace(), record_benign())),
    "check": lambda analysis: model_budget.render(judge_names(analysis)),
    **{f"roofline by {by}": draw_roofline(by) for by in ("module", "operator", "op")},
    "profile": lambda analysis: profile(analysis.trace()).table(),
    "profile by operator": lambda analysis: profile(analysis.trace()).table(by="operator"),
    "profile by op": lambda analysis: profile(analysis.trace()).op_table(),
    "deepspeed": lambda analysis: deepspeed_report.render(
        read_profile(analysis.trace(), table=load_table("deepspeed"))
    ),
    "repr": lambda analysis: repr(analysis.trace()) + repr(analysis),
}


# Tables of which each row has a name: it stays one row, and of a width that a terminal can scroll.
ROWS = (*(f"fvcore by {by}" for by in VIEWS), *("flop_count_table", "parameters", "profile by op"))


@pytest.mark.parametrize("name", TERMINAL)
def test_hostile_names_are_printable_lines(name):
    text, benign = (TERMINAL[name](count(trace)) for trace in (record_hostile(), record_benign()))
    assert [line for line in text.split("\n") if not line.isprintable()] == []
    # Lines that a CI system reads as commands.
    assert [line for line in text.split("\n") if re.match(r"\s*::|.*##(\[|vso\[)", line)] == []
    if name in ROWS:
        table = text.partition("\n\n")[0]
        assert table.count("\n") == benign.partition("\n\n")[0].count("\n")
        assert max(map(len, table.split("\n"))) < 1000


class Tags(HTMLParser):
    """The tags of a page, with their attributes' names."""

    def __init__(self, page):
        super().__init__()
        self.tags = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, *(key for key, _ in attrs if key != "title")))

    def handle_comment(self, data):
        self.tags.append(("comment",))


PAGE = {
    "check": lambda analysis: write_document(model_budget.budget_report(judge_names(analysis)), "html"),
    "html": lambda analysis: "".join(REPORTS["html"](read_breakdown(analysed_run(analysis)))),
    "notebook": lambda analysis: analysis._repr_html_(),
    "notebook of a trace": lambda analysis: analysis.trace()._repr_html_(),
}


@pytest.mark.parametrize("name", PAGE)
def test_hostile_names_add_no_tag_to_a_page(name):
    page, benign = (PAGE[name](count(trace)) for trace in (record_hostile(), record_benign()))
    assert Tags(page).tags == Tags(benign).tags
    assert all(line.isprintable() for line in page.split("\n"))


MARKDOWN = {
    "diff": lambda analysis: diff(analysis.trace(), record_benign()).to_markdown(),
    "check": lambda analysis: model_budget.render_markdown(judge_names(analysis)),
}


@pytest.mark.parametrize("name", MARKDOWN)
def test_hostile_names_are_plain_text_in_markdown(name):
    parse = MarkdownIt("gfm-like", {"linkify": False}).parse
    hostile, benign = (parse(MARKDOWN[name](count(trace))) for trace in (record_hostile(), record_benign()))
    if name != "diff":  # of good names there is no difference
        assert [token.type for token in hostile] == [token.type for token in benign]
    inside = {child.type for token in hostile for child in token.children or ()}
    assert inside <= {"text", "text_special", "strong_open", "strong_close", "softbreak"}
    assert not any(token.type.startswith("html") for token in hostile)


JSON = {
    "json": report("json"),
    "trace": lambda analysis: analysis.trace().to_json(),
    "diff": lambda analysis: diff(analysis.trace(), record_benign()).to_json(),
}


@pytest.mark.parametrize("name", JSON)
def test_hostile_names_are_strings_in_json(name):
    text = JSON[name](count(record_hostile()))
    json.loads(text)
    assert all(line.isprintable() for line in text.split("\n"))


def test_hostile_names_leave_a_picture_well_formed():
    pytest.importorskip("matplotlib")
    analysis = count(record_hostile())
    ElementTree.fromstring(REPORTS["svg"](read_breakdown(analysed_run(analysis))))
    figure = roofline_plot.draw_roofline(roofline(analysis, device="H100"), by="module")
    ElementTree.fromstring(picture.encode(figure, "svg"))


@pytest.mark.parametrize(
    "name", [name for name in NAMES if "\u200d" in name or (name.isprintable() and len(name) < 100)]
)
def test_hostile_names_are_read_back_from_a_budget(name):
    text = update_text(None, "budget.yaml", name, {"flops": 5}).text
    assert list(parse_budgets(text, "budget.yaml")) == [name] and all(line.isprintable() for line in text.split("\n"))


def test_an_attribute_with_a_dot_in_its_name_is_below_its_module():
    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            for name in ("scale_0.5", "scale_1.0", ".5"):
                setattr(self, name, nn.Linear(4, 4, bias=False))

        def forward(self, x):
            return sum(child(x) for child in self.children())

    flops = FlopCountAnalysis(Scales(), torch.ones(1, 4))
    assert flops.by_module() == {"": 48, "scale_0.5": 16, "scale_1.0": 16, ".5": 16}
    assert "(itself)" not in REPORTS["text"](summarise(flops))
    assert "scale_0.5" in flops.to_graph("dot")
