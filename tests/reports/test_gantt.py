"""Gantt charts: what each format draws of lanes with slices."""

from fvflops.reports.document import Document, Gantt, Slice
from fvflops.reports.formats import FORMATS, write_document
from fvflops.reports.pictures.svg_picture import svg_gantt
from tests.support.reports.report_formats import check_report

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
