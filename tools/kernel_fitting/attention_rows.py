"""Measured attention of prompts, of encoders, of decoding, and latent attention of both."""

from __future__ import annotations

import math
from dataclasses import replace

from fvflops.devices.kernel_models.fused_attention import (
    Attention,
    AttentionFigures,
    DecodeFigures,
    attention_seconds,
    decode_seconds,
)
from kernel_fitting.kernel_class import ELEMENT_BYTES, US, KernelClass, Row

# Latent attention of DeepSeek-V2 and -V3: elements of a key and a value of a head, and of the latent ones.
_KEY, _VALUE = 192, 128
_LATENT_KEY, _LATENT_VALUE = 576, 512
_SMALL_GROUP = 16


def _read(row: Row) -> Attention | None:
    new, cached = int(row["isl"]), int(row["step"])
    decodes = cached > 0
    if row["kv_cache_dtype"] not in ELEMENT_BYTES or not (decodes or row["attn_dtype"] == row["kv_cache_dtype"]):
        return None
    return Attention(
        int(row["batch_size"]),
        new,
        new + cached,
        int(row["num_heads"]),
        int(row["num_key_value_heads"]),
        int(row["head_dim"]),
        window=float(row["window_size"] or 0) or math.inf,
        element_bytes=ELEMENT_BYTES[row["attn_dtype"]],
        key_bytes=ELEMENT_BYTES[row["kv_cache_dtype"]],
        appends=not decodes,
        repeated=True,
    )


def _read_small_groups(row: Row) -> Attention | None:
    """Return the shape of a row with up to 16 heads a key, for which TensorRT-LLM has kernels of its own."""
    shape = _read(row)
    return shape if shape is not None and shape.heads <= _SMALL_GROUP * shape.key_heads else None


def _read_encoder(row: Row) -> Attention:
    tokens, heads = int(row["isl"]), int(row["num_heads"])
    return Attention(int(row["batch_size"]), tokens, tokens, heads, heads, int(row["head_dim"]), causal=False)


def _read_latent(row: Row) -> Attention | None:
    tokens, heads = int(row["isl"]), int(row["num_heads"])
    size = ELEMENT_BYTES[row["kv_cache_dtype"]]
    return Attention(
        int(row["batch_size"]), tokens, tokens, heads, heads, _KEY, key_bytes=size, appends=True, value_size=_VALUE
    )


def _read_latent_decode(row: Row) -> Attention:
    return Attention(
        int(row["batch_size"]),
        1,
        1 + int(row["step"]),
        int(row["num_heads"]),
        1,
        _LATENT_KEY,
        key_bytes=ELEMENT_BYTES[row["kv_cache_dtype"]],
        value_size=_LATENT_VALUE,
        latent=True,
        repeated=True,
    )


# Heads of a group in one tile: the largest group of the measurements.
_ALL = 128
_BOUNDS = {
    "peak": (0.05, 0.6, 1.1),
    "start": (0.5 * US, 6 * US, 40 * US),
    "tile": (0.02 * US, 1 * US, 60 * US),
    "tail": (0.01, 0.5, 1.5),
    "bandwidth": (0.2, 0.8, 1.1),
    "cached": (1, 2, 8),
    "cache": (1e6, 50e6, 200e6),
}
_NARROW = {"narrow": (0.3, 0.8, 1.3)}
_APPENDING = {"appending": (0.05 * US, 3 * US, 40 * US)}
_DECODE_BOUNDS = {
    "start": (0.5 * US, 6 * US, 40 * US),
    "block": (0.02 * US, 3 * US, 60 * US),
    "peak": (0.02, 0.5, 1.2),
    "split": (0.01 * US, 2 * US, 30 * US),
    "tail": (0.01, 0.5, 2),
    "bandwidth": (0.2, 0.85, 1.2),
    "cached": (1, 2, 8),
    "cache": (1e6, 50e6, 200e6),
}
# The fastest kernels of each GPU that are made for it.
_DECODE_ENGINES = {
    "a100_sxm": "SGLang flash_attention",
    "h100_sxm": "VLLM vllm_flash_attn_fa3",
    "h200_sxm": "VLLM vllm_flash_attn_fa3",
    "b200_sxm": "VLLM vllm_flashinfer_trtllmdecode",
    "l40s": "SGLang flashinfer",
    "rtx_pro_6000_server": "SGLang flashinfer",
}

_PROMPT = KernelClass(
    name="attention",
    file="attention_prefill.csv",
    dtype="attn_dtype",
    read=_read,
    seconds=attention_seconds,
    figures=AttentionFigures,
    bounds={**_BOUNDS, **_NARROW, **_APPENDING, "wide": (0.5, 1, 1.4)},
    fixed={"rows": (64, 128), "packed": (1, _ALL)},
    shipped={
        "bfloat16": {
            "a100_sxm": "SGLang flash_attention",
            "h100_sxm": "VLLM vllm_flash_attn_fa3",
            "h200_sxm": "VLLM vllm_flash_attn_fa3",
            "b200_sxm": "VLLM vllm_flashinfer_trtllmprefill",
            "l40s": "VLLM vllm_flash_attn_fa2",
            "rtx_pro_6000_server": "VLLM vllm_flash_attn_fa2",
        },
        "fp8": {
            "h100_sxm": "SGLang fa3",
            "h200_sxm": "SGLang fa3",
            "b200_sxm": "TRTLLM torch_flow",
            "l40s": "TRTLLM torch_flow",
            "rtx_pro_6000_server": "TRTLLM torch_flow",
        },
    },
)
_DECODE = KernelClass(
    name="decode",
    file="attention_decode.csv",
    dtype="kv_cache_dtype",
    read=_read,
    seconds=decode_seconds,
    figures=DecodeFigures,
    bounds=_DECODE_BOUNDS,
    shipped={"bfloat16": _DECODE_ENGINES, "fp8": _DECODE_ENGINES},
)
CLASSES = (
    _PROMPT,
    replace(
        _PROMPT,
        name="encoder",
        file="attention_encoder.csv",
        read=_read_encoder,
        bounds={**_BOUNDS, **_NARROW},
        fixed={"rows": (64, 128), "packed": (1,), "wide": (1,), "appending": (3 * US,)},
        shipped={"bfloat16": "VLLM"},
    ),
    _DECODE,
    replace(
        _DECODE,
        name="trtllm decode",
        read=_read_small_groups,
        shipped={"fp8": dict.fromkeys(("h100_sxm", "h200_sxm"), "TRTLLM")},
    ),
    replace(
        _PROMPT,
        name="latent",
        file="mla_prefill.csv",
        dtype="mla_dtype",
        read=_read_latent,
        bounds={**_BOUNDS, **_APPENDING},
        fixed={"rows": (64, 128), "packed": (1,), "narrow": (1,), "wide": (1,)},
        shipped={"bfloat16": "TRTLLM"},
    ),
    replace(
        _DECODE,
        name="latent decode",
        file="mla_decode.csv",
        read=_read_latent_decode,
        shipped={
            "bfloat16": "SGLang",
            "fp8": {"h100_sxm": "TRTLLM", "h200_sxm": "TRTLLM", "b200_sxm": "SGLang"},
        },
    ),
)
