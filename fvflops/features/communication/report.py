"""The communication report: what a rank sends and receives, a line for each collective and group."""

from __future__ import annotations

from fvflops.features.communication.model import Communication, Route, Volume
from fvflops.reports.names import printable_short
from fvflops.reports.text.pipe_table import pipe_table
from fvflops.units import format_thousands

_HEADERS = ("collective", "over", "ranks", "dtype", "calls", "payload, bytes", "on the wire, bytes")


def render(communication: Communication) -> str:
    """Return the communication as a table, and what of it nobody could read.

    >>> print(render(Communication((), {"symm_mem::fused": 2})))
    UNKNOWN, so missing from the bytes: symm_mem::fused (2).
    >>> print(render(Communication(())))
    Nothing is communicated.
    """
    parts = []
    routes = communication.by_route()
    if routes:
        rows = [_row(route, volume) for route, volume in routes.items()]
        total = communication.total()
        parts.append(pipe_table(_HEADERS, [*rows, ("total", "", "", "", *_figures(total))]))
    if communication.unknown:
        named = ", ".join(
            f"{printable_short(op)} ({format_thousands(calls)})" for op, calls in communication.unknown.items()
        )
        parts.append(f"UNKNOWN, so missing from the bytes: {named}.")
    return "\n\n".join(parts) or "Nothing is communicated."


def _row(route: Route, volume: Volume) -> tuple[str, ...]:
    size = "?" if route.size is None else format_thousands(route.size)
    return (
        printable_short(route.collective),
        printable_short(route.axis),
        size,
        printable_short(route.dtype),
        *_figures(volume),
    )


def _figures(volume: Volume) -> tuple[str, str, str]:
    wire = "?" if volume.wire is None else format_thousands(volume.wire)
    return format_thousands(volume.calls), format_thousands(volume.payload), wire
