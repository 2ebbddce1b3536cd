"""Export a Trace as a timeline or flame graph for other programs, in a format chosen by the file extension."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fvflops import paths
from fvflops.counting import CostModel, build_timeline
from fvflops.counting.traffic.byte_costs import split_by_aliasing
from fvflops.reports import EXPORTS
from fvflops.trace import Trace
from fvflops.trace.timeline import WEIGHTS

# File extension → format; the first match is used.
ENDINGS: Mapping[str, str] = {
    ".speedscope.json": "speedscope",
    ".json": "chrome-trace",
    ".txt": "flame-graph",
    ".folded": "flame-graph",
}


def prepare_export(path: str | os.PathLike[str], format: str | None = None, weight: str | None = None) -> str:
    """Return the format of an export, after checking path, format and weight before a Trace is recorded."""
    name = os.fspath(path)
    formats = ", ".join(EXPORTS)
    if format is None:
        format = next((value for ending, value in ENDINGS.items() if name.lower().endswith(ending)), None)
        if format is None:
            *endings, last = ENDINGS
            raise ValueError(
                f"{name} has no known file extension: use {', '.join(endings)} or {last}, "
                f"or pass format, one of {formats}"
            )
    if format not in EXPORTS:
        raise ValueError(f"export format must be one of {formats}; got {format!r}")
    if weight is not None and weight not in WEIGHTS:
        raise ValueError(f"weight must be one of {', '.join(WEIGHTS)}; got {weight!r}")
    paths.check_writable(name)
    return format


def write_export(
    trace: Trace, cost_model: CostModel, path: str | os.PathLike[str], format: str, weight: str | None = None
) -> None:
    """Write a Trace in a format that `prepare_export` returned; a weight without data raises TraceError."""
    moved, traffic_model = split_by_aliasing(trace, keep_events=True)
    pieces = EXPORTS[format](build_timeline(moved, cost_model, traffic_model=traffic_model), weight=weight)
    paths.write_text(os.fspath(path), pieces)
