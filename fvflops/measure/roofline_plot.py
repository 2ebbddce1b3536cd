"""Plot a roofline: modules or operators under the roofs of a device, on logarithmic scales."""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from fvflops import paths
from fvflops.measure.op_roofline import DEPTH, VIEWS, Load, Roofline, sum_by
from fvflops.reports.pictures import colours, picture
from fvflops.reports.pictures.labels import Frame, around, circle, leader_of, place_labels
from fvflops.trace.module_tree import innermost, modules_above
from fvflops.units import format_percent, format_quantity, format_seconds, format_short
from fvflops.views.summary_rows import check_view

# Inches, and points of a font.
WIDTH, HEIGHT = 7.0, 4.4
_TEXT, _TITLE = 6.5, 9.0
_LABELS = 16
_LARGEST = 220.0  # square points of a marker with a share of 100% of the time
_SMALLEST = 14.0
# Offsets at which the label of a point is tried, right and up, in inches: near ones, then such that need a leader.
_RINGS = (
    [(0.1 * right, 0.11 * up) for right, up in ((1, -1), (1, 0), (0, -1), (-1, 1), (-1, 0), (0, 1), (1, 1), (-1, -1))],
    *map(circle, (0.18, 0.27, 0.38, 0.52, 0.7)),
)
_TICKS = 8  # of a scale
_NUMBER = re.compile(r"(?<![^.])\d+(?![^. ])")


class Point(NamedTuple):
    """A point of the plot: `times` modules or ops of one class, equal loads, and names that differ only in numbers."""

    name: str
    group: str
    load: Load
    times: int = 1


def save(
    roofline: Roofline,
    path: str | os.PathLike[str],
    *,
    by: str = "module",
    depth: int | None = None,
    roofs: Mapping[str, int] | None = None,
) -> None:
    """Write the figure of `draw_roofline` to a path, .svg or .png.

    Another ending raises PlotError, a path that cannot be written OSError, before drawing.
    """
    kind = picture.prepare(os.fspath(path))
    paths.write_bytes(os.fspath(path), picture.encode(draw_roofline(roofline, by=by, depth=depth, roofs=roofs), kind))


def draw_roofline(
    roofline: Roofline, *, by: str = "module", depth: int | None = None, roofs: Mapping[str, int] | None = None
) -> Any:
    """Return a Figure, 7 inches wide, with the attainable FLOP/s over FLOP/byte of each point.

    `by` is "module" (`depth` levels below the root, 3 if None, or a leaf above that), "operator" or "op", the calls of
    one signature in one module and phase. A point's area is its share of the least time; layers with equal loads whose
    names differ only in numbers are one point. `roofs` are further peaks to draw, dtype → FLOP/s. An unknown view
    raises ValueError, missing matplotlib (the extra `plot`) PlotError.
    """
    check_view(by, VIEWS, "the roofline")
    total = roofline.total()
    points = find_points(roofline, by=by, depth=depth)
    figure = picture.make_figure(WIDTH, HEIGHT)
    figure.patch.set_facecolor("white")
    # Operators are labelled at their points, without a legend.
    bottom = 0.1 if by == "operator" else 0.185
    axes = figure.add_axes((0.085, bottom, 0.9, 0.895 - bottom))
    shown = {**(roofs or {}), **roofline.peaks}
    _set_scales(axes, roofline, points, shown)
    _draw_roofs(axes, roofline, shown)
    sums: Counter[str] = Counter()
    for point in points:
        sums[point.group] += math.ceil(point.load.seconds * point.times * 1e15)
    palette = colours.group(name for name, _ in sums.most_common())
    for point in points:
        axes.scatter(
            [point.load.intensity],
            [_height(point.load)],
            s=_SMALLEST + _LARGEST * point.load.seconds * point.times / total.seconds,
            color=palette.of(point.group),
            edgecolors=colours.colour("ink"),
            linewidths=0.5,
            alpha=0.9,
            zorder=3,
            label=point.name,
        )
    _label(axes, points)
    _write_texts(figure, axes, roofline, total)
    _draw_legend(figure, axes, points, palette, by)
    return figure


