"""Classes of kernels: which measured rows are theirs, how a row is computed, and which figures are fitted."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fvflops import find_device
from fvflops.devices.kernel_models.attention import (
    Attention,
    AttentionFigures,
    DecodeFigures,
    attention_seconds,
    decode_seconds,
)
from fvflops.devices.kernel_models.products import Processor, Product, ProductFigures, product_seconds

DEVICES = {
    "a100_sxm": "A100 SXM 80GB",
    "h100_sxm": "H100 SXM",
    "h200_sxm": "H200",
    "b200_sxm": "B200",
    "l40s": "L40S",
    "rtx_pro_6000_server": "RTX PRO 6000 Blackwell Server Edition",
}
_ELEMENT_BYTES = {"bfloat16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5625}
_PEAKS = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "nvfp4": "fp4"}

Row = Mapping[str, str]


@lru_cache(maxsize=None)
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
    file: str
    dtype: str
    read: Callable[[Row], Any]
    seconds: Callable[[Any, Processor, Any], float]
    figures: type
    bounds: Mapping[str, tuple[float, float, float]]
    fixed: Mapping[str, tuple[int, ...]]

    def samples(self, folder: Path) -> Iterator[Sample]:
        """Yield the measured kernels of this class in a folder."""
        with open(folder / self.file, newline="") as file:
            for row in csv.DictReader(file):
                seconds = float(row["latency_ms"]) / 1e3
                shape = self.read(row) if seconds > 0 else None
                if shape is not None:
                    engine = f"{row['framework']} {row['kernel_source']}"
                    yield Sample(row["gpu"], engine, row[self.dtype], shape, seconds)


def _product(row: Row) -> Product | None:
    size = _ELEMENT_BYTES.get(row["gemm_dtype"])
    if size is None:
        return None
    return Product(int(row["m"]), int(row["n"]), int(row["k"]), operand_bytes=size)


def _attention(row: Row) -> Attention | None:
    if row["attn_dtype"] not in _ELEMENT_BYTES or row["kv_cache_dtype"] not in _ELEMENT_BYTES:
        return None
    new, cached = int(row["isl"]), int(row["step"])
    return Attention(
        int(row["batch_size"]),
        new,
        new + cached,
        int(row["num_heads"]),
        int(row["num_key_value_heads"]),
        int(row["head_dim"]),
        window=float(row["window_size"] or 0) or math.inf,
        key_bytes=_ELEMENT_BYTES[row["kv_cache_dtype"]],
        appends=True,
    )


_US = 1e-6
CLASSES = {
    kind.name: kind
    for kind in (
        KernelClass(
            "product",
            "gemm.csv",
            "gemm_dtype",
            _product,
            product_seconds,
            ProductFigures,
            {
                "large": (0.3, 0.8, 1.1),
                "medium": (0.3, 0.9, 1.3),
                "small": (0.05, 0.6, 1.5),
                "start": (0.3 * _US, 2 * _US, 20 * _US),
                "tile": (0.01 * _US, 1 * _US, 10 * _US),
                "split": (0.05 * _US, 2 * _US, 20 * _US),
                "bandwidth": (0.4, 0.83, 1.1),
                "feed": (5e9, 100e9, 600e9),
                "whole_waves": (0.01, 0.3, 1),
                "overlap": (1.2, 3, 20),
            },
            {},
        ),
        KernelClass(
            "attention",
            "attention_prefill.csv",
            "attn_dtype",
            _attention,
            attention_seconds,
            AttentionFigures,
            {
                "peak": (0.05, 0.6, 1.1),
                "narrow": (0.3, 0.8, 1.3),
                "wide": (0.1, 1, 1.6),
                "start": (0.5 * _US, 6 * _US, 40 * _US),
                "tile": (0.02 * _US, 1 * _US, 60 * _US),
                "tail": (0.01, 0.5, 1.5),
                "bandwidth": (0.2, 0.8, 1.1),
                "overlap": (1.1, 1.5, 20),
                "cache": (0.5, 3, 20),
            },
            {"rows": (64, 128)},
        ),
        KernelClass(
            "decode",
            "attention_decode.csv",
            "attn_dtype",
            _attention,
            decode_seconds,
            DecodeFigures,
            {
                "start": (0.5 * _US, 6 * _US, 40 * _US),
                "block": (0.02 * _US, 3 * _US, 60 * _US),
                "feed": (2e9, 50e9, 400e9),
                "split": (0.01 * _US, 2 * _US, 30 * _US),
                "tail": (0.01, 0.5, 2),
                "bandwidth": (0.2, 0.85, 1.2),
                "overlap": (1.1, 3, 20),
            },
            {},
        ),
    )
}
