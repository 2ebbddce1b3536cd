"""A class of kernels: which measured rows are its own, how their seconds are computed, and which figures are fitted."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fvflops.devices.kernel_models.figures import CLASSES as FIGURES
from kernel_fitting.row_shapes import COMPUTED, DATA, Row, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelClass:
    """Kernels whose seconds one function computes from figures; classes.yaml describes the fields."""

    name: str
    files: tuple[str, ...]
    bounds: Mapping[str, tuple[float, float, float]]
    dtype: str = ""
    fixed: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    shipped: Mapping[str, str | Mapping[str, str]] = field(default_factory=lambda: {"": ""})

    def samples(self, folder: Path) -> Iterator[Sample]:
        for name in self.files:
            with open(folder / name, newline="") as file:
                yield from filter(None, map(self._sample, csv.DictReader(file)))

    def _sample(self, row: Row) -> Sample | None:
        dtype, seconds = row.get(self.dtype, ""), float(row["latency_ms"]) / 1e3
        shape = COMPUTED[self.name].read(row) if seconds > 0 and dtype in self.shipped else None
        engine = f"{row['framework']} {row['kernel_source']} {row['version']}"
        return None if shape is None else Sample(row["gpu"], engine, dtype, shape, seconds)

    def is_shipped(self, sample: Sample) -> bool:
        """Return whether a measured kernel is of the engine that the shipped figures are fitted to."""
        engine = self.shipped[sample.dtype]
        if isinstance(engine, str):
            return sample.engine.startswith(engine)
        return sample.gpu in engine and sample.engine.startswith(engine[sample.gpu])

    def figures(self, **values: float) -> Any:
        return FIGURES[self.name](**values)

    def time(self, sample: Sample, figures: Any) -> float:
        _, seconds, machine, extra = COMPUTED[self.name]
        return seconds(sample.shape, machine(sample.gpu, sample.dtype), figures) + extra(sample)


CLASSES = {name: KernelClass(name=name, **entry) for name, entry in DATA["classes"].items()}
