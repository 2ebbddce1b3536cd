"""The table that sets fvflops beside its peers: made by the tool on a small model, without a peer that is not there."""

import sys

from tests.support.checkout import ROOT
from tests.support.tools import load_tool


def rows_of(text):
    return [[cell.strip() for cell in line.split(" | ")] for line in text.splitlines() if line.startswith("| ")]


def test_the_tool_makes_all_that_the_page_shows(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torchlens", None)
    tool = vars(load_tool("side_by_side.py"))
    assert tool["main"](["zoo:lenet5"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "torchlens is not installed here, and is left out.\n"
    made = {row.strip("| "): cells for row, *cells in rows_of(printed.out)[1:]}
    page = (ROOT / "docs" / "comparison.md").read_text().partition("## Reports and exports")[2]
    shown = {row.strip("| "): cells for row, *cells in rows_of(page)[1:]}
    assert list(made) == list(shown)
    assert made["FLOPs"][0] == "0.417M (0.9M exact)"
    for row, cells in made.items():
        assert [cell.strip(" |") == "–" for cell in cells] == [shown[row][place].strip(" |") == "–" for place in (0, 2)]
