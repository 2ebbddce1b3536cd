"""The comparison with other counters: exact numbers by hand, tools asked apart, and the tables of its page."""

import re
from types import SimpleNamespace

import pytest
import torch

from tests.support.checkout import ROOT
from tests.support.tools import load_tool

PAGE = (ROOT / "docs" / "comparison.md").read_text()


@pytest.fixture(scope="module")
def tool():
    program = load_tool("comparison.py")
    parts = {name: load_tool(f"comparing.{name}") for name in ("cases", "counters", "measuring", "page", "probes")}
    return SimpleNamespace(main=program.main, **parts)


@pytest.fixture
def by_title(tool):
    return (
        {case.title: case for case in tool.cases.CASES},
        {counter.title: counter for counter in tool.counters.COUNTERS},
    )


def table_of(name):
    """Return the rows of a table of the page, its header first."""
    (text,) = re.findall(rf"<!-- {name} -->\n\n(.*?)\n\n<!-- end -->", PAGE, re.DOTALL)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    return [rows[0], *rows[2:]]


@pytest.mark.parametrize("title", ["LSTM", "SDPA", "depthwise", "step, depthwise"])
def test_the_exact_numbers_are_those_that_fvflops_counts(title, by_title):
    cases, counters = by_title
    subject = cases[title].build()
    assert counters["fvflops"].ask(subject).macs == [cases[title].macs(subject)]


def test_a_tool_that_misses_work_is_seen(tool, by_title):
    cases, counters = by_title
    subject = cases["SDPA"].build()
    right, wrong = (
        tool.measuring.count(counters[name], cases["SDPA"], subject) for name in ("fvflops", "FlopCounterMode")
    )
    assert (right, tool.page.is_right(right)) == ("100.00", True)
    assert float(wrong) < 10
    assert not tool.page.is_right(wrong)


def test_what_a_question_raises_or_kills_does_not_reach_the_next(tool):
    def raise_error():
        torch.relu = None
        raise KeyError("no")

    assert tool.measuring.ask_apart(raise_error) == "fails: KeyError"
    assert torch.relu is not None
    assert tool.measuring.ask_apart(lambda: exec("import os; os._exit(3)")) == "fails: the process died"
    assert tool.measuring.ask_apart(lambda: "yes") == "yes"


def test_the_probes_see_what_is_left_behind(tool, by_title):
    _, counters = by_title
    probes = tool.probes.PROBES
    assert [probe(counters["fvflops"]) for probe in probes.values()] == ["yes", "nothing", "yes"]

    def ask(subject):
        subject.model.eval()
        subject.model[1].register_forward_hook(print)
        return tool.counters.Answer([1])

    rude = tool.counters.Counter("rude", "torch", "torch", ask)
    assert tool.probes.leaves_the_model(rude) == "hooks, training mode"
    assert tool.probes.names_unknown_ops(rude) == "no"


def test_the_tool_writes_the_tables_of_a_page(tool, tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text("".join(f"# {name}\n<!-- {name} -->\n\nold\n\n<!-- end -->\n" for name in tool.page.TABLES))
    assert tool.main(["--only", "fvflops,FlopCounterMode", "--cases", "LSTM", "--page", str(page)]) == 0
    written = page.read_text()
    assert "old" not in written
    assert "**0.0 %**" in written
    assert capsys.readouterr().out in written + "\n"


def test_the_page_has_all_tools_and_models(tool):
    header, *rows = table_of("counts")
    assert header[1:] == [case.title for case in tool.cases.CASES]
    titles = [counter.title for counter in tool.counters.COUNTERS]
    assert [row[0].rpartition(" ")[0] for row in rows] == titles
    assert rows[0][1:] == ["100.0 %"] * len(tool.cases.CASES)
    assert [row[0] for row in table_of("probes")[1:]] == [row[0] for row in table_of("times")[1:]] == titles
    features = re.findall(r"^\| ([\w. -]+?) \| .*", PAGE.partition("## Features")[2], re.MULTILINE)
    assert {title.partition(",")[0] for title in titles} <= set(features)


def test_the_readme_shows_figures_of_the_page():
    header, *rows = table_of("counts")
    shown = re.findall(r"^\| (.+?) \|", (ROOT / "README.md").read_text().partition("## Compared")[2], re.MULTILINE)
    found = {row[0].rpartition(" ")[0]: dict(zip(header, row, strict=True)) for row in rows}
    columns = ["ViT-B/16", "LSTM", "SDPA", "step, MobileNetV3-L"]
    for title in shown[2:]:
        line = f"| {title} | {' | '.join(found[title][column] for column in columns)} |"
        assert line in (ROOT / "README.md").read_text()
    assert len(shown) >= 6