def find_points(roofline: Roofline, *, by: str = "module", depth: int | None = None) -> list[Point]:
    """Return the points, the longest time first; without FLOPs, bytes or time there is no point."""
    if by == "operator":
        loads = [(name, name, load) for name, load in roofline.by_operator().items()]
    elif by == "op":
        loads = [(f"{innermost(one.scope)} {one.label}".strip(), one.label, one.load) for one in roofline.entries]
    else:
        loads = _cut_tree(roofline, DEPTH if depth is None else depth)
    merged: dict[tuple[str, str, Load], list[str]] = {}
    for name, group, load in loads:
        if load.flops and load.bytes and load.seconds:
            merged.setdefault((_NUMBER.sub("*", name), group, load), []).append(name)
    points = [
        Point(names[0] if len(names) == 1 else pattern, group, load, len(names))
        for (pattern, group, load), names in merged.items()
    ]
    return sorted(points, key=lambda point: -point.load.seconds * point.times)


def _cut_tree(roofline: Roofline, depth: int) -> list[tuple[str, str, Load]]:
    """Return (name, class, load) of the modules at a depth, of leaves above it, and of the other modules' own ops."""
    loads = sum_by((".".join(innermost(one.scope).split(".")[:depth]), one.load) for one in roofline.entries)
    parents = {above for name in loads for above in modules_above(name)}
    classes = {name: module.class_name for name, module in roofline.modules.by_name.items()}
    own = {name: (name or "model") + (" itself" if name in parents else "") for name in loads}
    return [(own[name], classes.get(name, ""), load) for name, load in loads.items()]


def _set_scales(axes: Any, roofline: Roofline, points: list[Point], roofs: Mapping[str, int]) -> None:
    ridges = [peak / roofline.bandwidth for peak in roofs.values()]
    left = min([point.load.intensity for point in points] + [min(ridges, default=1) / 10])
    right = max([point.load.intensity for point in points] + [max(ridges, default=1) * 4])
    heights = [_height(point.load) for point in points] + [left * roofline.bandwidth]
    axes.set(xscale="log", yscale="log", xlim=(left / 2, right * 2))
    axes.set_ylim(min(heights) / 2, max([*roofs.values(), *heights]) * 2.2)


def _height(load: Load) -> float:
    return load.flops / load.seconds


def _draw_roofs(axes: Any, roofline: Roofline, roofs: Mapping[str, int]) -> None:
    quiet, ink = colours.colour("quiet"), colours.colour("ink")
    left, right = axes.get_xlim()
    by_peak: dict[int, list[str]] = {}
    for dtype, peak in roofs.items():
        by_peak.setdefault(peak, []).append(dtype)
    highest = max(by_peak, default=0)
    if highest:
        ridge = highest / roofline.bandwidth
        axes.plot([left, ridge], [left * roofline.bandwidth, highest], color=quiet, linewidth=1, label="memory")
    for peak, dtypes in by_peak.items():
        used, names = any(dtype in roofline.peaks for dtype in dtypes), ", ".join(dtypes)
        colour, width, style = (ink, 1.2, "-") if used else (quiet, 0.7, (0, (4, 3)))
        ends = [peak / roofline.bandwidth, right]
        axes.plot(ends, [peak, peak], color=colour, linewidth=width, linestyle=style, label=names)
        text = picture.as_text(f"{names}: {_format_rate(peak, 'FLOP')}")
        place = {"textcoords": "offset points", "ha": "right"}
        axes.annotate(text, (right, peak), (-3, 2), **place, fontsize=_TEXT, color=colour)


def _format_rate(rate: int, unit: str) -> str:
    number, prefix = re.fullmatch(r"(.*?)([A-Z]?)", format_short(rate)).groups()  # type: ignore[union-attr]
    return f"{number} {prefix}{unit}/s"


