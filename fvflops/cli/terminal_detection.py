"""Detect the terminal: its width, colour and encoding."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple, TextIO

from fvflops.reports.terminal.terminal_line import WIDTH, terminal_width


class TerminalInfo(NamedTuple):
    """Width in character cells (None for no limit), colour support and encoding of a terminal."""

    width: int | None
    colour: bool
    encoding: str


def find_terminal(stream: TextIO, environment: Mapping[str, str] = os.environ) -> TerminalInfo | None:
    """Return the terminal that a stream writes to, None for a file or a pipe.

    NO_COLOR overrides FORCE_COLOR and CLICOLOR_FORCE, which treat a pipe as a terminal without a width limit, and these
    override TERM=dumb; COLUMNS overrides the width that the terminal reports.

    >>> import io
    >>> find_terminal(io.StringIO(), {}) is None
    True
    >>> find_terminal(io.StringIO(), {"FORCE_COLOR": "1", "COLUMNS": "60"})
    TerminalInfo(width=60, colour=True, encoding='utf-8')
    """
    forced = any(environment.get(name, "") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE"))
    forced = forced and not environment.get("NO_COLOR")
    if not (stream.isatty() or forced):
        return None
    disabled = environment.get("NO_COLOR") or environment.get("TERM") == "dumb" or environment.get("FORCE_COLOR") == "0"
    return TerminalInfo(_measure(stream, environment), forced or not disabled, stream.encoding or "utf-8")


def find_width(stream: TextIO, environment: Mapping[str, str] = os.environ) -> int:
    """Return the longest line of a report: COLUMNS, the width of the terminal, or 80.

    >>> import io
    >>> find_width(io.StringIO(), {}), find_width(io.StringIO(), {"COLUMNS": "60"})
    (80, 60)
    """
    return _measure(stream, environment) or WIDTH


def _measure(stream: TextIO, environment: Mapping[str, str]) -> int | None:
    columns = environment.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    if not stream.isatty():
        return None
    return terminal_width(stream)
