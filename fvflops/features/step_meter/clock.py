"""Clocks of a training loop: the wall clock, and CUDA events that no step waits for."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class WallClock:
    """The wall clock, for models on the CPU."""

    def read(self) -> Any:
        """Return a reading: the current time, or what will say it later."""
        return time.perf_counter()

    def seconds_between(self, start: Any, stop: Any) -> float | None:
        """Return the seconds between two readings, None if they are not known yet."""
        return float(stop - start)

    def device_name(self) -> str:
        """Return the name of the device as its driver reports it, "" if it has none."""
        return ""

    def memory_peak(self) -> float:
        """Return the most bytes allocated so far, NaN if they are not known."""
        return math.nan


class CudaClock(WallClock):
    """Events on the current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds_between(self, start: Any, stop: Any) -> float | None:
        return start.elapsed_time(stop) / 1e3 if stop.query() else None

    def device_name(self) -> str:
        return torch.cuda.get_device_name(self._device)

    def memory_peak(self) -> float:
        return torch.cuda.max_memory_allocated(self._device)


def clock_of(models: Iterable[nn.Module]) -> WallClock:
    """Return the clock of the device that has the first parameter of the models."""
    first = next((parameter for model in models for parameter in model.parameters()), None)
    return CudaClock(first.device) if first is not None and first.device.type == "cuda" else WallClock()
