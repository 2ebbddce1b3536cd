"""Clock of a training loop: the wall clock, or CUDA events that no step waits for."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fvflops.devices.devices import Device, find_device


class Clock:
    """The wall clock, or events on the current stream of the CUDA device of the models' first parameter."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._device = _device_of(models)
        self._is_cuda = self._device is not None and self._device.type == "cuda"

    def read(self) -> Any:
        """Return a reading: the current time, or an event that has it later."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds_between(self, start: Any, stop: Any) -> float | None:
        """Return the seconds between two readings, None if they are not known yet."""
        if not self._is_cuda:
            return float(stop - start)
        return start.elapsed_time(stop) / 1e3 if stop.query() else None

    def device_name(self) -> str:
        """Return the name of the device as its driver reports it, "" if it has none."""
        return torch.cuda.get_device_name(self._device) if self._is_cuda else ""

    def memory_peak(self) -> float:
        """Return the most bytes allocated so far, NaN if they are not known."""
        return torch.cuda.max_memory_allocated(self._device) if self._is_cuda else math.nan

    def find_mismatch(self, peaks: Device) -> str:
        """Return why the peaks of a known accelerator cannot be the device's, "" where they may be."""
        if self._device is None or not peaks.vendor or not (self._is_cuda or self._device.type == "cpu"):
            return ""
        name = self.device_name() or "the CPU"
        known, given = _known_name(name), _known_name(peaks.name)
        # For an unlisted GPU a user may pass a similar one's peaks.
        is_other = not self._is_cuda or (known and given and known != given)
        return f"the peaks are for {peaks.name}, but the parameters are on {name}" if is_other else ""


def _known_name(name: str) -> str:
    try:
        return find_device(name).name
    except ValueError:
        return ""


def _device_of(models: Iterable[nn.Module]) -> torch.device | None:
    return next((parameter.device for model in models for parameter in model.parameters()), None)
