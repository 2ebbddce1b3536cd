"""Measured fused mixtures of experts."""

from __future__ import annotations

from fvflops.devices.kernel_models.mixtures import Mixture, MixtureFigures, expert_rows, mixture_seconds
from fvflops.devices.kernel_models.products import Processor
from kernel_fitting.kernel_class import DEVICES, US, KernelClass, Row, processor
from kernel_fitting.product_rows import BOUNDS

# Bytes of an element of the weights with its share of scales, and what they are multiplied in.
_DTYPES = {
    "bfloat16": (2.0, "bfloat16"),
    "fp8": (1.0, "fp8"),
    "fp8_block": (1.0, "fp8"),
    "nvfp4": (0.5625, "nvfp4"),
    "int4_wo": (0.515625, "bfloat16"),
    "w4a16_mxfp4": (0.53125, "bfloat16"),
    "w4a8_mxfp4_mxfp8": (0.53125, "fp8"),
    "w4afp8": (0.515625, "fp8"),
}
_BYTES = {"bfloat16": 2.0, "fp8": 1.0, "nvfp4": 0.5625}
# Experts of a token and of all, of the models whose experts have no gate: NVIDIA's Nemotron 3.
_WITHOUT_GATE = ((6, 128), (22, 512))


# The newest kernels of which there are many; vLLM 0.24 was not timed on an A100.
_SHIPPED: dict[str, str | dict[str, str]] = {
    "bfloat16": {
        gpu: "TRTLLM moe_torch_flow 1.0.0" if gpu == "a100_sxm" else "VLLM vllm_unquantizedfusedmoe" for gpu in DEVICES
    },
    # On Hopper, kernels of one scale for each weight (modelopt) take four times as long as those of blocks.
    "fp8": dict.fromkeys(("b200_sxm", "l40s", "rtx_pro_6000_server"), "VLLM vllm_modeloptfp8moe"),
    "fp8_block": dict.fromkeys(("h100_sxm", "h200_sxm"), "VLLM vllm_fp8moe"),
    "nvfp4": "VLLM vllm_compressedtensorsw4a4nvfp4moe",
    "w4a16_mxfp4": dict.fromkeys(("h100_sxm", "h200_sxm"), "VLLM vllm_gptossmxfp4moe"),
    "w4a8_mxfp4_mxfp8": {"b200_sxm": "SGLang"},
}


def _read(row: Row) -> Mixture:
    tokens, experts, ranks = int(row["num_tokens"]), int(row["num_experts"]), int(row["moe_ep_size"])
    skew = float(row["distribution"].removeprefix("power_law_")) if row["distribution"] != "balanced" else 0.0
    topk = int(row["topk"])
    weight_bytes, dtype = _DTYPES[row["moe_dtype"]]
    return Mixture(
        tokens,
        topk,
        expert_rows(tokens, experts, topk, ranks, skew),
        int(row["hidden_size"]),
        int(row["inter_size"]) // int(row["moe_tp_size"]),
        weight_bytes,
        _BYTES[dtype],
        (topk, experts) not in _WITHOUT_GATE,
        is_repeated=True,
    )


def _processor(gpu: str, dtype: str) -> Processor:
    return processor(gpu, _DTYPES[dtype][1])


CLASSES = (
    KernelClass(
        name="mixture",
        file="moe.csv",
        dtype="moe_dtype",
        read=_read,
        seconds=mixture_seconds,
        figures=MixtureFigures,
        bounds={
            **{name: bounds for name, bounds in BOUNDS.items() if name not in ("split", "held")},
            "large": (0.1, 0.6, 1.1),
            "start": (1 * US, 20 * US, 300 * US),
            "tile": (0.01 * US, 1 * US, 20 * US),
            "bandwidth": (0.2, 0.8, 1.1),
            "moves": (0.01, 1, 10),
            "elsewhere": (0.001, 0.1, 10),
            "cache": (1e6, 40e6, 200e6),
        },
        fixed={"split": (1e-9,)},
        shipped=_SHIPPED,
        machine=_processor,
    ),
)
