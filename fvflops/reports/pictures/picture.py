"""Figures of matplotlib, an optional dependency, as the bytes of an SVG or PNG file."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

from fvflops import paths
from fvflops.reports.names import printable

KINDS = ("svg", "png")
_DOTS = 200  # per inch of a PNG
_LONGEST = 200  # characters of a name
# Override the user's matplotlibrc: TeX would run what is in names. The salt makes ids reproducible.
_SETTINGS: dict[Any, Any] = {"svg.hashsalt": "fvflops", "svg.fonttype": "path", "text.usetex": False}


class PlotError(ValueError):
    """A picture cannot be drawn: its file type is not supported, or matplotlib is missing."""


def kind_of(path: str) -> str:
    """Return the kind of picture that a path's ending names; another ending, or no matplotlib, raises PlotError.

    >>> kind_of("scale.pdf")
    Traceback (most recent call last):
    fvflops.reports.pictures.picture.PlotError: scale.pdf: a plot is written as .svg or .png
    """
    kind = path.rpartition(".")[2].lower()
    if kind not in KINDS:
        raise PlotError(f"{path}: a plot is written as {' or '.join('.' + name for name in KINDS)}")
    check_drawable()
    return kind


def prepare(path: str) -> str:
    """Return what `kind_of` does; a path that cannot be written raises OSError, before there is anything to draw."""
    kind = kind_of(path)
    paths.check_writable(path)
    return kind


def check_drawable() -> None:
    """Raise PlotError where matplotlib, the extra `plot`, cannot be imported."""
    _import_figure()


def make_figure(width: float, height: float, **options: Any) -> Any:
    """Return an empty Figure of a width and a height in inches, independent of pyplot and windows."""
    return _import_figure()(figsize=(width, height), **options)


def encode(figure: Any, kind: str) -> bytes:
    """Return a Figure as the bytes of a file; the same figure gives the same bytes."""
    from matplotlib import rc_context

    picture = io.BytesIO()
    with rc_context(_SETTINGS):
        figure.savefig(picture, format=kind, dpi=_DOTS, **({"metadata": {"Date": None}} if kind == "svg" else {}))
    return picture.getvalue()


def as_text(text: str) -> str:
    """Return a text that a figure shows as it is: no mathematics, no control characters, no missing glyphs.

    >>> print(as_text("a$b$"))
    a\\$b\\$
    """
    return escape(plain(text))


def escape(text: str) -> str:
    """Return a text, as `plain` gives it, escaped for a figure."""
    # Between two dollars matplotlib reads mathematics.
    return text.replace("$", r"\$")


def plain(text: str) -> str:
    """Return a text as a picture shows it: cut if it is long, characters without a glyph as their escapes."""
    glyphs = _load_glyphs()
    cut = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
    return "".join(
        mark if ord(mark) in glyphs else mark.encode("unicode_escape").decode("ascii") for mark in printable(cut)
    )


def width_of(text: str, size: float, *, bold: bool = False) -> float:
    """Return how wide a text, as `plain` gives it, is in inches at a size of the font in points."""
    return _measure_width(text, bold) * size / 72


def fit(text: str, inches: float, size: float) -> str:
    """Return a text, as `plain` gives it, cut to a width; "" where fewer than two characters of it fit."""
    if width_of(text, size) <= inches:
        return text
    length = len(text)
    while length > 1 and width_of(text[:length] + "…", size) > inches:
        length -= 1
    return text[:length] + "…" if length > 1 else ""


@cache
def _load_glyphs() -> frozenset[int]:
    """Return the characters for which the default font has a glyph."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(get_font(findfont(FontProperties())).get_charmap())


@cache
def _measure_width(text: str, bold: bool) -> float:
    """Return the width of a text at a font size of one point, in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextToPath

    font = FontProperties(size=100, weight="bold" if bold else "normal")
    width, _, _ = TextToPath().get_text_width_height_descent(text, font, ismath=False)
    return float(width) / 100


def _import_figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError(f"a plot needs matplotlib ({error}): pip install 'fvflops[plot]'") from error
    return Figure
