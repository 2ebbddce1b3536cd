"""The units: the one place where numbers become text.

The formats of fvcore are kept to the letter, so that a table of fvflops can be compared with one of fvcore.
"""

from __future__ import annotations

from collections.abc import Sequence

# A number above the first figure is divided by the second. The steps lie a decade below the unit, so 101 is 0.101K.
_SIZES = ((1e14, 1e15, "P"), (1e11, 1e12, "T"), (1e8, 1e9, "G"), (1e5, 1e6, "M"), (1e2, 1e3, "K"))
_ELEMENTS = ((1e8, 1e9, "G"), (1e5, 1e6, "M"), (1e2, 1e3, "K"))

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def format_size(count: float, *, digits: int = 3, hide_zero: bool = False) -> str:
    """Return a count, or a mean, with the suffix K, M, G, T or P and at most `digits` digits behind the point.

    `hide_zero` turns 0 into "". The format of fvcore's `flop_count_table` (3 digits) and `flop_count_str` (2 digits).

    >>> format_size(100), format_size(101), format_size(4089184256), format_size(61706, digits=2)
    ('100', '0.101K', '4.089G', '61.71K')
    >>> format_size(0), format_size(0, hide_zero=True), format_size(2 / 3)
    ('0', '', '0.667')
    """
    if hide_zero and count == 0:
        return ""
    for floor, unit, suffix in _SIZES:
        if abs(count) > floor:
            return f"{count / unit:.{digits}f}".rstrip("0").rstrip(".") + suffix
    return str(count) if isinstance(count, int) else f"{count:.{digits}f}".rstrip("0").rstrip(".")


def format_elements(count: int) -> str:
    """Return a number of elements with the suffix K, M or G and one digit behind the point.

    The format of fvcore's `parameter_count_table`.

    >>> format_elements(100), format_elements(61706), format_elements(25557032), format_elements(124439808)
    ('100', '61.7K', '25.6M', '0.1G')
    """
    for floor, unit, suffix in _ELEMENTS:
        if count > floor:
            return f"{count / unit:.1f}{suffix}"
    return str(count)


def format_percent(part: int, whole: int) -> str:
    """Return a share as a percentage with one digit; something that rounds to nothing is "<0.1%", a share of 0 is "".

    >>> format_percent(1, 3), format_percent(0, 3), format_percent(1, 10**6), format_percent(0, 0)
    ('33.3%', '0.0%', '<0.1%', '')
    """
    if whole == 0:
        return ""
    tenths = round(part * 1000 / whole)
    if part and not tenths:
        return "<0.1%"
    return f"{tenths / 10:.1f}%"


def format_seconds(seconds: float) -> str:
    """Return a time in the largest unit of which there is one, with three digits.

    >>> format_seconds(75.3164), format_seconds(0.05), format_seconds(3.2e-6), format_seconds(1234.5)
    ('75.3 s', '50 ms', '3.2 µs', '1,230 s')
    """
    unit, name = next((step for step in _TIMES if seconds >= step[0]), _TIMES[-1])
    return f"{float(f'{seconds / unit:.3g}'):,.12g} {name}"


def format_ratio(ratio: float) -> str:
    """Return a ratio with three digits, those before the point all kept.

    >>> format_ratio(0.08333), format_ratio(45.23), format_ratio(1234.5), format_ratio(float("inf"))
    ('0.0833', '45.2', '1,234', '∞')
    """
    if ratio == float("inf"):
        return "∞"
    return f"{ratio:,.0f}" if ratio >= 1000 else f"{ratio:.3g}"


def format_thousands(count: int) -> str:
    """Return every digit of an integer, in groups of three.

    >>> format_thousands(4089184256)
    '4,089,184,256'
    """
    return f"{count:,}"


def format_quantity(count: int, noun: str) -> str:
    """Return a number with the noun that it counts, whose plural takes an s.

    >>> format_quantity(1, "call"), format_quantity(1024, "output element")
    ('1 call', '1,024 output elements')
    """
    return f"{format_thousands(count)} {noun}{'' if count == 1 else 's'}"


def format_shape(shape: Sequence[int]) -> str:
    """Return the shape of a tensor as Python writes a tuple.

    >>> format_shape([4, 3]), format_shape([4]), format_shape([])
    ('(4, 3)', '(4,)', '()')
    """
    return str(tuple(shape))
