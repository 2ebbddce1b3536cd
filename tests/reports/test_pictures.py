"""Pictures: an icicle's rectangles and a roofline's points against the counts, hostile names, and bad paths."""

import re
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch import nn

from fvflops import Device, FlopCountAnalysis, cost_of
from fvflops.analysis.model_analysis import analysed_run
from fvflops.cli import main
from fvflops.comparison import scaling_plot
from fvflops.measure import roofline_plot
from fvflops.measure.op_roofline import roofline
from fvflops.reports.pictures import colours, icicle, picture
from fvflops.reports.pictures.picture import PlotError
from fvflops.trace import ModuleInfo, ModuleTree
from fvflops.views.breakdown import Breakdown, Cell, Measure, read_breakdown
from tests.support.models.parts import Applied

pytest.importorskip("matplotlib", reason="pictures are an extra, fvflops[plot]")

SLOW = Device("slow", matrix={"bf16": 10e9}, vector={"fp32": 1e9}, bandwidth=1e9, source="made up")
HOSTILE = "</script>&<b>$\\frac{x}{$\x1b[31m\n\u202e\u4e2d" + "x" * 10_000


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.small = nn.Linear(10, 10, bias=False)
        self.block = nn.Sequential(nn.Linear(10, 30, bias=False), nn.Linear(30, 10, bias=False))

    def forward(self, x):
        x = self.block(self.small(x))
        return x @ x.T


def read_boxes(figure):
    """Return (name, level) → (start, width) of the rectangles of an icicle that are modules."""
    (axes,) = figure.axes
    return {
        (patch.get_label(), patch.get_y()): (patch.get_x(), patch.get_width())
        for patch in axes.patches
        if not patch.get_hatch()
    }


def read_texts(figure):
    return [text.get_text() for text in (*figure.texts, *(text for axes in figure.axes for text in axes.texts))]


def make_breakdown(names, values, **options):
    modules = {name: ModuleInfo(name, name, name or "Net") for name in ("", *names)}
    return Breakdown(ModuleTree(modules), {"flops": Measure("FLOPs", values, **options)})


def test_a_module_is_as_wide_as_its_flops():
    # 10 rows: 1000 + 3000 + 3000 multiply-adds, and 10 * 10 * 10 of the model itself.
    figure = icicle.draw_icicle(read_breakdown(analysed_run(FlopCountAnalysis(Net(), torch.ones(10, 10)))))
    boxes = read_boxes(figure)
    expected = {
        ("", 0): (0, 1),
        ("small", 1): (0, 1 / 8),
        ("block", 1): (1 / 8, 6 / 8),
        ("block.0", 2): (1 / 8, 3 / 8),
        ("block.1", 2): (4 / 8, 3 / 8),
    }
    assert boxes.keys() == expected.keys()
    assert all(boxes[key] == pytest.approx(value) for key, value in expected.items())
    (own,) = [patch for patch in figure.axes[0].patches if patch.get_hatch()]
    assert (own.get_x(), own.get_width()) == pytest.approx((7 / 8, 1 / 8)) and "itself" in read_texts(figure)
    assert figure.get_figwidth() == 7 and "FLOPs of Net: 8K" in read_texts(figure)
    assert min(text.get_fontsize() for text in (*figure.texts, *figure.axes[0].texts)) >= 6


def test_another_measure_and_a_depth():
    breakdown = read_breakdown(analysed_run(FlopCountAnalysis(Net(), torch.ones(10, 10))))
    boxes = read_boxes(icicle.draw_icicle(breakdown, measure="parameters", depth=1))
    assert boxes == {
        ("", 0): (0, 1),
        ("small", 1): (0, pytest.approx(1 / 7)),
        ("block", 1): pytest.approx((1 / 7, 6 / 7)),
    }
    with pytest.raises(ValueError, match="measure must be one of flops, macs"):
        icicle.draw_icicle(breakdown, measure="flop")


def test_many_narrow_modules_are_drawn_together_and_no_width_is_lost():
    names = [f"m{index}" for index in range(5000)]
    figure = icicle.draw_icicle(
        make_breakdown(names, {Cell(name): 2 if name == "m0" else 1 for name in names[:-1]} | {Cell("m4999"): 5000})
    )
    patches = [patch for patch in figure.axes[0].patches if patch.get_y() == 1]
    assert sorted(patch.get_label() for patch in patches) == ["m0", "m4999"]
    assert sum(patch.get_width() for patch in patches) == pytest.approx(1)
    assert "4999 more" in read_texts(figure)


