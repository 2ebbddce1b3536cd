"""Measured attention of prompts and of decoding."""

from __future__ import annotations

import math

from fvflops.devices.kernel_models.attention import (
    Attention,
    AttentionFigures,
    DecodeFigures,
    attention_seconds,
    decode_seconds,
)
from kernel_fitting.kernel_class import ELEMENT_BYTES, US, KernelClass, Row


def _read(row: Row) -> Attention | None:
    if row["attn_dtype"] not in ELEMENT_BYTES or row["kv_cache_dtype"] not in ELEMENT_BYTES:
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
        key_bytes=ELEMENT_BYTES[row["kv_cache_dtype"]],
        appends=True,
    )


CLASSES = (
    KernelClass(
        name="attention",
        file="attention_prefill.csv",
        dtype="attn_dtype",
        read=_read,
        seconds=attention_seconds,
        figures=AttentionFigures,
        bounds={
            "peak": (0.05, 0.6, 1.1),
            "narrow": (0.3, 0.8, 1.3),
            "wide": (0.1, 1, 1.6),
            "start": (0.5 * US, 6 * US, 40 * US),
            "tile": (0.02 * US, 1 * US, 60 * US),
            "tail": (0.01, 0.5, 1.5),
            "bandwidth": (0.2, 0.8, 1.1),
            "overlap": (1.1, 1.5, 20),
            "cache": (0.5, 3, 20),
        },
        fixed={"rows": (64, 128)},
        shipped={"bfloat16": ""},
    ),
    KernelClass(
        name="decode",
        file="attention_decode.csv",
        dtype="attn_dtype",
        read=_read,
        seconds=decode_seconds,
        figures=DecodeFigures,
        bounds={
            "start": (0.5 * US, 6 * US, 40 * US),
            "block": (0.02 * US, 3 * US, 60 * US),
            "feed": (2e9, 50e9, 400e9),
            "split": (0.01 * US, 2 * US, 30 * US),
            "tail": (0.01, 0.5, 2),
            "bandwidth": (0.2, 0.85, 1.2),
            "overlap": (1.1, 3, 20),
        },
        fixed={},
        shipped={"bfloat16": ""},
    ),
)
