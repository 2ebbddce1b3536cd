"""Parsers of the values of arguments, and which options were chosen."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

from fvflops.analysis.trace_file import ENDINGS
from fvflops.capture.shapes.rules.assumptions import check_assumptions
from fvflops.units import parse_size

_POSITIVE = math.ulp(0.0), sys.float_info.max  # the least and the largest finite number above 0


def find_chosen(arguments: argparse.Namespace, names: Iterable[str]) -> str:
    """Return the first of some options, named by their destinations, that is not at its default, "" for none."""
    for name in names:
        option, default = arguments.options[name]
        if getattr(arguments, name) != default:
            return str(option)
    return ""


def refuse(arguments: argparse.Namespace, *rules: tuple[object, Iterable[str], str]) -> None:
    """Raise ValueError for the first chosen option of a rule that applies: (whether it does, options, message)."""
    for applies, names, message in rules:
        if applies and (option := find_chosen(arguments, names)):
            raise ValueError(message.replace("{}", option, 1))


def check_model_given(arguments: argparse.Namespace, own: Iterable[str]) -> None:
    """Raise ValueError for an option of the model's run without `--model`; `own` are the command's other options."""
    of_report = ("help", "debug", "format", "sort", "top", "digits", "output")
    others = [name for name in arguments.options if name not in (*own, *of_report)]
    others.sort(key="backward".__eq__)  # last, since --loss includes it
    refuse(arguments, (arguments.model is None, others, "{} describes the model's run: add --model"))


def parse_at_least(least: int, text: str) -> int:
    """Return an integer, as argparse's `type` of one argument."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be an integer of at least {least}; got {text!r}")
    return int(text)


parse_depth = partial(parse_at_least, 0)
parse_count = partial(parse_at_least, 1)


def parse_sides(text: str) -> tuple[int, int]:
    """Return (height, width), as argparse's `type`.

    >>> parse_sides("224"), parse_sides("480x640")
    ((224, 224), (480, 640))
    """
    sides = text.split("x")
    if len(sides) > 2 or not all(side.isdecimal() and int(side) for side in sides):
        raise argparse.ArgumentTypeError(f"must be N or HEIGHTxWIDTH, such as 224 or 480x640; got {text!r}")
    return int(sides[0]), int(sides[-1])


def parse_trace_name(text: str) -> str:
    """Return the file name of a saved Trace, as argparse's `type`."""
    if not text.endswith(ENDINGS):
        raise argparse.ArgumentTypeError(f"the name of a saved Trace ends in {' or '.join(ENDINGS)}; got {text!r}")
    return text


def parse_assumptions(texts: Sequence[str]) -> dict[str, int | float]:
    """Return op → size from the values of `--assume`; another op, or a wrong size, raises ValueError.

    >>> parse_assumptions(["aten::nonzero=100", "aten::index=0.5"])
    {'aten::nonzero': 100, 'aten::index': 0.5}
    """
    sizes: dict[str, int | float] = {}
    for text in texts:
        op, _, size = text.partition("=")
        try:
            sizes[op] = int(size) if size.lstrip("-").isdigit() else float(size)
        except ValueError:
            message = f"--assume {text!r} has no size: write aten::nonzero=100, or a share such as 0.5"
            raise ValueError(message) from None
    check_assumptions(sizes)
    return sizes


def parse_number(text: str, least: float, most: float, expected: str, *parsers: Callable[[str], float]) -> float:
    """Return a number by the first of `parsers` that raises no ValueError, as argparse's `type` of one argument."""
    number = math.nan
    for parse in parsers[::-1]:
        with suppress(ValueError):
            number = float(parse(text))
    if not least <= number <= most:
        raise argparse.ArgumentTypeError(f"must be {expected}; got {text!r}")
    return number


def parse_amount(text: str) -> float:
    """Return a number above 0 such as 15e12, 15T or 2.5, as argparse's `type`.

    >>> parse_amount("15e12"), parse_amount("15T"), parse_amount("2.5")
    (15000000000000.0, 15000000000000.0, 2.5)
    """
    return parse_number(text, *_POSITIVE, "a number above 0, such as 15e12 or 2.5", float, parse_size)


def parse_part(text: str) -> float:
    return parse_number(text, 0, 1, "a number from 0 to 1, such as 0.5", float)


def parse_limit(text: str) -> float:
    return parse_number(text, *_POSITIVE, "a number of seconds above 0", float)


def parse_seconds(text: str) -> float:
    """Return seconds from a text such as 200ms, 1.5s or 1.5, as argparse's `type`.

    >>> parse_seconds("200ms"), parse_seconds("1.5s"), parse_seconds("2")
    (0.2, 1.5, 2.0)
    """
    match = re.fullmatch(r"([0-9]*\.?[0-9]+) ?(us|ms|s|)", text)
    seconds = float(match[1]) / {"us": 1e6, "ms": 1e3}.get(match[2], 1.0) if match else 0.0
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"must be a time above 0, such as 200ms or 1.5s; got {text!r}")
    return seconds


def parse_mesh(text: str) -> dict[str, int]:
    """Return axis → size of a `--mesh` text, outermost first; a mistake raises ValueError.

    >>> parse_mesh("dp=128,tp=8")
    {'dp': 128, 'tp': 8}
    """
    mesh: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if not axis or not size.isdecimal() or axis in mesh:
            raise ValueError(f"--mesh {text}: expected AXIS=N, each axis once, such as dp=128,tp=8; got {part!r}")
        mesh[axis] = int(size)
    return mesh
