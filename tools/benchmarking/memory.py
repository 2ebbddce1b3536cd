"""The memory of this process, as Linux tells it; elsewhere it is not measured."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_STATUS = Path("/proc/self/status")
_RESET = Path("/proc/self/clear_refs")


def resident_megabytes() -> float | None:
    """Return the memory that is resident now."""
    return _read("VmRSS")


def peak_megabytes() -> float | None:
    """Return the most that was resident since `forget_peak`, or since the process began where it cannot be reset."""
    return _read("VmHWM")


def forget_peak() -> None:
    """Let the peak begin again at what is resident now."""
    with suppress(OSError):
        _RESET.write_text("5")


def _read(field: str) -> float | None:
    try:
        lines = _STATUS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":")), None)
