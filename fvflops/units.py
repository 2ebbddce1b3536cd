"""Format and parse numbers; the formats of fvcore and of DeepSpeed are reproduced exactly."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from decimal import Context, Decimal
from fractions import Fraction
from numbers import Integral
from typing import Any

# (threshold, unit, suffix). Thresholds are a tenth of the unit, so 101 is 0.101K.
_SIZES = ((1e14, 1e15, "P"), (1e11, 1e12, "T"), (1e8, 1e9, "G"), (1e5, 1e6, "M"), (1e2, 1e3, "K"))
_ELEMENTS = ((1e8, 1e9, "G"), (1e5, 1e6, "M"), (1e2, 1e3, "K"))

# DeepSpeed's prefixes; a number has the largest one that is not larger than it, or else the smallest.
_PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}

# Suffixes of numbers in input; Ki is 1024.
_SUFFIXES = {
    "": 1,
    **{suffix: 1000**power for power, suffix in enumerate("KMGTPE", start=1)},
    **{f"{suffix}i": 1024**power for power, suffix in enumerate("KMGTPE", start=1)},
}
_NUMBER = re.compile(r"([0-9][0-9_]{0,40}|[0-9]{1,3}(?:,[0-9]{3}){1,13})(\.[0-9]{1,20})?\s?([KMGTPE]i?)?B?")
_SHARE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,12})?)(\s?%)?")

_FEW = 3  # significant digits, unless others are asked for
_DIGITS: ContextVar[int | None] = ContextVar("digits", default=None)
_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


def format_size(count: float, *, digits: int = 3, hide_zero: bool = False) -> str:
    """Return a count, or a mean, with the suffix K, M, G, T or P and at most `digits` decimals.

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


@contextmanager
def digits_shown(digits: int | None) -> Iterator[None]:
    """Write numbers with this many significant digits while the context lasts, None for three.

    >>> with digits_shown(5):
    ...     format_short(4_089_184_256), format_bytes(4_481_556_052), format_parameters(25_557_032)
    ('4.0892G', '4.4816 GB', '25.557M')
    """
    token = _DIGITS.set(digits)
    try:
        yield
    finally:
        _DIGITS.reset(token)


def format_short(count: float) -> str:
    """Return a count, or a mean, with three significant digits and the suffix K, M, G, T or P.

    >>> format_short(999), format_short(1024), format_short(32915099296), format_short(-12845056), format_short(0.25)
    ('999', '1.02K', '32.9G', '-12.8M', '0.25')
    """
    rounded = float(f"{count:.{_DIGITS.get() or _FEW}g}")
    unit, suffix = next(((unit, suffix) for _, unit, suffix in _SIZES if abs(rounded) >= unit), (1.0, ""))
    return f"{rounded / unit:.12g}{suffix}"


def digits_apart(form: Callable[[Any], str], values: Iterable[Any], *, most: int = 8) -> int | None:
    """Return the least number of significant digits, up to `most`, at which different values have different texts.

    None is the usual three, or the number that `digits_shown` has set.

    >>> digits_apart(format_short, [4_089_184_256, 4_090_104_256]), digits_apart(format_short, [61_706, 416_520])
    (4, None)
    """
    different = set(values)
    if _DIGITS.get() is not None or len(set(map(form, different))) == len(different):
        return None
    for digits in range(_FEW + 1, most):
        with digits_shown(digits):
            if len(set(map(form, different))) == len(different):
                return digits
    return most


def format_bytes(count: float) -> str:
    """Return a number of bytes with three significant digits and its unit, a power of 1000.

    >>> format_bytes(4_481_556_052), format_bytes(512)
    ('4.48 GB', '512 B')
    """
    text = format_short(count)
    number = text.rstrip("KMGTP")
    return f"{number} {text[len(number) :]}B"


def format_signed(difference: float) -> str:
    """Return a signed difference in the format of `format_short`.

    >>> format_signed(50_331_648), format_signed(-43_000), format_signed(0)
    ('+50.3M', '-43K', '0')
    """
    return f"{'+' if difference > 0 else ''}{format_short(difference)}"


def format_parameters(count: float) -> str:
    """Return a number of parameters for people: thousands, millions (M) or billions (B), with one digit.

    >>> format_parameters(405_853_388_800), format_parameters(109_482_240), format_parameters(61_706)
    ('405.9B', '109.5M', '61.7K')
    >>> format_parameters(480), format_parameters(999_960)
    ('480', '1.0M')
    """
    digits = _DIGITS.get()
    for unit, suffix in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if digits is not None and abs(float(f"{count:.{digits}g}")) >= unit:
            return f"{float(f'{count:.{digits}g}') / unit:.12g}{suffix}"
        if round(abs(count) / unit, 1) >= 1:
            return f"{count / unit:.1f}{suffix}"
    return format_short(count)


