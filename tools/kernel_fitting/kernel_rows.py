"""Measured kernels that compute no attention: products, mixtures, scaling, linear attention and collectives."""

from __future__ import annotations

from fvflops import find_device
from fvflops.devices.kernel_models.collectives import (
    Collective,
    CollectiveFigures,
    Fabric,
    PeerFigures,
    collective_seconds,
    peer_seconds,
)
from fvflops.devices.kernel_models.figures import find_figures
from fvflops.devices.kernel_models.memory_bound import MemoryFigures, memory_seconds
from fvflops.devices.kernel_models.mixtures import Mixture, MixtureFigures, expert_rows, mixture_seconds
from fvflops.devices.kernel_models.products import Product, ProductFigures, product_seconds
from fvflops.devices.kernel_models.recurrent import Recurrence, RecurrentFigures, recurrent_seconds
from kernel_fitting.kernel_class import DEVICES, ELEMENT_BYTES, US, KernelClass, Row, Sample, processor

# --- matrix products --------------------------------------------------------------------------------------------------


def _read_product(row: Row) -> Product | None:
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

PRODUCT = KernelClass(
    name="product",
    file="gemm.csv",
    dtype="gemm_dtype",
    read=_read_product,
    seconds=product_seconds,
    figures=ProductFigures,
    bounds=BOUNDS,
    # Of TRT-LLM's rows on an L40S some are from the cache, and others of equal bytes are not.
    shipped={"bfloat16": {**dict.fromkeys(DEVICES, ""), "l40s": "SGLang"}, "fp8": "TRTLLM", "nvfp4": "VLLM"},
    extra=_scaling,
)


# --- fused mixtures of experts ----------------------------------------------------------------------------------------

# Bytes of an element of the weights with its share of scales, and what they are multiplied in.
_MIXTURE_DTYPES = {
    "bfloat16": (2.0, "bfloat16"),
    "fp8": (1.0, "fp8"),
    "fp8_block": (1.0, "fp8"),
    "nvfp4": (0.5625, "nvfp4"),
    "int4_wo": (0.515625, "bfloat16"),
    "w4a16_mxfp4": (0.53125, "bfloat16"),
    "w4a8_mxfp4_mxfp8": (0.53125, "fp8"),
    "w4afp8": (0.515625, "fp8"),
}
# Experts of a token and of all, of the models whose experts have no gate: NVIDIA's Nemotron 3.
_WITHOUT_GATE = ((6, 128), (22, 512))


def _read_mixture(row: Row) -> Mixture:
    tokens, experts, ranks = int(row["num_tokens"]), int(row["num_experts"]), int(row["moe_ep_size"])
    skew = float(row["distribution"].removeprefix("power_law_")) if row["distribution"] != "balanced" else 0.0
    topk = int(row["topk"])
    weight_bytes, dtype = _MIXTURE_DTYPES[row["moe_dtype"]]
    return Mixture(
        tokens,
        topk,
        expert_rows(tokens, experts, topk, ranks, skew),
        int(row["hidden_size"]),
        int(row["inter_size"]) // int(row["moe_tp_size"]),
        weight_bytes,
        ELEMENT_BYTES[dtype],
        (topk, experts) not in _WITHOUT_GATE,
        is_repeated=True,
    )


MIXTURE = KernelClass(
    name="mixture",
    file="moe.csv",
    dtype="moe_dtype",
    read=_read_mixture,
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
    # The newest kernels of which there are many; vLLM 0.24 was not timed on an A100.
    shipped={
        "bfloat16": {
            gpu: "TRTLLM moe_torch_flow 1.0.0" if gpu == "a100_sxm" else "VLLM vllm_unquantizedfusedmoe"
            for gpu in DEVICES
        },
        # On Hopper, kernels of one scale for each weight (modelopt) take four times as long as with block scales.
        "fp8": dict.fromkeys(("b200_sxm", "l40s", "rtx_pro_6000_server"), "VLLM vllm_modeloptfp8moe"),
        "fp8_block": dict.fromkeys(("h100_sxm", "h200_sxm"), "VLLM vllm_fp8moe"),
        "nvfp4": "VLLM vllm_compressedtensorsw4a4nvfp4moe",
        "w4a16_mxfp4": dict.fromkeys(("h100_sxm", "h200_sxm"), "VLLM vllm_gptossmxfp4moe"),
        "w4a8_mxfp4_mxfp8": {"b200_sxm": "SGLang"},
    },
    machine=lambda gpu, dtype: processor(gpu, _MIXTURE_DTYPES[dtype][1]),
)


