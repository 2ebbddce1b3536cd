"""Charts: samples, their drawing as text and as SVG, and every format of a report that has one."""

from xml.etree import ElementTree

import pytest

from fvflops.reports.document import Chart, Document, Table, number_column, text_column
from fvflops.reports.formats import FORMATS, write_document
from fvflops.reports.pictures.svg_picture import svg_chart
from fvflops.reports.text_picture import text_chart
from tests.support.reports.report_formats import check_report

SVG = "{http://www.w3.org/2000/svg}"
POINTS = 5000
RISING = [min(point, POINTS - point) * 8 // 5 for point in range(POINTS)]  # up to 4000 and down again
CHART = Chart(
    "memory",
    {"weights": [4000] * POINTS, "nothing": [0] * POINTS, "activations": RISING},
    [("forward", POINTS // 2), ("backward", POINTS // 2)],
    title="Memory <of> a run",
)


def rows_of(text):
    """Return the rows of letters of a drawn chart, the top one first."""
    return [line.partition("|")[2] for line in text.splitlines() if "|" in line]


@pytest.mark.parametrize("count", [1, 7, 70, POINTS, 3 * POINTS])
def test_a_sample_has_the_largest_total_and_the_sections(count):
    sampled = CHART.sample(count)
    assert len(sampled.totals()) == count
    assert max(sampled.totals()) == max(CHART.totals()) == 8000
    assert sum(length for _, length in sampled.sections) == count
    assert set(sampled.totals()) <= set(CHART.totals())


def test_a_spike_of_one_point_is_not_lost():
    spike = [0] * 9999
    spike[1234] = 100
    chart = Chart("memory", {"temporary": spike}, [("forward", 9999)])
    assert [row.strip() for row in rows_of(text_chart(chart))] == ["t"] * 12
    assert "peak 100" in svg_chart(chart)


@pytest.mark.parametrize("width", [20, 80, 133, None])
def test_text_is_within_its_width_and_shows_each_layer_by_its_share(width):
    text = text_chart(CHART, width=width)
    assert max(map(len, text.splitlines())) <= (width or 80)
    rows = rows_of(text)
    drawn = "".join(rows)
    area = sum(CHART.totals()) / (max(CHART.totals()) * POINTS)
    cells = 12 * max(map(len, rows))
    assert len(drawn.replace(" ", "")) / cells == pytest.approx(area, abs=0.06)
    assert drawn.count("w") / drawn.count("a") == pytest.approx(sum(CHART.layers["weights"]) / sum(RISING), rel=0.15)
    legend = text.splitlines()[-1]
    assert "w weights" in " ".join(text.split()) and "nothing" not in legend


def test_letters_are_distinct():
    names = ["activation", "aggregate", "gradient", "a", "!", "?"]
    legend = text_chart(Chart("memory", {name: [1] for name in names})).splitlines()[-1]
    letters = [entry.split()[0] for entry in legend.split(", ")]
    assert len(set(letters)) == len(names) and letters[:3] == ["a", "g", "r"]


@pytest.mark.parametrize("standalone", [True, False])
def test_a_picture_is_well_formed_and_shows_each_layer_by_its_share(standalone):
    root = ElementTree.fromstring(svg_chart(CHART, standalone=standalone))
    paths = root.findall(f"{SVG}path")
    titles = [path.find(f"{SVG}title").text for path in paths]
    assert titles == ["weights: at most 4K", "activations: at most 4K"]
    areas = [polygon_area(path.get("d")) for path in paths]
    assert areas[0] / areas[1] == pytest.approx(sum(CHART.layers["weights"]) / sum(RISING), rel=0.02)
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"forward", "backward", "weights", "activations", "peak 8K", "0"} <= set(texts)
    assert (CHART.title in texts) == standalone == ("light-dark" not in ElementTree.tostring(root, "unicode"))


def polygon_area(outline):
    """Return the area within a path of straight lines, by the shoelace formula."""
    corners = [tuple(map(float, corner.split(","))) for corner in outline[1:-1].split()]
    pairs = zip(corners, [*corners[1:], corners[0]], strict=True)
    return abs(sum(x * next_y - next_x * y for (x, y), (next_x, next_y) in pairs)) / 2


@pytest.mark.parametrize("format", list(FORMATS))
def test_every_format_writes_a_chart(format):
    table = Table("kinds", (text_column("kind"), number_column("bytes")), [("weights", 4000)])
    text = write_document(Document("memory", "Net", [CHART, table]), format, width=80)
    written = check_report(format, text.rstrip("\n") + "\n", "memory")
    if format == "json":
        chart = written["charts"]["memory"]
        assert set(chart["layers"]) == {"weights", "activations"} and max(chart["layers"]["activations"]) == 4000
        assert chart["sections"] == [["forward", 500], ["backward", 500]]
    elif format == "html":
        assert written.count("<svg ") == 2 and "Memory &lt;of&gt; a run" in written
    elif format != "csv":
        assert "w weights, a activations" in written


def test_a_chart_of_zeros_can_be_drawn():
    zeros = Chart("memory", {"weights": [0, 0]}, [("forward", 2)])
    assert rows_of(text_chart(zeros, width=20)) == [""] * 12
    assert ElementTree.fromstring(svg_chart(zeros)).findall(f"{SVG}path") == []
