"""A class of kernels: which measured rows are its own, how their seconds are computed, and which figures are fitted."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

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
# Dtypes of the rows → dtypes of devices.yaml; collectives are not told apart by theirs.
PEAKS = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4", "": "all"}
# The names of figures: weights of mxfp4 are multiplied in another dtype.
KEYS = {**PEAKS, "w4a16_mxfp4": "mxfp4", "w4a8_mxfp4_mxfp8": "mxfp4"}

Row = Mapping[str, str]


@cache
def processor(gpu: str, dtype: str) -> Processor:
    device = find_device(DEVICES[gpu])
    assert device.multiprocessors is not None and device.bandwidth is not None
    return Processor(device.multiprocessors, device.peak(PEAKS[dtype]), device.bandwidth)


class Sample(NamedTuple):
    """One measured kernel: what it computes, on which GPU, and its seconds."""

    gpu: str
    engine: str
    dtype: str
    shape: Any
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelClass:
    """Kernels whose seconds one function computes from figures.

    `read` returns the shape of a row of `file`, None for one that is not of the class; `dtype` is the column of the
    row's. `bounds` are figure → lowest, first and highest value, `fixed` figure → values to choose from. `shipped` are
    dtype → the engines whose kernels the shipped figures are fitted to, by the beginning of their name: one for all
    GPUs, or GPU → engine. `extra` are seconds of kernels timed too. `machine` returns what `seconds` needs to know of
    a GPU for a dtype; `more` are other files with rows of the class.
    """

    name: str
    file: str
    read: Callable[[Row], Any]
    seconds: Callable[[Any, Any, Any], float]
    figures: type
    bounds: Mapping[str, tuple[float, float, float]]
    dtype: str = ""
    fixed: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    shipped: Mapping[str, str | Mapping[str, str]] = field(default_factory=lambda: {"": ""})
    extra: Callable[[Sample], float] = lambda sample: 0.0
    machine: Callable[[str, str], Any] = processor
    more: tuple[str, ...] = ()

    def samples(self, folder: Path) -> Iterator[Sample]:
        for name in (self.file, *self.more):
            with open(folder / name, newline="") as file:
                yield from filter(None, map(self._sample, csv.DictReader(file)))

    def _sample(self, row: Row) -> Sample | None:
        seconds = float(row["latency_ms"]) / 1e3
        shape = self.read(row) if seconds > 0 else None
        engine = f"{row['framework']} {row['kernel_source']} {row['version']}"
        return None if shape is None else Sample(row["gpu"], engine, row.get(self.dtype, ""), shape, seconds)

    def is_shipped(self, sample: Sample) -> bool:
        """Return whether a measured kernel is of the engine that the shipped figures are fitted to."""
        engine = self.shipped[sample.dtype]
        if isinstance(engine, str):
            return sample.engine.startswith(engine)
        return sample.gpu in engine and sample.engine.startswith(engine[sample.gpu])

    def time(self, sample: Sample, figures: Any) -> float:
        return self.seconds(sample.shape, self.machine(sample.gpu, sample.dtype), figures) + self.extra(sample)


US = 1e-6
