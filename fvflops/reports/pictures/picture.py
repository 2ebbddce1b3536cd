"""Figures of matplotlib, an optional dependency: their scales, texts and encoding as SVG or PNG."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from fvflops import paths
from fvflops.reports.escaping import printable
from fvflops.reports.pictures import colours
from fvflops.units import digits_apart, digits_shown

KINDS = ("svg", "png")
_MAX_LENGTH = 200  # characters of a name
# Override the user's matplotlibrc: TeX would execute commands in names. The salt makes ids reproducible. Text stays
# text, which can be searched and read aloud; it is placed by the first font, and the others are narrower.
_SETTINGS: dict[Any, Any] = {
    "svg.hashsalt": "fvflops",
    "svg.fonttype": "none",
    "text.usetex": False,
    "font.sans-serif": ["DejaVu Sans", "Arial", "Helvetica"],
}


class PlotError(ValueError):
    """A picture cannot be drawn: its file type is not supported, or matplotlib is missing."""


def file_type(path: str) -> str:
    """Return the file type of a plot from its path; an unsupported type, or missing matplotlib, raises PlotError."""
    kind = path.rpartition(".")[2].lower()
    if kind not in KINDS:
        raise PlotError(f"{path}: a plot must be an {' or '.join('.' + name for name in KINDS)} file")
    import_figure()
    return kind


def prepare(path: str) -> str:
    """Return the file type of a plot, after checking that its path can be written, else raising OSError."""
    kind = file_type(path)
    paths.check_writable(path)
    return kind


def make_figure(width: float, height: float, **options: Any) -> Any:
    """Return an empty Figure of a size in inches, independent of pyplot and its windows."""
    return import_figure()(figsize=(width, height), **options)


def encode(figure: Any, kind: str) -> bytes:
    """Return a Figure as the bytes of a file, reproducibly."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context(_SETTINGS):
        figure.savefig(buffer, format=kind, dpi=200, **({"metadata": {"Date": None}} if kind == "svg" else {}))
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


def width_of(text: str, size: float) -> float:
    """Return the width in inches of a text returned by `plain`, at a font size in points."""
    return _measure_width(text) * size / 72


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
def _measure_width(text: str) -> float:
    """Return the width of a text at a font size of one point, in points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextToPath

    width, _, _ = TextToPath().get_text_width_height_descent(text, FontProperties(size=100), ismath=False)
    return float(width) / 100


def import_figure() -> Any:
    """Return matplotlib's class of figures; without matplotlib, the extra `plot`, raise PlotError."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise PlotError(f"a plot needs matplotlib ({error}): pip install 'fvflops[plot]'") from error
    return Figure


_TICKS = 6  # within a power of ten, at most


def label_logarithmic(
    scale: Any, form: Callable[[float], str], *, integer: bool = False, ticks: int | None = None
) -> None:
    """Label a logarithmic scale, such as `axes.xaxis`, at most at `ticks` powers of ten; with `integer` at integers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    first, last = scale.get_view_interval()
    decades = math.log10(last / first)
    between = (1,) if decades > 2 else (1, 2, 5)  # ticks between few powers of ten
    powers = LogLocator(subs=between, numticks=ticks if len(between) == 1 else None)
    scale.set_major_locator(powers if decades > 1 else MaxNLocator(_TICKS, integer=integer))
    scale.set_major_formatter(FuncFormatter(lambda value, _: _write_tick(value, form, integer)))
    scale.set_minor_formatter(NullFormatter())


def label_linear(scale: Any, form: Callable[[float], str]) -> None:
    """Label a linear scale with `form` of each value."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    class Distinct(FuncFormatter):
        """Writes ticks with as many digits as make them distinct."""

        def format_ticks(self, values: Sequence[float]) -> list[str]:
            with digits_shown(digits_apart(form, map(_clean, values))):
                return [form(_clean(value)) for value in values]

    scale.set_major_locator(MaxNLocator(_TICKS + 1, steps=[1, 2, 5, 10]))
    scale.set_major_formatter(Distinct(lambda value, _: form(_clean(value))))


def _write_tick(value: float, form: Callable[[float], str], integer: bool) -> str:
    rounded = round(value)
    if math.isclose(value, rounded):
        return form(rounded)
    return "" if integer else form(_clean(value))


def _clean(value: float) -> float:
    return float(f"{value:.10g}")  # without the rounding error of a locator


def style_axes(axes: Any, size: float) -> None:
    """Draw thin grey axes on the left and below, with labels of a size in points, and a grid."""
    axes.tick_params(labelsize=size, colors=colours.colour("quiet"), which="both", width=0.6, length=2.5)
    axes.tick_params(which="minor", length=1.5)
    axes.grid(visible=True, which="major", color=colours.colour("line"), linewidth=0.4)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_linewidth(0.6)
        spine.set_color(colours.colour("quiet"))
