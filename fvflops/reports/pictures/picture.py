"""Make figures with matplotlib, an optional dependency, and encode them as SVG or PNG."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

from fvflops import paths
from fvflops.reports.escaping import printable

KINDS = ("svg", "png")
_DPI = 200  # of a PNG
_MAX_LENGTH = 200  # characters of a name
# Override the user's matplotlibrc: TeX would execute commands in names. The salt makes ids reproducible. Text stays
# text, which can be searched and read aloud; the other fonts are narrower than the first, by which it is placed.
_SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "fvflops",
    "svg.fonttype": "none",
    "text.usetex": False,
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"],
}


class PlotError(ValueError):
    """A picture cannot be drawn: its file type is not supported, or matplotlib is missing."""


def kind_of(path: str) -> str:
    """Return the file type of a plot from its path; an unsupported type, or missing matplotlib, raises PlotError."""
    kind = path.rpartition(".")[2].lower()
    if kind not in KINDS:
        raise PlotError(f"{path}: a plot must be an {' or '.join('.' + name for name in KINDS)} file")
    check_drawable()
    return kind


def prepare(path: str) -> str:
    """Return the file type of a plot, after checking that its path can be written, else raising OSError."""
    kind = kind_of(path)
    paths.check_writable(path)
    return kind


def check_drawable() -> None:
    """Raise PlotError if matplotlib, the extra `plot`, cannot be imported."""
    _import_figure()


def make_figure(width: float, height: float, **options: Any) -> Any:
    """Return an empty Figure of a size in inches, independent of pyplot and its windows."""
    return _import_figure()(figsize=(width, height), **options)


def encode(figure: Any, kind: str) -> bytes:
    """Return a Figure as the bytes of a file, reproducibly."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context(_SETTINGS):
        figure.savefig(buffer, format=kind, dpi=_DPI, **({"metadata": {"Date": None}} if kind == "svg" else {}))
    return buffer.getvalue()


def as_text(text: str) -> str:
    """Return a text escaped for a figure: no math mode, no control characters, no missing glyphs."""
    return escape(plain(text))


def escape(text: str) -> str:
    """Return a text with escaped dollars, between which matplotlib would parse mathematics."""
    return text.replace("$", r"\$")


def plain(text: str) -> str:
    """Return a text truncated, and with characters that have no glyph replaced by escapes."""
    glyphs = _load_glyphs()
    shown = text if len(text) <= _MAX_LENGTH else text[: _MAX_LENGTH - 1] + "…"
    return "".join(
        char if ord(char) in glyphs else char.encode("unicode_escape").decode("ascii") for char in printable(shown)
    )


def width_of(text: str, size: float, *, bold: bool = False) -> float:
    """Return the width in inches of a text returned by `plain`, at a font size in points."""
    return _measure_width(text, bold) * size / 72


def fit(text: str, inches: float, size: float) -> str:
    """Return a text of `plain` truncated to a width; "" if fewer than two characters fit."""
    if width_of(text, size) <= inches:
        return text
    length = len(text)
    while length > 1 and width_of(text[:length] + "…", size) > inches:
        length -= 1
    return text[:length] + "…" if length > 1 else ""


@cache
def _load_glyphs() -> frozenset[int]:
    """Return the code points for which the default font has a glyph."""
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
