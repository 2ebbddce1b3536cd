"""Clocks of a training loop: the wall clock, and CUDA events that no step waits for."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from fvflops.devices.devices import Device, find_device


class WallClock:
    """The wall clock, for models on the CPU."""

    def read(self) -> Any:
        """Return a reading: the current time, or an event that has it later."""
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
    device = _device_of(models)
    return CudaClock(device) if device is not None and device.type == "cuda" else WallClock()


def find_mismatch(models: Iterable[nn.Module], peaks: Device) -> str:
    """Return why the peaks of a known accelerator cannot be the models' device's, "" where they may be."""
    device = _device_of(models)
    if device is None or not peaks.vendor:
        return ""
    if device.type == "cpu":
        return f"the peaks are of {peaks.name}, but the parameters are on the CPU"
    if device.type != "cuda":
        return ""
    name = torch.cuda.get_device_name(device)
    known, given = _known_name(name), _known_name(peaks.name)
    is_other = known and given and known != given  # a GPU that is not listed may have a similar one's peaks
    return f"the peaks are of {peaks.name}, but the parameters are on {name}" if is_other else ""


def _known_name(name: str) -> str:
    try:
        return find_device(name).name
    except ValueError:
        return ""


def _device_of(models: Iterable[nn.Module]) -> torch.device | None:
    return next((parameter.device for model in models for parameter in model.parameters()), None)
