"""Measured gated linear attention (gated delta rule), and the short convolutions before it."""

from __future__ import annotations

from typing import NamedTuple

from fvflops.devices.kernel_models.memory_bound import MemoryFigures, memory_seconds
from fvflops.devices.kernel_models.products import Processor
from fvflops.devices.kernel_models.recurrent import Recurrence, RecurrentFigures, recurrent_seconds
from kernel_fitting.kernel_class import US, KernelClass, Row, processor

_FILE = "linear_attention.csv"
_SHIPPED = {"": "vLLM"}


def _processor(gpu: str, dtype: str) -> Processor:
    return processor(gpu, "bfloat16")  # the file has no dtypes


class _Convolution(NamedTuple):
    """A causal convolution of `channels` over few tokens."""

    batch: int
    tokens: int
    channels: int


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


def _read_convolution(row: Row) -> _Convolution | None:
    if row["kernel_source"] != "causal_conv1d_fn" or row["op_name"] != "gdn":
        return None
    heads = 2 * int(float(row["num_k_heads"])) * int(float(row["head_k_dim"]))
    channels = heads + int(float(row["num_v_heads"])) * int(float(row["head_v_dim"]))
    return _Convolution(int(row["batch_size"]), int(row["seq_len"]), channels)


def _convolution_seconds(shape: _Convolution, gpu: Processor, figures: MemoryFigures) -> float:
    moved = 2 * 2 * shape.batch * shape.tokens * shape.channels  # bf16, read and written
    return memory_seconds(moved, gpu.bandwidth, figures)


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
    KernelClass(
        name="short convolution",
        file=_FILE,
        dtype="",
        read=_read_convolution,
        seconds=_convolution_seconds,
        figures=MemoryFigures,
        bounds={
            "start": (0.3 * US, 2 * US, 20 * US),
            "bandwidth": (0.1, 0.8, 1.1),
            "cached": (1, 2, 8),
            "cache": (1e6, 50e6, 200e6),
        },
        fixed={},
        shipped=_SHIPPED,
        machine=_processor,
    ),
)
