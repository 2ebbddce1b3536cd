"""Texts of the levels of a flame graph, outermost first, and the units of its widths."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from fvflops.reports.names import printable
from fvflops.trace.timeline import Frame, Timeline

# Weight → its unit, for the reader of the file.
UNITS: Mapping[str, str] = {
    "time": "nanosecond, measured",
    "flops": "FLOP, counted and not timed",
    "macs": "multiply-add, counted and not timed",
    "bytes": "byte read or written, counted and not timed",
    "memory": "byte allocated and kept",
}

_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def title(frame: Frame) -> str:
    """Return the text of a region: its full name and its class or kind; the root is named by its class.

    It does not end with a number, which a reader of collapsed stacks would take for a weight.

    >>> title(Frame("module", "layer1.0", "Block")), title(Frame("module", "", "Net")), title(Frame("group", "SGD 0"))
    ('layer1.0 (Block)', 'Net', 'SGD 0 (group)')
    """
    return _title(*frame)


@lru_cache(maxsize=1 << 14)
def _title(kind: str, name: str, class_name: str) -> str:
    if kind == "module" and not name:
        return printable(class_name) or "(model)"
    return f"{printable(name)} ({printable(class_name) or kind})"


def list_frames(timeline: Timeline, item: int, stack: int, phase: str) -> tuple[str, ...]:
    """Return the frames of the work that one call does itself: its phase, the regions around it, and its op."""
    called = timeline.callees[item]
    last = printable(called.name) if called.frame is None else title(timeline.frames[called.frame])
    return (phase, *(title(timeline.frames[index]) for index in timeline.stacks[stack]), last)


def describe(timeline: Timeline, weight: str) -> dict[str, str]:
    """Return facts about an export: its unit, the versions, and what it lacks."""
    facts = {"exporter": "fvflops", "weight": weight, "unit": f"1 unit = 1 {UNITS[weight]}"}
    facts |= {key: printable(text) for key, text in timeline.about.items()}
    if not timeline.complete:
        facts["complete"] = "no: the run raised, and this is what ran before"
    return facts


def dump(value: Any) -> str:
    """Return a value as JSON text that can stand in a page's script too.

    >>> print(dump({"name": "</script>"}))
    {"name":"\\u003c/script>"}
    """
    return _encode(value).replace("<", "\\u003c")
