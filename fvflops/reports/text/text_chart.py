"""Charts of plain text, in which each layer is drawn with a letter of its name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from fvflops.reports.document import Chart
from fvflops.reports.escaping import printable
from fvflops.reports.text.display_width import wrap_legend

_WIDTH, _HEIGHT = 80, 12  # if no width is given; rows of letters
_LABELLED = 3  # every third row has a label
_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def text_chart(chart: Chart, *, width: int | None = None) -> str:
    """Return a chart in lines of at most `width` cells, 80 if None: rows of letters, the sections, and the legend.

    >>> chart = Chart("memory", {"parameter": [6, 6, 6], "activation": [0, 3, 6]}, [("forward", 3)])
    >>> print(text_chart(chart, width=18))
    12 |          aaaa
       |          aaaa
       |          aaaa
     9 |     aaaaaaaaa
       |     aaaaaaaaa
       |     aaaaaaaaa
     6 |pppppppppppppp
       |pppppppppppppp
       |pppppppppppppp
     3 |pppppppppppppp
       |pppppppppppppp
       |pppppppppppppp
     0 +--------------
        forward
    p parameter, a activation
    """
    peak = max(chart.totals(), default=0)
    labels = {row: chart.form(peak * row / _HEIGHT) for row in range(0, _HEIGHT + 1, _LABELLED)}
    margin = max(map(len, labels.values()))
    sampled = chart.sample(max((width or _WIDTH) - margin - 2, 1))
    letters = _choose_letters(sampled.layers)
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
    lines.append(f"{labels[0]:>{margin}} +{_draw_axis(sampled)}")
    lines.append((" " * (margin + 2) + _write_sections(sampled.sections)).rstrip())
    legend = [f"{letters[name]} {printable(name)}" for name in names if name in drawn]
    return "\n".join([*lines, *wrap_legend(legend, width or _WIDTH)])


def _choose_letters(names: Iterable[str]) -> dict[str, str]:
    """Return a letter for each name, the first of its letters that no name before it has."""
    letters: dict[str, str] = {}
    for name in names:
        free = (letter for letter in name.lower() + _LETTERS if letter in _LETTERS and letter not in letters.values())
        letters[name] = next(free, "?")
    return letters


def _draw_axis(chart: Chart) -> str:
    ends = list(accumulate(length for _, length in chart.sections))
    length = len(next(iter(chart.layers.values()), ()))
    return "".join("+" if index in ends[:-1] else "-" for index in range(length))


def _write_sections(sections: Sequence[tuple[str, int]]) -> str:
    """Return the names of the sections at their beginnings, those that fit."""
    return "".join((name if len(name) < length else "").ljust(length) for name, length in sections)
