"""A time.perf_counter_ns that can advance by a fixed step at each read, so that profiles can be compared."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_STEP_NS = 1_000
_real = time.perf_counter_ns
_now: int | None = None


def install() -> None:
    """Replace time.perf_counter_ns; call it before anything imports the name from there."""
    time.perf_counter_ns = _read


@contextmanager
def ticking() -> Iterator[None]:
    """Advance the clock by one step at each read."""
    global _now
    _now = 0
    try:
        yield
    finally:
        _now = None


def _read() -> int:
    global _now
    if _now is None:
        return _real()
    _now += _STEP_NS
    return _now
