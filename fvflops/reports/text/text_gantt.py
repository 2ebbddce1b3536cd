"""Gantt charts of plain text: a line for each lane, in which a letter is the kind of slice."""

from __future__ import annotations

from collections.abc import Iterable

from fvflops.reports.document import Gantt
from fvflops.reports.escaping import printable
from fvflops.reports.text.display_width import display_width, wrap_legend

_WIDTH = 80  # if no width is given
_IDLE = "."
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


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
    letters = _choose_letters(gantt.kinds)
    drawn = set()
    lines = []
    for lane in gantt.lanes:
        cells = gantt.sample(lane, count) if gantt.end() else []
        row = ""
        for piece in cells:
            if piece is None:
                row += _IDLE
            else:
                drawn.add(piece.kind)
                row += letters[piece.kind].lower() if piece.shade % 2 else letters[piece.kind]
        lines.append(f"{printable(lane):<{margin}}{row}")
    lines.append(f"{'':{margin}}0{gantt.form(gantt.end()):>{count - 1}}")
    legend = [f"{letters[kind]} {printable(name)}" for kind, name in gantt.kinds.items() if kind in drawn]
    return "\n".join([*lines, *wrap_legend([*legend, f"{_IDLE} {printable(gantt.idle)}"], width)])


def _choose_letters(kinds: Iterable[str]) -> dict[str, str]:
    """Return a letter for each kind, the first of its letters that no kind before it has."""
    letters: dict[str, str] = {}
    for kind in kinds:
        free = (letter for letter in kind.upper() + _LETTERS if letter in _LETTERS and letter not in letters.values())
        letters[kind] = next(free, "?")
    return letters
