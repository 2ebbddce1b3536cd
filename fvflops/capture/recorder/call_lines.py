"""Event rows that include the source line that called each op."""

from __future__ import annotations

import sys
from typing import Any

from fvflops.capture.recorder.caller_lines import find_source_line
from fvflops.trace import Event

_DEFAULTS = tuple(Event._field_defaults.get(name) for name in Event._fields)


class LocatedEvents(list[tuple[Any, ...]]):
    """Event rows; `append` adds to an op's row the index in `lines` of the source line that called it.

    That is the innermost line outside torch and Python's standard library; an op without one, as in a backward pass,
    has None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, int] = {}

    def append(self, row: tuple[Any, ...]) -> None:
        """Append an event's row."""
        if row[0] == "op":
            line = find_source_line(sys._getframe(1)).line
            line_index = self.lines.setdefault(line, len(self.lines)) if line else None
            row = (*row, *_DEFAULTS[len(row) : -1], line_index)
        super().append(row)
