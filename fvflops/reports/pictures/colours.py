"""Colours of plots, read from the style sheet of the HTML report (light mode)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib.resources import files
from typing import NamedTuple

_COLOUR = re.compile(r"--([\w-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)")
_DISTINCT = 11  # names with distinct colours; all others share one more


class Groups(NamedTuple):
    """Names with distinct colours, in the order of the legend; `others` is the colour of all other names."""

    named: dict[str, str]
    others: str

    def of(self, name: str) -> str:
        return self.named.get(name, self.others)


def group(names: Iterable[str]) -> Groups:
    """Return the colours of names in order of importance, as only the first have distinct ones."""
    first = list(dict.fromkeys(names))[:_DISTINCT]
    return Groups({name: colour(f"c{index}") for index, name in enumerate(first)}, colour(f"c{_DISTINCT}"))


def colour(name: str) -> str:
    """Return a colour of the report's style, such as "ink"."""
    return _read_style()[name][0]


def adaptive(colour: str) -> str:
    """Return a colour of the style, or one that `colour` or `group` returned, as CSS that follows the page's theme."""
    by_light = {light: (light, dark) for light, dark in _read_style().values()}
    light, dark = _read_style().get(colour) or by_light[colour]
    return f"light-dark({light}, {dark})"


@cache
def _read_style() -> dict[str, tuple[str, str]]:
    style = files("fvflops.reports.html").joinpath("base.css").read_text(encoding="utf-8")
    return {name: (light, dark) for name, light, dark in _COLOUR.findall(style)}