# --- a matrix of bf16 scaled to fp8, bound by memory ------------------------------------------------------------------

# Of an element read and written.
_SCALED = 2 + 1


def _read_memory(row: Row) -> tuple[int] | None:
    if row["op_name"] != "scale_matrix":
        return None  # differences of two times
    return (int(row["m"]) * int(row["k"]) * _SCALED,)


MEMORY = KernelClass(
    name="memory",
    file="quantize.csv",
    dtype="quant_dtype",
    read=_read_memory,
    seconds=lambda shape, gpu, figures: memory_seconds(shape[0], gpu.bandwidth, figures),
    figures=MemoryFigures,
    bounds={
        "start": (0.3 * US, 1.5 * US, 20 * US),
        "bandwidth": (0.3, 0.85, 1.1),
        "cached": (1, 1.5, 5),
        "cache": (1e6, 40e6, 200e6),
    },
    shipped={"fp8": "TRTLLM"},
)


# --- gated linear attention (gated delta rule) ------------------------------------------------------------------------


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


RECURRENT = KernelClass(
    name="recurrent",
    file="linear_attention.csv",
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
    shipped={"": "vLLM"},
    machine=lambda gpu, _: processor(gpu, "bfloat16"),  # the file has no dtypes
)


# --- collectives of the GPUs of one node, of NCCL and of engines ------------------------------------------------------

_FABRICS = {
    "a100_sxm": Fabric(300e9),
    "h100_sxm": Fabric(450e9, adds=True),
    "h200_sxm": Fabric(450e9, adds=True),
    "b200_sxm": Fabric(900e9, adds=True),
    "l40s": Fabric(32e9),
    "rtx_pro_6000_server": Fabric(64e9),
}
# With a switch for all GPUs of a node.
_SWITCHED = ("a100_sxm", "h100_sxm", "h200_sxm", "b200_sxm")
_MESSAGE_BYTES = {"half": 2, "int8": 1, "bfloat16": 2}
_KINDS = {"alltoall": "all_to_all"}
# Bytes of the largest buffer for which an engine has its own all-reduce, and of the smallest for which none has.
_SMALL, _LARGE = 4 << 20, 64 << 20


def _read_collective(row: Row) -> Collective | None:
    dtype = row.get("nccl_dtype") or row["allreduce_dtype"]
    kind = row.get("op_name", "all_reduce")
    nbytes = float(row["message_size"]) * _MESSAGE_BYTES[dtype]
    if "allreduce_dtype" in row and not _is_nccl(row, nbytes):
        return None
    return Collective(_KINDS.get(kind, kind), int(row["num_gpus"]), nbytes, dtype != "int8")


def _is_nccl(row: Row, nbytes: float) -> bool:
    """Return whether an engine's rows are like NCCL's own; those over PCIe are of other machines."""
    return nbytes >= _LARGE and not row["kernel_source"].endswith("eager") and row["gpu"] in _SWITCHED


def _read_all_reduce(row: Row) -> Collective | None:
    """Return an engine's all-reduce, if it is in a CUDA graph: others wait for the host."""
    nbytes = float(row["message_size"]) * _MESSAGE_BYTES[row["allreduce_dtype"]]
    if row["kernel_source"].endswith("eager") or nbytes > _SMALL or row["gpu"] not in _SWITCHED:
        return None
    return Collective("all_reduce", int(row["num_gpus"]), nbytes)


COLLECTIVE = KernelClass(
    name="collective",
    file="collectives.csv",
    read=_read_collective,
    seconds=collective_seconds,
    figures=CollectiveFigures,
    bounds={
        "start": (0.5 * US, 4 * US, 40 * US),
        "step": (0.1 * US, 0.8 * US, 10 * US),
        "flagged": (0.05, 0.5, 1),
        "fence": (0.2 * US, 15 * US, 60 * US),
        "fenced": (0.1, 0.7, 1),
        "local": (0.01, 0.6, 2),
        "scattered": (0.5, 1, 1.5),
        "sharing": (0.001, 0.1, 3),
    },
    machine=lambda gpu, _: _FABRICS[gpu],
    more=("all_reduce_in_engines.csv",),
)
PEERS = KernelClass(
    name="peers",
    file="all_reduce_in_engines.csv",
    read=_read_all_reduce,
    seconds=peer_seconds,
    figures=PeerFigures,
    bounds={
        "start": (0.5 * US, 4 * US, 40 * US),
        "barrier": (0.1 * US, 2 * US, 40 * US),
        "peers": (0.1, 0.7, 1),
    },
    machine=lambda gpu, _: _FABRICS[gpu],
)
