"""Measured matrix products."""

from __future__ import annotations

from fvflops.devices.kernel_models.products import Product, ProductFigures, product_seconds
from kernel_fitting.kernel_class import ELEMENT_BYTES, US, KernelClass, Row


def _product(row: Row) -> Product | None:
    size = ELEMENT_BYTES.get(row["gemm_dtype"])
    if size is None:
        return None
    return Product(int(row["m"]), int(row["n"]), int(row["k"]), operand_bytes=size)


CLASSES = (
    KernelClass(
        "product",
        ("gemm.csv",),
        "gemm_dtype",
        _product,
        product_seconds,
        ProductFigures,
        {
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
        },
        {},
    ),
)
