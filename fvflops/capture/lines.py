"""The lines of source: where in the model's own code each op was called from."""

from __future__ import annotations

import os
import sys
import sysconfig
from types import CodeType
from typing import Any

import torch

from fvflops.trace import Event

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_ZOO = os.path.join(_PACKAGE, "zoo") + os.sep
# The file whose frames are around the model's.
_OUTERMOST = os.path.join(_PACKAGE, "capture", "record.py")
_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
_NOT_THE_MODELS = (os.path.dirname(os.path.abspath(torch.__file__)) + os.sep, _PACKAGE + os.sep, "<")
_DEFAULTS = tuple(Event._field_defaults.get(name) for name in Event._fields)


class LocatedEvents(list[tuple[Any, ...]]):
    """Rows of events that grow, in which each op has the number of the line of `lines` that it was called from.

    That is the innermost line of code that is neither torch's nor Python's own; an op that no such line called, as in a
    backward pass, has none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, int] = {}
        self._paths: dict[CodeType, str | None] = {}

    def append(self, row: tuple[Any, ...]) -> None:
        """Add an event, an op's with its line."""
        if row[0] == "op":
            row = (*row, *_DEFAULTS[len(row) : -1], self._find_line())
        super().append(row)

    def _find_line(self) -> int | None:
        frame = sys._getframe(2)
        while frame is not None:
            code = frame.f_code
            if code.co_filename == _OUTERMOST:
                return None
            if code not in self._paths:
                self._paths[code] = _name_file(code.co_filename)
            path = self._paths[code]
            if path is not None:
                return self.lines.setdefault(f"{path}:{frame.f_lineno}", len(self.lines))
            frame = frame.f_back  # type: ignore[assignment]
        return None


def _name_file(path: str) -> str | None:
    """Return a file's path below the folder that it is imported from, None where it is not the model's."""
    if path.startswith(_NOT_THE_MODELS) and not path.startswith(_ZOO):
        return None
    if path.startswith(_LIBRARY) and "-packages" + os.sep not in path:
        return None
    folders = [os.path.abspath(folder) + os.sep for folder in sys.path]
    inside = [folder for folder in folders if path.startswith(folder)]
    return path[len(max(inside, key=len)) :] if inside else os.path.basename(path)
