"""An icicle plot of the module tree, in which the width of a module is its share of a measure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

from fvflops.reports.pictures import colours
from fvflops.reports.pictures.picture import encode, escape, fit, make_figure, plain, width_of
from fvflops.trace import ModuleInfo
from fvflops.trace.module_tree import modules_above
from fvflops.units import format_percent, format_quantity
from fvflops.views.breakdown import Breakdown, Measure, format_value, sum_measures

# Inches, and points of a font.
WIDTH = 7.0
_MARGIN = 0.06
_ROW = 0.24
_HEAD = 0.44
_LEGEND_ROW = 0.17
_MIN_WIDTH = 0.014  # narrower boxes are merged with their neighbours
_MIN_TRUNCATED_WIDTH = 0.25  # in a narrower box a name that does not fit is dropped
_LEVELS = 16
_NAME, _SHARE, _TITLE, _SMALL = 7.0, 6.5, 9.0, 6.5


class Box(NamedTuple):
    """A rectangle; its kind is "module", "self" without submodules, or "rest" of `modules` too narrow to draw."""

    module: str
    kind: str
    level: int
    start: float
    width: float
    modules: int = 1


def draw_icicle(breakdown: Breakdown, *, measure: str = "flops", depth: int | None = None) -> Any:
    """Return a Figure, 7 inches wide, of one measure of a breakdown, down to `depth` levels below the root.

    Rectangles are labelled with module names. A measure that the breakdown lacks raises ValueError; without matplotlib,
    the extra `plot`, PlotError is raised.
    """
    if measure not in breakdown.measures:
        raise ValueError(f"measure must be one of {', '.join(breakdown.measures)}; got {measure!r}")
    layout = _Layout(breakdown, breakdown.measures[measure])
    boxes = list(layout.boxes(_LEVELS if depth is None else depth))
    palette = colours.group(layout.rank_classes(boxes))
    drawn = {layout.class_of(box.module) for box in boxes if box.module and box.kind == "module"}
    entries = [(plain(name) or "(no class)", colour) for name, colour in palette.named.items() if name in drawn]
    entries += [("others", palette.others)] if drawn - palette.named.keys() else []
    lines = _wrap_legend(entries)
    notes = _note_unsupported(layout.measure)
    levels = 1 + max(box.level for box in boxes)
    below = _LEGEND_ROW * (len(lines) + len(notes)) + 2 * _MARGIN
    height = _HEAD + _ROW * levels + below
    figure = make_figure(WIDTH, height)
    figure.patch.set_facecolor("white")
    _write_title(figure, breakdown, layout)
    axes = figure.add_axes(
        (_MARGIN / WIDTH, below / height, 1 - 2 * _MARGIN / WIDTH, _ROW * levels / height),
        xlim=(0, 1),
        ylim=(levels, 0),
    )
    axes.set_axis_off()
    for box in boxes:
        _draw_box(axes, layout, box, palette)
    _write_legend(figure, lines, notes)
    return figure


def _render(breakdown: Breakdown, *, measure: str = "flops", depth: int | None = None, kind: str) -> bytes:
    return encode(draw_icicle(breakdown, measure=measure, depth=depth), kind)


render_svg, render_png = partial(_render, kind="svg"), partial(_render, kind="png")


class _Layout:
    """Positions of the modules of a breakdown in one of its measures."""

    def __init__(self, breakdown: Breakdown, measure: Measure) -> None:
        self.measure = measure
        self.by_name: dict[str, ModuleInfo] = {module.name: module for module in breakdown.modules.modules()}
        self.total = sum_measures(measure.values)
        self.unsupported = sum_measures(measure.unsupported)
        self.children: dict[str, list[str]] = {}
        self._self_values: Counter[str] = Counter()
        for cell, value in measure.values.items():
            self._self_values[cell.module] += value
        for name in filter(None, self.by_name):
            parent = next((above for above in reversed(modules_above(name)) if above in self.by_name), "")
            self.children.setdefault(parent, []).append(name)

    def boxes(self, depth: int) -> Iterator[Box]:
        """Yield the boxes, modules before their submodules."""
        stack = [Box("", "module", 0, 0.0, 1.0)]
        while stack:
            box = stack.pop()
            yield box
            if box.kind == "module" and box.level < depth and self.total[box.module] > 0:
                stack += self._divide(box)

    def _divide(self, parent: Box) -> Iterator[Box]:
        """Yield the boxes below a module: its submodules, merged where too narrow, and the module without them."""
        scale, level, left = parent.width / self.total[parent.module], parent.level + 1, parent.start
        if not self.children.get(parent.module):
            return
        rest: Box | None = None
        for name in self.children[parent.module]:
            width = self.total[name] * scale
            if width <= 0:
                continue
            if width * WIDTH < _MIN_WIDTH:
                rest = rest or Box(name, "rest", level, left, 0.0, 0)
                rest = rest._replace(width=left + width - rest.start, modules=rest.modules + 1)
            else:
                if rest is not None:
                    yield rest
                    rest = None
                yield Box(name, "module", level, left, width)
            left += width
        if rest is not None:
            yield rest
        self_width = self._self_values[parent.module] * scale
        if left > parent.start and self_width * WIDTH >= _MIN_WIDTH:
            yield Box(parent.module, "self", level, left, self_width)

    def class_of(self, name: str) -> str:
        return self.by_name[name].class_name

    def rank_classes(self, boxes: list[Box]) -> list[str]:
        """Return the classes of the modules drawn below the root in descending order of the measure."""
        sums: Counter[str] = Counter()
        for box in boxes:
            if box.kind == "module" and box.module:
                sums[self.class_of(box.module)] += self.total[box.module]
        return [name for name, _ in sums.most_common()]

    def format_total(self, name: str) -> str:
        return ("≥ " if self.unsupported[name] else "") + format_value(self.measure, self.total[name])


def _draw_box(axes: Any, layout: _Layout, box: Box, palette: colours.Groups) -> None:
    from matplotlib.patches import Rectangle

    inches = box.width * (WIDTH - 2 * _MARGIN)
    fill: dict[str, Any] = {"facecolor": "white", "hatch": "//////", "edgecolor": colours.colour("cell-none")}
    if box.kind != "self":
        fill = {"facecolor": palette.of(layout.class_of(box.module)) if box.module else colours.colour("cell-none")}
    axes.add_patch(Rectangle((box.start, box.level), box.width, 1, linewidth=0, label=box.module, **fill))
    # A border as wide as the box would hide it.
    border = {"color": "white", "linewidth": min(0.8, inches * 18), "clip_on": False}
    end = box.start + box.width
    axes.plot([end, end], [box.level, box.level + 1], **border)
    axes.plot([box.start, end], [box.level + 1, box.level + 1], **{**border, "linewidth": 0.8})
    padding = min(0.04, 0.15 * inches)
    available = inches - 2 * padding
    if available < 0.06:
        return
    special = {"self": "itself", "rest": f"{box.modules} more"}.get(box.kind)
    name = plain(special or box.module.rpartition(".")[2] or layout.class_of("") or "model")
    style = {"style": "italic", "color": colours.colour("quiet")} if special else {"color": colours.colour("ink")}
    label = fit(name, available, _NAME)
    if label != name and (special or available < _MIN_TRUNCATED_WIDTH):
        return
    pad = padding / (WIDTH - 2 * _MARGIN)
    middle = box.level + 0.5
    if label:
        axes.text(box.start + pad, middle, escape(label), fontsize=_NAME, va="center_baseline", **style)
    if box.kind != "module":
        return
    share = format_percent(layout.total[box.module], layout.total[""])
    remaining = available - width_of(label, _NAME) - 0.08
    choices = f"{layout.format_total(box.module)} · {share}", share
    text = next((text for text in choices if width_of(text, _SHARE) < remaining), "")
    if text and share:
        style = {"ha": "right", "va": "center_baseline", "color": colours.colour("ink")}
        axes.text(end - pad, middle, text, fontsize=_SHARE, alpha=0.75, **style)


def _write_title(figure: Any, breakdown: Breakdown, layout: _Layout) -> None:
    height = figure.get_figheight()
    left = _MARGIN / WIDTH
    available = WIDTH - 2 * _MARGIN
    title = f"{layout.measure.title} of {plain(layout.class_of('') or 'the model')}: {layout.format_total('')}"
    about = breakdown.about
    details = [f"convention {about['table']}"] if "table" in about else []
    if "multiply_add" in about and layout.measure.title == "FLOPs":
        details.append(f"{format_quantity(int(about['multiply_add']), 'FLOP')} per multiply-add")
    if about.get("inputs"):
        details.append(f"inputs {about['inputs']}")
    for text, size, top, name in ((title, _TITLE, 0.1, "ink"), (" · ".join(details), _SMALL, 0.29, "quiet")):
        shown = fit(plain(text), available * (0.93 if name == "ink" else 1), size)
        style = {"weight": "bold" if name == "ink" else "normal", "color": colours.colour(name)}
        figure.text(left, 1 - top / height, escape(shown), fontsize=size, va="center", **style)


def _wrap_legend(entries: list[tuple[str, str]]) -> list[list[tuple[float, str, str]]]:
    """Return lines of (inches from the left, text, colour)."""
    lines: list[list[tuple[float, str, str]]] = []
    left = WIDTH
    for text, colour in entries:
        shown = fit(text, WIDTH / 3, _SMALL)
        needed = 0.16 + width_of(shown, _SMALL) + 0.16
        if left + needed > WIDTH:
            lines.append([])
            left = _MARGIN
        lines[-1].append((left, shown, colour))
        left += needed
    return lines


def _write_legend(figure: Any, lines: list[list[tuple[float, str, str]]], notes: list[str]) -> None:
    from matplotlib.patches import Rectangle

    height = figure.get_figheight()
    bottom = _MARGIN + _LEGEND_ROW * (len(lines) + len(notes))
    for number, line in enumerate(lines):
        middle = bottom - _LEGEND_ROW * (number + 0.5)
        for left, text, tint in line:
            corner = (left / WIDTH, (middle - 0.05) / height)
            figure.add_artist(Rectangle(corner, 0.1 / WIDTH, 0.1 / height, facecolor=tint, linewidth=0))
            _write_line(figure, (left + 0.14) / WIDTH, middle / height, text, "ink")
    for number, note in enumerate(notes):
        middle = bottom - _LEGEND_ROW * (len(lines) + number + 0.5)
        _write_line(figure, _MARGIN / WIDTH, middle / height, fit(plain(note), WIDTH - 2 * _MARGIN, _SMALL), "warn")


def _write_line(figure: Any, x: float, y: float, text: str, name: str) -> None:
    figure.text(x, y, escape(text), fontsize=_SMALL, va="center_baseline", color=colours.colour(name))


def _note_unsupported(measure: Measure) -> list[str]:
    if not measure.unsupported:
        return []
    calls: Counter[str] = Counter()
    for cell, number in measure.unsupported.items():
        calls[cell.operator] += number
    listed = ", ".join(f"{name} ×{number}" for name, number in calls.most_common(5))
    return [f"≥: {format_quantity(calls.total(), 'call')} of unsupported operators not counted: {listed}"]