def _label(axes: Any, points: list[Point]) -> None:
    """Label points where there is room, the longest time first."""
    from matplotlib.patheffects import withStroke

    dpi = axes.figure.dpi
    extent = axes.get_window_extent()
    page = Frame(extent.x0 / dpi, extent.y0 / dpi, extent.x1 / dpi, extent.y1 / dpi)
    positions = [axes.transData.transform((point.load.intensity, _height(point.load))) / dpi for point in points]
    height = _TEXT / 72
    # Labels of the roofs.
    roofs = [
        Frame(page.right - 1.15, y, page.right, y + height + 0.04)
        for line in axes.lines[1:]
        for y in [axes.transData.transform((1, line.get_ydata()[-1]))[1] / dpi]
    ]
    labelled = points[:_LABELS]
    lines: list[Any] = [tuple(map(tuple, axes.transData.transform(line.get_xydata()) / dpi)) for line in axes.lines]
    frames = place_labels(
        positions[:_LABELS],
        [(picture.width_of(_label_text(point), _TEXT), height) for point in labelled],
        page=page,
        occupied=[*(around(position) for position in positions), *roofs],
        lines=lines,
        rings=_RINGS,
    )
    for point, (x, y), frame in zip(labelled, positions, frames, strict=False):
        if frame is not None:
            if leader := leader_of((x, y), frame):
                axes.annotate(
                    "",
                    (point.load.intensity, _height(point.load)),
                    ((leader[1][0] - x) * 72, (leader[1][1] - y) * 72),
                    textcoords="offset points",
                    arrowprops={"arrowstyle": "-", "linewidth": 0.4, "color": colours.colour("quiet"), "shrinkB": 2},
                    zorder=2.5,
                )
            axes.annotate(
                picture.escape(_label_text(point)),
                (point.load.intensity, _height(point.load)),
                ((frame.left - x) * 72, (frame.bottom - y) * 72),
                textcoords="offset points",
                fontsize=_TEXT,
                color=colours.colour("ink"),
                zorder=4,
                path_effects=[withStroke(linewidth=2, foreground="white")],
            )


def _label_text(point: Point) -> str:
    name = picture.fit(picture.plain(point.name), 1.8, _TEXT)
    return name if point.times == 1 else f"{name} ×{point.times}"


def _write_texts(figure: Any, axes: Any, roofline: Roofline, total: Load) -> None:
    root = picture.plain(roofline.modules.root.class_name) or "the model"
    title = f"{root} on {picture.plain(roofline.device)}"
    bound = format_percent(total.compute_bound, total.seconds) or "0.0%"
    facts = [
        f"least time {format_seconds(total.seconds)}, {bound} compute-bound",
        f"memory bandwidth {_format_rate(roofline.bandwidth, 'B')}",
        f"convention {roofline.table}",
    ]
    if roofline.unsupported:
        facts.append(f"{format_quantity(sum(roofline.unsupported.values()), 'call')} of unsupported ops not counted")
    if roofline.without_peak:
        facts.append(f"no peak for {', '.join(roofline.without_peak)}")
    heading = title, _TITLE, 0.12, {"weight": "bold", "color": colours.colour("ink")}
    below = " · ".join(facts), _TEXT, 0.31, {"color": colours.colour("quiet")}
    for text, size, top, style in (heading, below):
        shown = picture.escape(picture.fit(picture.plain(text), WIDTH * 0.88, size))
        figure.text(0.085, 1 - top / HEIGHT, shown, fontsize=size, va="center", **style)
    axes.set_xlabel("arithmetic intensity (FLOP/byte)", fontsize=7)
    axes.set_ylabel("attainable FLOP/s", fontsize=7)
    for scale in (axes.xaxis, axes.yaxis):
        picture.label_logarithmic(scale, format_short, ticks=_TICKS)
    axes.tick_params(labelsize=_TEXT, colors=colours.colour("quiet"), which="both")
    axes.grid(visible=True, color=colours.colour("line"), linewidth=0.5)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _draw_legend(figure: Any, axes: Any, points: list[Point], palette: colours.Groups, by: str) -> None:
    from matplotlib.lines import Line2D

    if not points:
        axes.text(0.5, 0.5, "no FLOPs", transform=axes.transAxes, ha="center", fontsize=8)
    if not points or by == "operator":  # points have their operators as labels
        return
    groups = {point.group for point in points}
    entries = [(picture.fit(picture.plain(name), 1.6, _TEXT), colour) for name, colour in palette.named.items()]
    if groups - palette.named.keys():
        entries.append(("others", palette.others))
    ink = colours.colour("ink")
    handles = [
        Line2D([], [], marker="o", linestyle="", markersize=5, color=colour, mec=ink, mew=0.5) for _, colour in entries
    ]
    figure.legend(
        handles,
        [picture.escape(text) or "(no class)" for text, _ in entries],
        loc="lower left",
        bbox_to_anchor=(0.07, 0.0),
        ncols=6,
        fontsize=_TEXT,
        frameon=False,
        handletextpad=0.2,
        columnspacing=1.2,
    )
