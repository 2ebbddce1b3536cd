"""Measured kernels that are bound by memory: a matrix of bf16 scaled to fp8."""

from __future__ import annotations

from fvflops.devices.kernel_models.memory_bound import MemoryFigures, memory_seconds
from fvflops.devices.kernel_models.products import Processor
from kernel_fitting.kernel_class import US, KernelClass, Row

# Of an element read and written.
_BYTES = 2 + 1


def _read(row: Row) -> tuple[int] | None:
    if row["op_name"] != "scale_matrix":
        return None  # differences of two times
    return (int(row["m"]) * int(row["k"]) * _BYTES,)


def _seconds(shape: tuple[int], gpu: Processor, figures: MemoryFigures) -> float:
    return memory_seconds(shape[0], gpu.bandwidth, figures)


CLASSES = (
    KernelClass(
        name="memory",
        file="quantize.csv",
        dtype="quant_dtype",
        read=_read,
        seconds=_seconds,
        figures=MemoryFigures,
        bounds={
            "start": (0.3 * US, 1.5 * US, 20 * US),
            "bandwidth": (0.3, 0.85, 1.1),
            "cached": (1, 1.5, 5),
            "cache": (1e6, 40e6, 200e6),
        },
        fixed={},
        shipped={"fp8": "TRTLLM"},
    ),
)
