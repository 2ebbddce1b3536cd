"""A class of kernels: which measured rows are its own, how their seconds are computed, and which figures are fitted."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fvflops import find_device
from fvflops.devices.kernel_models.products import Processor

DEVICES = {
    "a100_sxm": "A100 SXM 80GB",
    "h100_sxm": "H100 SXM",
    "h200_sxm": "H200",
    "b200_sxm": "B200",
    "l40s": "L40S",
    "rtx_pro_6000_server": "RTX PRO 6000 Blackwell Server Edition",
}
ELEMENT_BYTES = {"bfloat16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5625}
_PEAKS = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4"}

Row = Mapping[str, str]


@cache
def processor(gpu: str, dtype: str) -> Processor:
    """Return a GPU of the measurements for a dtype of theirs."""
    device = find_device(DEVICES[gpu])
    assert device.multiprocessors is not None and device.bandwidth is not None
    return Processor(device.multiprocessors, device.peak(_PEAKS[dtype]), device.bandwidth)


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured kernel: what it computes, on which GPU, and its seconds."""

    gpu: str
    engine: str
    dtype: str
    shape: Any
    seconds: float


@dataclass(frozen=True, slots=True)
class KernelClass:
    """Kernels whose seconds one function computes from figures; `bounds` are figure → lowest, first and highest value."""

    name: str
    files: tuple[str, ...]
    dtype: str
    read: Callable[[Row], Any]
    seconds: Callable[[Any, Any, Any], float]
    figures: type
    bounds: Mapping[str, tuple[float, float, float]]
    fixed: Mapping[str, tuple[int, ...]]
    machine: Callable[[str, str], Any] = processor

    def samples(self, folder: Path) -> Iterator[Sample]:
        """Yield the measured kernels of this class in a folder."""
        for row in self._rows(folder):
            seconds = float(row["latency_ms"]) / 1e3
            shape = self.read(row) if seconds > 0 else None
            if shape is not None:
                engine = f"{row['framework']} {row['kernel_source']}"
                yield Sample(row["gpu"], engine, row[self.dtype] if self.dtype else "", shape, seconds)

    def _rows(self, folder: Path) -> Iterator[Row]:
        for name in self.files:
            with open(folder / name, newline="") as file:
                yield from csv.DictReader(file)


US = 1e-6