def format_in(count: float, power: int) -> str:
    """Return a count in units of 10**power, with three significant digits and all digits before the point.

    >>> format_in(25557032, 6), format_in(4089184256, 9), format_in(405853388800, 6)
    ('25.6', '4.09', '405,853')
    >>> format_in(61706, 6), format_in(416520, 9), format_in(5, 6), format_in(0, 9), format_in(9_999_600, 6)
    ('0.0617', '0.000417', '0.000005', '0', '10.0')
    """
    if not count:
        return "0"
    is_integer = isinstance(count, Integral)
    number = Decimal(int(count) if is_integer else float(count)).scaleb(-power)
    digits = _DIGITS.get() or _FEW
    decimals = max(digits - 1 - Context(prec=digits).plus(number).adjusted(), 0)
    # An integer count has no digits below 1.
    return f"{number:,.{min(decimals, power) if is_integer else decimals}f}"


def format_elements(count: int) -> str:
    """Return a number of elements with the suffix K, M or G and one decimal.

    The format of fvcore's `parameter_count_table`.

    >>> format_elements(100), format_elements(61706), format_elements(25557032), format_elements(124439808)
    ('100', '61.7K', '25.6M', '0.1G')
    """
    for floor, unit, suffix in _ELEMENTS:
        if count > floor:
            return f"{count / unit:.1f}{suffix}"
    return str(count)


def format_percent(part: float, whole: float = 1) -> str:
    """Return `part` as a percentage of `whole` with one decimal; "<0.1%" if it rounds to 0, "" if `whole` is 0.

    >>> format_percent(1, 3), format_percent(0, 3), format_percent(1, 10**6), format_percent(0, 0)
    ('33.3%', '0.0%', '<0.1%', '')
    """
    if whole == 0:
        return ""
    tenths = round(part * 1000 / whole)
    return "<0.1%" if part and not tenths else f"{tenths / 10:.1f}%"


def format_share(share: float) -> str:
    """Return a fraction as a percentage with one decimal; "<0.1%" if it rounds to 0.

    >>> format_share(1 / 3), format_share(0), format_share(1e-6)
    ('33.3%', '0.0%', '<0.1%')
    """
    return "<0.1%" if 0 < share < 0.0005 else f"{100 * share:.1f}%"


def format_change(share: float) -> str:
    """Return a relative difference as a signed percentage with three significant digits and all before the point.

    >>> format_change(0.5), format_change(-0.00168), format_change(1099.4), format_change(0)
    ('+50%', '-0.168%', '+109,940%', '0%')
    """
    if not share:
        return "0%"
    return f"{100 * share:+,.0f}%" if abs(share) >= 9.995 else f"{100 * share:+.3g}%"


def format_seconds(seconds: float) -> str:
    """Return a time with three significant digits, in the largest unit that is not larger than it.

    >>> format_seconds(75.3164), format_seconds(-0.05), format_seconds(3.2e-6), format_seconds(1234.5)
    ('75.3 s', '-50 ms', '3.2 µs', '1,230 s')
    """
    unit, name = next((entry for entry in _TIMES if abs(seconds) >= entry[0]), _TIMES[-1])
    return f"{float(f'{seconds / unit:.3g}'):,.12g} {name}"


def format_ratio(ratio: float) -> str:
    """Return a ratio with three significant digits and all digits before the point.

    >>> format_ratio(0.08333), format_ratio(45.23), format_ratio(1234.5), format_ratio(float("inf"))
    ('0.0833', '45.2', '1,234', '∞')
    """
    if ratio == float("inf"):
        return "∞"
    return f"{ratio:,.0f}" if ratio >= 1000 else f"{ratio:.3g}"


def format_thousands(count: int) -> str:
    """Return an integer with thousands separators.

    >>> format_thousands(4089184256)
    '4,089,184,256'
    """
    return f"{count:,}"


def format_quantity(count: int, noun: str) -> str:
    """Return a number with its noun in singular or plural; the plural ends in s, or es after s, x, ch and sh.

    >>> format_quantity(1, "call"), format_quantity(1024, "output element"), format_quantity(2, "class")
    ('1 call', '1,024 output elements', '2 classes')
    """
    plural = "es" if noun.endswith(("s", "x", "ch", "sh")) else "s"
    return f"{format_thousands(count)} {noun}{'' if count == 1 else plural}"


