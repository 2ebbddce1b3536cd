"""The Pareto front against its definition, and the plot: scales, labels and what is written."""

import random
import re

import pytest

pytest.importorskip("matplotlib", reason="matplotlib, of the extra `plot`, is not installed")

from fvflops.reports.document import Table, number_column, text_column
from fvflops.sweep import pareto_plot
from fvflops.sweep.pareto_plot import draw_pareto, pareto_front
from fvflops.units import format_parameters


def dominates(first, second, lower):
    signed = [(one, other) if less else (-one, -other) for one, other, less in zip(first, second, lower, strict=True)]
    return all(one <= other for one, other in signed) and any(one < other for one, other in signed)


def brute_force(points, lower):
    return {index for index, point in enumerate(points) if not any(dominates(other, point, lower) for other in points)}


@pytest.mark.parametrize("lower", [(True, True), (True, False), (False, True), (False, False)])
def test_the_front_is_that_of_its_definition(lower):
    chance = random.Random(str(lower))
    for size in [0, 1, 2, 3, 5, 8, 30] * 20:
        # Few values: many are equal in one or both coordinates.
        points = [(chance.randint(0, 6), chance.randint(0, 6)) for _ in range(size)]
        front = pareto_front(points, lower=lower)
        assert set(front) == brute_force(points, lower) and len(front) == len(set(front))
        assert [points[index][0] for index in front] == sorted(points[index][0] for index in front)


def test_the_brute_force_sees_a_wrong_front():
    points = [(1, 1), (2, 2), (1, 1)]
    assert brute_force(points, (True, True)) == {0, 2} and brute_force(points, (False, True)) == {0, 1, 2}


def test_huge_integers_are_compared_exactly():
    assert pareto_front([(2**70, 2**70), (2**70 + 1, 2**70 - 1), (2**70 + 1, 2**70)]) == [0, 1]


def test_nan_has_no_place():
    with pytest.raises(ValueError, match="NaN"):
        pareto_front([(1.0, float("nan"))])


def make_table(rows):
    columns = (
        text_column("model"),
        number_column("parameters", "Parameters", form=format_parameters),
        number_column("flops", "FLOPs"),
        number_column("top1", "top-1 (%)", form=lambda value: f"{value:.1f}"),
        text_column("note"),
    )
    return Table("models", columns, [(*row, "") for row in rows])


NETS = [
    ("timm:mobilenetv3_large_100", 5_483_032, 217_000_000, 75.8),
    ("timm:efficientnet_b0", 5_288_548, 386_000_000, 77.7),
    ("timm:resnet18", 11_689_512, 1_814_000_000, 71.5),
    ("timm:resnet50", 25_557_032, 4_111_000_000, 80.4),
    ("timm:deit_small_patch16_224", 22_050_664, 4_608_000_000, 79.9),
    ("timm:convnext_tiny", 28_589_128, 4_456_000_000, 82.1),
    ("timm:vit_base_patch16_224", 86_567_656, 17_582_000_000, 81.8),
    ("timm:swin_base_patch4_window7_224", 87_768_224, 15_467_000_000, 83.6),
]


@pytest.fixture
def drawn(monkeypatch):
    """Collect the figures that are drawn, and return (figure, picture, front)."""
    figures = []
    encode = pareto_plot.encode
    monkeypatch.setattr(pareto_plot, "encode", lambda figure, kind: figures.append(figure) or encode(figure, kind))

    def draw(rows, kind="svg", **options):
        picture, front = draw_pareto(make_table(rows), kind=kind, **{"x": "flops", "y": "top1", **options})
        return figures[-1], picture, front

    return draw


def texts(figure):
    """Return the labels of the points, without empty ones, with their rectangles in pixels."""
    (axes,) = figure.axes
    return {text.get_text(): text.get_window_extent() for text in axes.texts if text.get_text()}


def overlap(first, second):
    return first.x0 < second.x1 and second.x0 < first.x1 and first.y0 < second.y1 and second.y0 < first.y1


