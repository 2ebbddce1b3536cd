"""Charts of samples and Gantt charts in every format, and the labels of plots."""

import random
from xml.etree import ElementTree

import pytest

from fvflops.reports.document import Chart, Document, Gantt, Slice, Table, number_column, text_column
from fvflops.reports.formats import FORMATS, write_document
from fvflops.reports.pictures.labels import PADDING, Frame, around, leader_of, place_labels
from fvflops.reports.pictures.svg_picture import svg_chart, svg_gantt
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


LANES = {
    "rank 0": [Slice("forward", 0, 1, "0", "forward <0>"), Slice("backward", 2, 4, "0", shade=1)],
    "rank 1": [Slice("forward", 1, 2, "0")],
}
KINDS = {"forward": "forward pass", "backward": "backward pass"}
GANTT = Gantt("pipeline", LANES, KINDS, "Pipeline", length=5)


def test_every_format_has_it():
    document = Document("test", "Net", ["Text.", GANTT])
    for format in FORMATS:
        if format == "csv":  # of tables
            continue
        text = write_document(document, format, width=40)
        check_report(format, f"{text}\n", "test")
        if format == "json":
            assert '"rank 1"' in text
        elif format != "html":
            assert "rank 0  F" in text and "b" in text and "F forward pass, B backward pass" in text


def test_a_cell_has_the_slice_that_fills_most_of_it():
    assert GANTT.end() == 5
    cells = [[piece and piece.kind[0] for piece in GANTT.sample(lane, 5)] for lane in LANES]
    assert cells == [["f", None, "b", "b", None], [None, "f", None, None, None]]
    # A slice that fills less than half of a cell is not seen, several that do together are.
    thin = Gantt("", {"a": [Slice("x", 0.0, 0.3), Slice("x", 0.3, 0.6), Slice("x", 1.0, 1.3)]}, {"x": "x"}, length=2)
    assert [bool(piece) for piece in thin.sample("a", 2)] == [True, False]
    assert Gantt("", {"a": []}, {}).end() == 0


def test_a_page_escapes_names_and_has_a_tooltip_for_each_slice():
    page = svg_gantt(GANTT)
    assert page.count("<rect ") == page.count("<title>") == 3 and "forward &lt;0&gt;: 1 s, from 0 ns" in page
    assert 'x="40%" width="40%"' in page and 'opacity="0.62"' in page


def test_many_slices_are_few_elements():
    slices = [Slice("forward", index, index + 0.5) for index in range(10_000)]
    page = svg_gantt(Gantt("pipeline", {"rank 0": slices}, KINDS))
    assert page.count("<path ") == 1 and "<rect" not in page and len(page) < 300_000


PAGE = Frame(0.0, 0.0, 4.0, 3.0)
SIDES = ((0.1, 0.0), (-0.1, 0.0), (0.0, 0.2), (0.0, -0.2))


def place(points, sizes, offsets=SIDES, *, occupied=(), lines=()):
    return place_labels(points, sizes, page=PAGE, occupied=occupied, lines=lines, rings=[offsets])


def spread(count, seed):
    chance = random.Random(seed)
    points = [(chance.uniform(0.2, 3.8), chance.uniform(0.2, 2.8)) for _ in range(count)]
    sizes = [(chance.uniform(0.2, 1.0), 0.08) for _ in range(count)]
    return points, sizes


def test_no_label_overlaps_another_a_point_or_the_edge():
    for seed in range(20):
        points, sizes = spread(30, seed)
        markers = [around(point, 0.03) for point in points]
        frames = place(points, sizes, occupied=markers)
        placed = [frame for frame in frames if frame is not None]
        assert len(placed) > 10
        for index, frame in enumerate(placed):
            assert frame.is_within(PAGE)
            assert not any(frame.overlaps(other) for other in (*placed[:index], *placed[index + 1 :], *markers))


def test_an_offset_is_to_the_nearest_end_of_a_label():
    for offset, left, bottom in (((0.1, 0.0), 2.1, 0.95), ((-0.1, 0.5), 1.5, 1.45), ((0.0, -0.5), 1.8, 0.45)):
        (frame,) = place([(2.0, 1.0)], [(0.4, 0.1)], [offset])
        assert frame is not None
        assert [round(value, 9) for value in frame] == [left, bottom, round(left + 0.4, 9), round(bottom + 0.1, 9)]


def test_a_label_without_room_has_no_frame():
    assert place([(2.0, 1.0)], [(5.0, 0.1)]) == [None]
    assert place([(2.0, 1.0)], [(0.4, 0.1)], occupied=[PAGE]) == [None]
    # The padding is part of a label.
    wall = Frame(2.5 + PADDING[0] / 2, 0.0, 4.0, 3.0)
    assert place([(2.0, 1.0)], [(0.4, 0.1)], SIDES[:1], occupied=[wall]) == [None]


def test_a_label_avoids_lines_and_close_points_where_it_can():
    def sides(points, lines=()):
        frames = place(points, [(0.5, 0.1)] * len(points), lines=lines)
        return [round(frame.left - x, 2) for frame, (x, _) in zip(frames, points, strict=True)]

    line = ((1.3, 0.9), (1.3, 1.1))
    assert sides([(1.0, 1.0)]) == [0.1] and sides([(1.0, 1.0)], [line]) == [-0.6]
    everywhere = [((0.0, height / 20), (4.0, height / 20)) for height in range(60)]
    assert sides([(1.0, 1.0)], everywhere) == [0.1]
    assert sides([(1.0, 1.0), (1.65, 1.0)])[0] == -0.6  # on the right its end is 0.05 from the second point


def test_no_leader_passes_a_label_or_a_point():
    for seed in range(5):
        points, sizes = spread(30, seed)
        far = [(0.3, up / 10) for up in range(-5, 6)]
        frames = place(points, sizes, far, occupied=[around(point) for point in points])
        assert sum(frame is not None for frame in frames) > 10
        for point, frame in zip(points, frames, strict=True):
            if leader := frame and leader_of(point, frame):
                (x, y), (end, height) = leader
                steps = [(x + share / 100 * (end - x), y + share / 100 * (height - y)) for share in range(101)]
                others = [other for other in frames if other not in (frame, None)]
                others += [around(other, 0.02) for other in points if other != point]
                # A label may be between the squares of a leader and the marker of its own point.
                assert not any(around(step, 0.0).overlaps(other) for step in steps[40:] for other in others)
    assert leader_of((1.0, 1.0), Frame(1.1, 0.9, 2.0, 1.1)) is None