def parse_size(text: str) -> int:
    """Parse an integer such as "4_089_184_256", "1.2G" or "120 MiB", exactly.

    K, M, G, T, P and E are powers of 1000, Ki and so on of 1024. Any other text raises ValueError.

    >>> parse_size("1.2G"), parse_size("120MiB"), parse_size("25,557,032")
    (1200000000, 125829120, 25557032)
    >>> parse_size("1.0005K")
    Traceback (most recent call last):
    ValueError: '1.0005K' is not an integer
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text[:60]!r} is not a number such as 25_557_032, 1.2G or 120MiB")
    integer, decimals, suffix = match.groups()
    number = Fraction(integer.replace("_", "").replace(",", "") + (decimals or "")) * _SUFFIXES[suffix or ""]
    if number.denominator != 1:
        raise ValueError(f"{text[:60]!r} is not an integer")
    return int(number)


def parse_share(text: str) -> Fraction:
    """Parse a share such as "1%" or "0.01", exactly; any other text, also "5" without %, raises ValueError.

    >>> parse_share("1%"), parse_share("0.5")
    (Fraction(1, 100), Fraction(1, 2))
    """
    match = _SHARE.fullmatch(text.strip())
    if match is None or (not match[2] and Fraction(match[1]) > 1):
        raise ValueError(f"{text[:60]!r} is not a share such as 1% or 0.01")
    return Fraction(match[1]) / (100 if match[2] else 1)


def number_to_string(number: float, units: str | None = None, precision: int = 2) -> str:
    """Return a number with a space and the prefix T, G, M, K, m or u, in DeepSpeed's format.

    `units` is the prefix, "" for none; by default the largest that is not larger than the number. `precision` is the
    number of decimals, of six significant digits in all. Any other prefix raises ValueError.

    >>> number_to_string(426516480), number_to_string(0.00325), number_to_string(1024, units="M", precision=4)
    ('426.52 M', '3.25 m', '0.001 M')
    >>> number_to_string(0), number_to_string(999)
    ('0 ', '999 ')
    """
    if units is None:
        units = next((name for name, size in _PREFIXES.items() if abs(number) >= size), "u") if number else ""
    if units not in _PREFIXES:
        raise ValueError(f"units must be None or one of {', '.join(map(repr, _PREFIXES))}; got {units!r}")
    return f"{round(number / _PREFIXES[units], precision):g} {units}"


def flops_to_string(flops: float, units: str | None = None, precision: int = 2) -> str:
    """Return flops per second in DeepSpeed's format; the arguments are as for `number_to_string`.

    >>> flops_to_string(13.5e12)
    '13.5 TFLOPS'
    """
    return f"{number_to_string(flops, units, precision)}FLOPS"


def macs_to_string(macs: float, units: str | None = None, precision: int = 2) -> str:
    """Return multiply-adds in DeepSpeed's format; the arguments are as for `number_to_string`.

    >>> macs_to_string(426516480), macs_to_string(0)
    ('426.52 MMACs', '0 MACs')
    """
    return f"{number_to_string(macs, units, precision)}MACs"


def params_to_string(params_num: float, units: str | None = None, precision: int = 2) -> str:
    """Return a number of parameters in DeepSpeed's format, in which 1e9 is B; `units` accepts B and G.

    >>> params_to_string(61706), params_to_string(6738415616), params_to_string(10)
    ('61.71 K', '6.74 B', '10')
    """
    units = "G" if units == "B" else units
    return number_to_string(params_num, units, precision).replace("G", "B").strip()


def duration_to_string(duration: float, units: str | None = None, precision: int = 2) -> str:
    """Return a time, given in seconds, in DeepSpeed's format; the arguments are as for `number_to_string`.

    >>> duration_to_string(0.00325), duration_to_string(75)
    ('3.25 ms', '75 s')
    """
    return f"{number_to_string(duration, units, precision)}s"


def share_to_string(part: float, whole: float, precision: int = 2) -> str:
    """Return a share as a percentage in DeepSpeed's format; 0% if `whole` is 0.

    >>> share_to_string(1, 3), share_to_string(1, 2), share_to_string(0, 0)
    ('33.33%', '50%', '0%')
    """
    return f"{round(100 * part / whole, precision) if whole else 0:g}%"
