"""Charts, Gantt charts and scatter plots of plain text."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from string import ascii_letters, ascii_uppercase

from fvflops.reports.display_width import display_width, wrap_legend
from fvflops.reports.document import Chart, Gantt, Scatter
from fvflops.reports.escaping import printable

_WIDTH, _HEIGHT = 80, 12  # if no width is given; rows of letters
_LABELLED = 3  # every third row has a label


def text_chart(chart: Chart, *, width: int | None = None) -> str:
    """Return a chart in lines of at most `width` cells, 80 if None: rows of letters, the sections, and the legend."""
    peak = max(chart.totals(), default=0)
    labels = {row: chart.form(peak * row / _HEIGHT) for row in range(0, _HEIGHT + 1, _LABELLED)}
    margin = max(map(len, labels.values()))
    sampled = chart.sample(max((width or _WIDTH) - margin - 2, 1))
    letters = _choose_letters(sampled.layers, ascii_letters)
    bounds = [list(accumulate(values)) for values in zip(*sampled.layers.values(), strict=True)]
    names = list(sampled.layers)
    lines, drawn = [], set()
    for row in range(_HEIGHT, 0, -1):
        level = peak * (row - 0.5) / _HEIGHT
        cells = ""
        for sums in bounds:
            layer = next((name for name, top in zip(names, sums, strict=True) if top > level), "")
            drawn.add(layer)
            cells += letters[layer] if layer else " "
        lines.append(f"{labels.get(row, ''):>{margin}} |{cells}".rstrip())
    ends = list(accumulate(length for _, length in sampled.sections))
    axis = "".join("+" if index in ends[:-1] else "-" for index in range(len(bounds)))
    # The sections whose names fit have them at their beginnings.
    sections = [(name if len(name) < length else "").ljust(length) for name, length in sampled.sections]
    lines += [f"{labels[0]:>{margin}} +{axis}", f"{'':{margin + 2}}{''.join(sections)}".rstrip()]
    legend = [f"{letters[name]} {printable(name)}" for name in names if name in drawn]
    return "\n".join([*lines, *wrap_legend(legend, width or _WIDTH)])


def _choose_letters(names: Iterable[str], alphabet: str) -> dict[str, str]:
    """Return a letter for each name, the first of its own, or of the `alphabet`, that is free."""
    letters: dict[str, str] = {}
    for name in names:
        cased = name.lower() if alphabet[0].islower() else name.upper()
        free = (letter for letter in cased + alphabet if letter in alphabet and letter not in letters.values())
        letters[name] = next(free, "?")
    return letters


_IDLE = "."


def text_gantt(gantt: Gantt, *, width: int | None = None) -> str:
    """Return a chart in lines of at most `width` cells, 80 if None: the lanes, the time, and the legend.

    Slices with an odd shade are in lower case.

    >>> from fvflops.reports.document import Slice
    >>> lanes = {"pp 0": [Slice("forward", 0, 2), Slice("backward", 4, 8)], "pp 1": [Slice("forward", 2, 4, shade=1)]}
    >>> print(text_gantt(Gantt("pipeline", lanes, {"forward": "forward", "backward": "backward"}), width=26))
    pp 0  FFFFF.....BBBBBBBBBB
    pp 1  .....fffff..........
          0                8 s
    F forward, B backward,
    . waiting
    """
    width = width or _WIDTH
    margin = max((display_width(printable(lane)) for lane in gantt.lanes), default=0) + 2
    count = max(width - margin, 8)
    letters = _choose_letters(gantt.kinds, ascii_uppercase)
    drawn = set()
    lines = []
    for lane in gantt.lanes:
        row = ""
        for piece in gantt.sample(lane, count) if gantt.end() else []:
            letter = _IDLE if piece is None else letters[piece.kind]
            row += letter.lower() if piece is not None and piece.shade % 2 else letter
            drawn.add(piece and piece.kind)
        lines.append(f"{printable(lane):<{margin}}{row}")
    lines.append(f"{'':{margin}}0{gantt.form(gantt.end()):>{count - 1}}")
    legend = [f"{letters[kind]} {printable(name)}" for kind, name in gantt.kinds.items() if kind in drawn]
    return "\n".join([*lines, *wrap_legend([*legend, f"{_IDLE} {printable(gantt.idle)}"], width)])


_POINT, _MARKED, _LIMIT = "·", "●", "-"


def text_scatter(plot: Scatter, *, width: int | None = None) -> str:
    """Return a plot in lines of at most `width` cells, 80 if None; marked points are ●."""
    (left, right), (low, high) = plot.spans()
    names = [plot.y_form(high), plot.y_form(low)]
    margin = max(map(display_width, names)) + 2
    columns = max((width or _WIDTH) - margin - 1, 8)
    rows = [[" "] * columns for _ in range(_HEIGHT)]
    if plot.limit is not None:
        rows[_place(plot.limit[0], low, high, _HEIGHT)] = list(_LIMIT * columns)
    for point in sorted(plot.points, key=lambda item: item.marked):
        row, column = _place(point.y, low, high, _HEIGHT), _place(point.x, left, right, columns)
        rows[row][column] = _MARKED if point.marked else _POINT
    labels = {_HEIGHT - 1: names[0], 0: names[1]}
    lines = [printable(plot.y)]
    for index in reversed(range(_HEIGHT)):
        label = labels.get(index, "")
        lines.append(f"{' ' * (margin - 2 - display_width(label))}{label} |{''.join(rows[index])}".rstrip())
    first, last = plot.x_form(left), plot.x_form(right)
    gap = max(columns - display_width(first) - display_width(last), 1)
    lines += [f"{' ' * margin}{first}{' ' * gap}{last}", f"{' ' * margin}{printable(plot.x)}"]
    if any(point.marked for point in plot.points):
        lines.append(f"{_MARKED} {printable(plot.marks)}")
    if plot.limit is not None:
        lines.append(f"{_LIMIT * 2} {printable(plot.limit[1])}")
    return "\n".join(lines)


def _place(value: float, low: float, high: float, count: int) -> int:
    """Return the cell of a value among `count` cells from `low` to `high`."""
    return 0 if high == low else round((value - low) / (high - low) * (count - 1))


def text_picture(picture: Chart | Gantt | Scatter, *, width: int | None = None) -> str:
    """Return a picture in lines of at most `width` cells, 80 if None."""
    if isinstance(picture, Chart):
        return text_chart(picture, width=width)
    return text_gantt(picture, width=width) if isinstance(picture, Gantt) else text_scatter(picture, width=width)
