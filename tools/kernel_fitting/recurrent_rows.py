"""Measured gated linear attention (gated delta rule)."""

from __future__ import annotations

from fvflops.devices.kernel_models.products import Processor
from fvflops.devices.kernel_models.recurrent import Recurrence, RecurrentFigures, recurrent_seconds
from kernel_fitting.kernel_class import US, KernelClass, Row, processor

_FILE = "linear_attention.csv"
_SHIPPED = {"": "vLLM"}


def _processor(gpu: str, dtype: str) -> Processor:
    return processor(gpu, "bfloat16")  # the file has no dtypes


def _read_scan(row: Row) -> Recurrence | None:
    if not row["kernel_source"].startswith("chunk_gated_delta_rule"):
        return None
    return Recurrence(
        int(row["batch_size"]),
        int(row["seq_len"]),
        int(float(row["num_k_heads"])),
        int(float(row["num_v_heads"])),
        int(float(row["head_k_dim"])),
        int(float(row["head_v_dim"])),
    )


CLASSES = (
    KernelClass(
        name="recurrent",
        file=_FILE,
        dtype="",
        read=_read_scan,
        seconds=recurrent_seconds,
        figures=RecurrentFigures,
        bounds={
            "start": (1 * US, 12 * US, 100 * US),
            "step": (0.1 * US, 2 * US, 40 * US),
            "state": (0.05, 1, 20),
            "bandwidth": (0.01, 0.3, 1.2),
            "cached": (1, 2, 16),
            "cache": (1e5, 60e6, 200e6),
        },
        fixed={},
        shipped=_SHIPPED,
        machine=_processor,
    ),
)