def test_a_class_has_the_same_colour_as_on_the_html_page():
    figure = icicle.draw_icicle(make_breakdown(["a", "b"], {Cell("a"): 1, Cell("b"): 3}))
    found = {patch.get_label(): patch.get_facecolor() for patch in figure.axes[0].patches}
    from matplotlib.colors import to_rgba

    # The class with most FLOPs has the first colour.
    assert found["b"] == to_rgba(colours.colour("c0")) and found["a"] == to_rgba(colours.colour("c1"))


def test_unsupported_ops_are_named_and_a_model_without_flops_is_drawn():
    texts = read_texts(
        icicle.draw_icicle(make_breakdown(["a"], {Cell("a"): 3}, unsupported={Cell("a", "", "sort"): 2}))
    )
    assert "FLOPs of Net: ≥ 3" in texts and any("2 calls of unsupported operators" in text for text in texts)
    assert read_boxes(icicle.draw_icicle(make_breakdown(["a"], {}))) == {("", 0): (0, 1)}


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_a_hostile_name_is_text(kind, recwarn):
    name = HOSTILE.replace(".", "")
    modules = {"": ModuleInfo("", "", HOSTILE), name: ModuleInfo(name, name, HOSTILE)}
    breakdown = Breakdown(ModuleTree(modules), {"flops": Measure("FLOPs", {Cell(name): 1})}, about={"inputs": HOSTILE})
    figure = icicle.draw_icicle(breakdown)
    data = picture.encode(figure, kind)
    assert data == picture.encode(figure, kind) and not list(recwarn) and len(data) < 10**6
    assert all(text.isprintable() and "\u4e2d" not in text and len(text) < 400 for text in read_texts(figure))
    if kind == "svg":
        tags = {element.tag.rpartition("}")[2] for element in ElementTree.fromstring(data).iter()}
        assert "path" in tags and not tags & {"script", "b", "foreignObject", "image", "a"}
        assert b"<script" not in data and b"\x1b" not in data


def test_names_are_truncated_to_the_available_width():
    assert picture.fit("short", 3, 7) == "short" and picture.fit("anything", 0.05, 7) == ""
    cut = picture.fit("a.long.name" * 9, 1, 7)
    assert cut.endswith("…") and 0.9 < picture.width_of(cut, 7) <= 1
    assert picture.as_text("$x$") == r"\$x\$" and picture.plain("\x1b\u202e") == "\\x1b\\u202e"


def test_points_of_a_roofline_lie_at_their_loads_and_under_the_roofs():
    model = nn.Sequential(*(nn.Linear(100, 100, bias=False) for _ in range(3)), nn.ReLU())
    drawn = roofline(FlopCountAnalysis(model, torch.ones(10, 100), table="exact"), device=SLOW)
    points = roofline_plot.find_points(drawn)
    # 200,000 FLOPs over 48,000 bytes each; three equal layers are one point.
    assert [(point.name, point.group, point.times) for point in points] == [("*", "Linear", 3), ("3", "ReLU", 1)]
    assert points[0].load.intensity == pytest.approx(200 / 48) and points[1].load.intensity == 1 / 8
    assert sum(point.load.seconds * point.times for point in points) == pytest.approx(drawn.total().seconds)
    figure = roofline_plot.draw_roofline(drawn, roofs={"bf16": 10**10})
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale(), figure.get_figwidth()) == ("log", "log", 7)
    placed = {group.get_label(): tuple(group.get_offsets()[0]) for group in axes.collections}
    assert placed == {"*": pytest.approx((200 / 48, 1e9)), "3": pytest.approx((1 / 8, 1e9 / 8))}
    roofs = {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in axes.lines}
    assert roofs["fp32"][0] == (1.0, 1e9) and roofs["bf16"][0] == (10.0, 1e10)
    assert all(y == pytest.approx(x * 1e9) for x, y in roofs["memory"])
    texts = read_texts(figure)
    assert {"* ×3", "3", "fp32: 1 GFLOP/s", "bf16: 10 GFLOP/s"} <= set(texts)
    assert [point.name for point in roofline_plot.find_points(drawn, by="operator")] == ["linear", "relu"]
    assert sum(point.times for point in roofline_plot.find_points(drawn, by="op")) == 4