def test_eight_models_are_all_labelled_without_overlaps(drawn):
    for x, y in (("flops", "top1"), ("parameters", "top1"), ("parameters", "flops")):
        figure, _, front = drawn(NETS, x=x, y=y, higher=["top1"])
        labels = texts(figure)
        assert set(labels) == {name.removeprefix("timm:") for name, *_ in NETS}
        boxes = list(labels.values())
        for index, box in enumerate(boxes):
            assert not any(overlap(box, other) for other in boxes[index + 1 :])
            page = figure.bbox
            assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
        (axes,) = figure.axes
        markers = [axes.transData.transform(point) for line in axes.lines[1:] for point in line.get_xydata()]
        assert len(markers) == len(NETS)
        assert not any(box.contains(*marker) for box in boxes for marker in markers)
        points = [row[1:] for row in NETS]
        at = [{"parameters": row[0], "flops": row[1], "top1": row[2]} for row in points]
        best = brute_force([(row[x], row[y]) for row in at], (True, y != "top1"))
        assert set(front) == {NETS[index][0] for index in best}


def test_random_models_have_no_overlapping_labels(drawn):
    chance = random.Random(0)
    rows = [
        (f"net_{'x' * chance.randint(0, 12)}{number}", 1, 10 ** chance.uniform(8, 11), chance.uniform(60, 90))
        for number in range(24)
    ]
    figure, *_ = drawn(rows, higher=["top1"])
    boxes = list(texts(figure).values())
    assert len(boxes) >= 20
    assert not any(overlap(box, other) for index, box in enumerate(boxes) for other in boxes[index + 1 :])


def test_the_front_alone_is_labelled_among_many(drawn):
    chance = random.Random(0)
    rows = [(f"net{number}", 1, 10 ** chance.uniform(8, 12), chance.uniform(60, 90)) for number in range(400)]
    figure, _, front = drawn(rows, higher=["top1"])
    assert set(texts(figure)) <= set(front) and len(front) > 2


def test_a_scale_is_logarithmic_where_values_span_more_than_a_decade(drawn):
    figure, *_ = drawn(NETS, higher=["top1"])
    assert (figure.axes[0].get_xscale(), figure.axes[0].get_yscale()) == ("log", "linear")
    figure, *_ = drawn([("a", 0, 10**6, 1), ("b", 10**9, 2 * 10**6, 2)], x="parameters", y="flops")
    # Nothing is zero on a logarithmic scale.
    assert (figure.axes[0].get_xscale(), figure.axes[0].get_yscale()) == ("linear", "linear")


def test_ticks_and_axes_have_units(drawn):
    figure, picture, _ = drawn(NETS, x="parameters", y="flops", titles={"flops": "FLOPs (1 per multiply-add)"})
    (axes,) = figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("Parameters", "FLOPs (1 per multiply-add)")
    ticks = [label.get_text() for label in axes.get_xticklabels()]
    assert {"10M", "20M", "50M"} <= set(ticks) and all(re.fullmatch(r"\d+(\.\d)?M", tick) for tick in ticks if tick)
    assert b">resnet50<" in picture and b">Pareto front<" in picture


@pytest.mark.parametrize("rows", [NETS[:1], [NETS[0], NETS[0]], [("net", 0, 0, 0.0), ("other", 0, 0, 0.0)]])
def test_few_or_equal_points_are_drawn(drawn, rows):
    for kind in ("svg", "png"):
        _, picture, front = drawn(rows, kind=kind)
        assert front == [name for name, *_ in rows] and picture[:5] in (b"<?xml", b"\x89PNG\r")


def test_rows_without_a_value_have_no_point(drawn):
    figure, _, front = drawn([*NETS, ("timm:failed", None, None, 99.0), ("timm:unknown", 1, 1, None)], higher=["top1"])
    assert not {"failed", "unknown"} & set(texts(figure)) and "timm:failed" not in front
    with pytest.raises(ValueError, match="no model has both flops and top1"):
        drawn([("timm:failed", None, None, 99.0)])


def test_any_name_is_drawn_as_text(drawn):
    names = ["a$b$", "x_1^2", "\\frac", "日本語", "a\nb", "r" * 500, "timm:", "<b>&"]
    rows = [(name, number + 1, 10**number, 50.0 + number) for number, name in enumerate(names)]
    figure, picture, front = drawn(rows, higher=["top1"])
    assert front == names and len(texts(figure)) >= 6 and b"<b>" not in picture


def test_a_picture_is_the_same_each_time(drawn):
    assert drawn(NETS[:4], higher=["top1"])[1] == drawn(NETS[:4], higher=["top1"])[1]
