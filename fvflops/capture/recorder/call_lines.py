"""The lines of source: where in the model's own code each op was called from."""

from __future__ import annotations

import sys
from typing import Any

from fvflops.capture.recorder.source_lines import find_source_line
from fvflops.trace import Event

_DEFAULTS = tuple(Event._field_defaults.get(name) for name in Event._fields)


class LocatedEvents(list[tuple[Any, ...]]):
    """Rows of events that grow, in which each op has the number of the line of `lines` that it was called from.

    That is the innermost line of code that is neither torch's nor Python's own; an op that no such line called, as in a
    backward pass, has none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, int] = {}

    def append(self, row: tuple[Any, ...]) -> None:
        """Add an event, an op's with its line."""
        if row[0] == "op":
            line = find_source_line(sys._getframe(1)).line
            number = self.lines.setdefault(line, len(self.lines)) if line else None
            row = (*row, *_DEFAULTS[len(row) : -1], number)
        super().append(row)
