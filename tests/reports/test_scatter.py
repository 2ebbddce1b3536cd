"""Scatter plots: what each format draws of points."""

import re

import pytest

from fvflops.reports.document import Document, Point, Scatter
from fvflops.reports.formats import FORMATS, write_document
from fvflops.reports.pictures.svg_picture import choose_ticks, svg_scatter
from fvflops.reports.text_picture import text_scatter

POINTS = [Point(1.0, 30.0, "a", True), Point(2.0, 10.0, "b <1>", True), Point(3.0, 20.0, "c")]
PLOT = Scatter("layouts", POINTS, "time", "memory", title="Layouts", limit=(25.0, "25 of memory"))


@pytest.mark.parametrize("format", sorted({*FORMATS} - {"csv"}))  # CSV has tables alone
def test_every_format_has_the_plot(format):
    text = write_document(Document("kind", "Title", [PLOT]), format)
    if format == "json":
        assert '"marked": true' in text and '"memory": 30.0' in text
    else:
        assert "Layouts" in text and "25 of memory" in text


def test_points_are_where_their_values_are():
    page = svg_scatter(PLOT)
    places = {
        name: (float(x), float(y))
        for x, y, name in re.findall(r'<circle cx="([\d.]+)" cy="([\d.]+)"[^>]*><title>([^:]+):', page)
    }
    assert places["a"][0] < places["b &lt;1&gt;"][0] < places["c"][0]
    assert places["a"][1] < places["c"][1] < places["b &lt;1&gt;"][1]  # from the top
    halfway = (places["a"][0] + places["c"][0]) / 2
    assert abs(places["b &lt;1&gt;"][0] - halfway) < 0.2


def test_a_text_has_a_row_for_each_part_of_the_span():
    lines = text_scatter(PLOT, width=40).split("\n")
    assert max(map(len, lines)) <= 40
    assert "●" in lines[1] and lines[1].index("●") < lines[12].index("●")
    assert sum(line.count("·") for line in lines) == 1 and any(line.endswith("---") for line in lines)
    single = text_scatter(Scatter("", [Point(1.0, 1.0)], "x", "y"), width=20)
    assert single.count("·") == 1


def test_ticks_are_round_and_in_the_span():
    for low, high in ((0.0, 1.0), (9.94, 16.2), (1e9, 8e10), (-3.0, 5.0)):
        ticks = choose_ticks(low, high)
        assert 2 <= len(ticks) <= 7 and low <= ticks[0] and ticks[-1] <= high
