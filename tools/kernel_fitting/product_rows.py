"""Measured matrix products."""

from __future__ import annotations

from fvflops import find_device
from fvflops.devices.kernel_models.figures import find_figures
from fvflops.devices.kernel_models.memory_bound import memory_seconds
from fvflops.devices.kernel_models.products import Product, ProductFigures, product_seconds
from kernel_fitting.kernel_class import DEVICES, ELEMENT_BYTES, US, KernelClass, Row, Sample


def _read(row: Row) -> Product | None:
    size = ELEMENT_BYTES.get(row["gemm_dtype"])
    if size is None:
        return None
    return Product(int(row["m"]), int(row["n"]), int(row["k"]), operand_bytes=size, is_repeated=True)


def _scaling(sample: Sample) -> float:
    """Return the seconds of scaling the first operand from bf16, which is timed with a product in fp8."""
    if sample.dtype == "bfloat16":
        return 0.0
    device = find_device(DEVICES[sample.gpu])
    found = find_figures(device)
    assert found is not None and device.bandwidth is not None
    elements = sample.shape.rows * sample.shape.inner
    # The largest value is read from bf16, then the values are read and written in fp8.
    return sum(memory_seconds(nbytes * elements, device.bandwidth, found.of("memory", "")) for nbytes in (2, 2 + 1))


BOUNDS = {
    "large": (0.3, 0.8, 1.1),
    "medium": (0.3, 0.9, 1.3),
    "small": (0.05, 0.6, 1.5),
    "start": (0.3 * US, 2 * US, 20 * US),
    "tile": (0.01 * US, 1 * US, 10 * US),
    "split": (0.05 * US, 2 * US, 20 * US),
    "bandwidth": (0.4, 0.83, 1.1),
    "feed": (5e9, 100e9, 600e9),
    "whole_waves": (0.01, 0.3, 1),
    "overlap": (1.2, 3, 20),
    "cache": (1, 5e6, 200e6),
    "held": (1, 20e6, 200e6),
}

CLASSES = (
    KernelClass(
        name="product",
        file="gemm.csv",
        dtype="gemm_dtype",
        read=_read,
        seconds=product_seconds,
        figures=ProductFigures,
        bounds=BOUNDS,
        fixed={},
        # Of TRT-LLM's rows on an L40S some are from the cache, and others of equal bytes are not.
        shipped={"bfloat16": {**dict.fromkeys(DEVICES, ""), "l40s": "SGLang"}, "fp8": "TRTLLM", "nvfp4": "VLLM"},
        extra=_scaling,
    ),
)
