"""Texts of stack frames, units of weights, and metadata, for export files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from fvflops.reports.escaping import printable
from fvflops.trace.timeline import Frame, Timeline

# Weight → its unit, as written in files.
UNITS: Mapping[str, str] = {
    "time": "nanosecond, measured",
    "flops": "FLOP, counted and not timed",
    "macs": "multiply-add, counted and not timed",
    "bytes": "byte read or written, counted and not timed",
    "memory": "byte allocated and kept",
}

_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def title(frame: Frame) -> str:
    """Return the text of a region: its full name and its class or kind; for the root, its class.

    It does not end with a number, which readers of collapsed stacks would parse as a weight.

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
    """Return the frames of one call: its phase, the enclosing regions, and its op or region."""
    callee = timeline.callees[item]
    last = printable(callee.name) if callee.frame is None else title(timeline.frames[callee.frame])
    return (phase, *(title(timeline.frames[index]) for index in timeline.stacks[stack]), last)


def describe(timeline: Timeline, weight: str) -> dict[str, str]:
    """Return metadata of an export: weight, unit, and the metadata of the timeline."""
    metadata = {"exporter": "fvflops", "weight": weight, "unit": f"1 unit = 1 {UNITS[weight]}"}
    metadata |= {key: printable(text) for key, text in timeline.about.items()}
    if not timeline.complete:
        metadata["complete"] = "no: the run raised; this is the part before"
    return metadata


def dump(value: Any) -> str:
    """Return a value as JSON text that is safe in a script element of a page too.

    >>> print(dump({"name": "</script>"}))
    {"name":"\\u003c/script>"}
    """
    return _encode(value).replace("<", "\\u003c")