def test_modules_replace_their_parents_at_a_larger_depth():
    model = nn.Sequential(nn.Sequential(nn.Linear(10, 20)), nn.Linear(20, 10))
    drawn = roofline(FlopCountAnalysis(model, torch.ones(10, 10), table="exact"), device=SLOW)
    names = {depth: sorted(point.name for point in roofline_plot.find_points(drawn, depth=depth)) for depth in range(3)}
    assert names == {0: ["model"], 1: ["0", "1"], 2: ["0.0", "1"]}
    both = roofline(FlopCountAnalysis(Net(), torch.ones(10, 10), table="exact"), device=SLOW)
    for depth in range(4):
        points = roofline_plot.find_points(both, depth=depth)
        assert sum(point.load.flops * point.times for point in points) == both.total().flops == 16_000
        assert ("model itself" in [point.name for point in points]) == (depth > 0)


def test_a_roofline_without_flops_says_so():
    drawn = roofline(FlopCountAnalysis(nn.Flatten(), torch.ones(2, 3, 4), table="exact"), device=SLOW)
    assert "no FLOPs" in read_texts(roofline_plot.draw_roofline(drawn))
    with pytest.raises(ValueError, match="the roofline"):
        roofline_plot.draw_roofline(drawn, by="phase")


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_the_commands_write_pictures(kind, capsys, tmp_path):
    tree, roof = tmp_path / f"tree.{kind}", tmp_path / f"roof.{kind}"
    assert main(["count", "zoo:lenet5", "--format", kind, "--output", str(tree)]) == 0
    assert capsys.readouterr() == ("", "")
    assert main(["roofline", "zoo:lenet5", "--device", "H100", "--plot", str(roof)]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("zoo:lenet5 on H100 SXM: at least ") and err == ""
    for file in (tree, roof):
        data = file.read_bytes()
        assert data.startswith(b"\x89PNG") if kind == "png" else b"<svg" in data and b"<script" not in data


def test_an_analysis_writes_a_picture_of_its_counts(tmp_path):
    path = tmp_path / "net.svg"
    FlopCountAnalysis(Net(), torch.ones(10, 10)).to_picture(path, depth=1)
    assert "FLOPs of Net: 8K" in path.read_text()
    FlopCountAnalysis(Net(), torch.ones(10, 10)).to_picture(path, measure="parameters")
    assert "Parameters of Net: 700" in path.read_text()


def unrun(self, x):
    raise AssertionError("it was run")


def test_a_picture_that_cannot_be_written_raises_before_the_model_runs(tmp_path, monkeypatch):
    analysis = FlopCountAnalysis(Applied(unrun), torch.ones(1))
    with pytest.raises(PlotError, match=r"net.pdf: a plot must be an .svg or .png file"):
        analysis.to_picture("net.pdf")
    with pytest.raises(OSError, match=r"/dev/null/net.svg cannot be written"):
        analysis.to_picture("/dev/null/net.svg")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(PlotError, match=r"a plot needs matplotlib .*pip install 'fvflops\[plot\]'"):
        analysis.to_picture(tmp_path / "net.svg")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "argv",
    [["count", "none:x", "--format", "svg", "--output"], ["roofline", "none:x", "--plot"]],
    ids=["count", "roofline"],
)
def test_missing_matplotlib_is_reported_before_the_model_is_loaded(capsys, monkeypatch, tmp_path, argv):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*argv, str(tmp_path / "x.svg")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "a plot needs matplotlib" in err and err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_a_scaling_plot_distinguishes_fitted_and_held_out_counts_and_keeps_its_text():
    cost = cost_of(nn.Linear(4, 4), lambda batch: torch.ones(batch, 4), vary={"batch": (1, 64)})
    text = scaling_plot.draw_scaling([cost], kind="svg", title="a very long name " * 20).decode()
    shown = re.findall(r"<text[^>]*>([^<]*)</text>", text)
    assert {"16·B", "counted, fitted", "counted, held out", "batch (B)", "FLOPs"} <= set(shown)
    assert any(label.endswith("…") for label in shown), "a title is one line"


def test_labels_of_a_roofline_do_not_overlap_its_roofs():
    drawn = roofline(FlopCountAnalysis(Net(), torch.ones(10, 10), table="exact"), device=SLOW)
    figure = roofline_plot.draw_roofline(drawn)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    names = {point.name for point in roofline_plot.find_points(drawn)}
    labels = [text for text in axes.texts if text.get_text() in names]
    assert labels
    for text in labels:
        box = text.get_window_extent()
        for line in axes.lines:
            (x1, y1), (x2, y2) = axes.transData.transform(line.get_xydata())
            points = [(x1 + (x2 - x1) * share / 500, y1 + (y2 - y1) * share / 500) for share in range(501)]
            assert not any(box.x0 < x < box.x1 and box.y0 + 1 < y < box.y1 - 1 for x, y in points), text.get_text()
