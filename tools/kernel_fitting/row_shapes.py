"""What each class of measured kernels computes, read from its rows, and the function of its seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from fvflops import find_device
from fvflops.devices.kernel_models.collectives import Collective, Fabric, collective_seconds, peer_seconds
from fvflops.devices.kernel_models.figures import find_figures
from fvflops.devices.kernel_models.fused_attention import Attention, attention_seconds, decode_seconds
from fvflops.devices.kernel_models.memory_bound import memory_seconds
from fvflops.devices.kernel_models.mixtures import Mixture, mixture_seconds
from fvflops.devices.kernel_models.products import Processor, Product, product_seconds
from fvflops.devices.kernel_models.recurrent import Recurrence, recurrent_seconds
from kernel_fitting.expert_rows import expert_rows


class Dtype(NamedTuple):
    """A dtype of the rows, as classes.yaml describes it."""

    weight_bytes: float
    operand_bytes: float
    peak: str
    figures: str


class Sample(NamedTuple):
    """One measured kernel: what it computes, on which GPU, and its seconds."""

    gpu: str
    engine: str
    dtype: str
    shape: Any
    seconds: float


DATA = yaml.safe_load((Path(__file__).parent / "classes.yaml").read_text())
DEVICES: Mapping[str, str] = {gpu: entry["device"] for gpu, entry in DATA["gpus"].items()}
DTYPES = {name: Dtype(*values) for name, values in DATA["dtypes"].items()}

Row = Mapping[str, str]


@cache
def _processor(gpu: str, dtype: str) -> Processor:
    device = find_device(DEVICES[gpu])
    assert device.multiprocessors is not None and device.bandwidth is not None
    return Processor(device.multiprocessors, device.peak(DTYPES[dtype].peak), device.bandwidth)


def _fabric(gpu: str, dtype: str) -> Fabric:
    return Fabric(*DATA["gpus"][gpu]["fabric"])


# --- products, mixtures of experts, a matrix scaled to fp8 ------------------------------------------------------------


def _read_product(row: Row) -> Product:
    size = DTYPES[row["gemm_dtype"]].operand_bytes
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


# Experts of a token and of all, of the models whose experts have no gate: NVIDIA's Nemotron 3.
_WITHOUT_GATE = ((6, 128), (22, 512))


def _read_mixture(row: Row) -> Mixture:
    tokens, experts, topk = int(row["num_tokens"]), int(row["num_experts"]), int(row["topk"])
    skew = float(row["distribution"].removeprefix("power_law_")) if row["distribution"] != "balanced" else 0.0
    dtype = DTYPES[row["moe_dtype"]]
    return Mixture(
        *(tokens, topk, expert_rows(tokens, experts, topk, int(row["moe_ep_size"]), skew)),
        *(int(row["hidden_size"]), int(row["inter_size"]) // int(row["moe_tp_size"])),
        *(dtype.weight_bytes, dtype.operand_bytes),
        gated=(topk, experts) not in _WITHOUT_GATE,
        is_repeated=True,
    )


def _read_memory(row: Row) -> tuple[int] | None:
    if row["op_name"] != "scale_matrix":
        return None  # differences of two times
    return (int(row["m"]) * int(row["k"]) * (2 + 1),)  # bytes of an element read and written


# --- attention --------------------------------------------------------------------------------------------------------


def _read_attention(row: Row) -> Attention | None:
    new, cached = int(row["isl"]), int(row["step"])
    decodes = cached > 0
    if not decodes and row["attn_dtype"] != row["kv_cache_dtype"]:
        return None
    return Attention(
        *(int(row["batch_size"]), new, new + cached),
        *(int(row["num_heads"]), int(row["num_key_value_heads"]), int(row["head_dim"])),
        window=float(row["window_size"] or 0) or math.inf,
        element_bytes=DTYPES[row["attn_dtype"]].operand_bytes,
        key_bytes=DTYPES[row["kv_cache_dtype"]].operand_bytes,
        appends=not decodes,
        repeated=True,
    )


_SMALL_GROUP = 16


def _read_small_groups(row: Row) -> Attention | None:
    """Return the shape of a row with up to 16 heads a key, for which TensorRT-LLM has kernels of its own."""
    shape = _read_attention(row)
    return shape if shape is not None and shape.heads <= _SMALL_GROUP * shape.key_heads else None


def _read_encoder(row: Row) -> Attention:
    batch, tokens, heads, size = (int(row[name]) for name in ("batch_size", "isl", "num_heads", "head_dim"))
    return Attention(batch, tokens, tokens, heads, heads, size, causal=False)


# Latent attention of DeepSeek-V2 and -V3: elements of a key and a value of a head, and of the latent ones.
_KEY, _VALUE = 192, 128
_LATENT_KEY, _LATENT_VALUE = 576, 512


def _read_latent(row: Row) -> Attention:
    batch, tokens, heads = (int(row[name]) for name in ("batch_size", "isl", "num_heads"))
    size = DTYPES[row["kv_cache_dtype"]].operand_bytes
    return Attention(batch, tokens, tokens, heads, heads, _KEY, key_bytes=size, appends=True, value_size=_VALUE)


def _read_latent_decode(row: Row) -> Attention:
    batch, cached, heads = (int(row[name]) for name in ("batch_size", "step", "num_heads"))
    size = DTYPES[row["kv_cache_dtype"]].operand_bytes
    shape = Attention(batch, 1, 1 + cached, heads, 1, _LATENT_KEY, key_bytes=size, value_size=_LATENT_VALUE)
    return shape._replace(latent=True, repeated=True)


def _read_recurrence(row: Row) -> Recurrence | None:
    if not row["kernel_source"].startswith("chunk_gated_delta_rule"):
        return None
    names = ("batch_size", "seq_len", "num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
    return Recurrence(*(int(float(row[name])) for name in names))


# --- collectives ------------------------------------------------------------------------------------------------------

_MESSAGE_BYTES = {"half": 2, "int8": 1, "bfloat16": 2}
_KINDS = {"alltoall": "all_to_all"}
# Bytes of the largest buffer for which an engine has its own all-reduce, and of the smallest for which none has.
_SMALL, _LARGE = 4 << 20, 64 << 20


def _read_collective(row: Row) -> Collective | None:
    """Return a collective of NCCL; of an engine, one of enough bytes to be like NCCL's own."""
    is_engine = "allreduce_dtype" in row
    dtype = row["allreduce_dtype" if is_engine else "nccl_dtype"]
    kind = row.get("op_name", "all_reduce")
    nbytes = float(row["message_size"]) * _MESSAGE_BYTES[dtype]
    if is_engine and (nbytes < _LARGE or not _is_graph(row)):
        return None
    return Collective(_KINDS.get(kind, kind), int(row["num_gpus"]), nbytes, dtype != "int8")


def _read_all_reduce(row: Row) -> Collective | None:
    """Return an engine's own all-reduce."""
    nbytes = float(row["message_size"]) * _MESSAGE_BYTES[row["allreduce_dtype"]]
    return Collective("all_reduce", int(row["num_gpus"]), nbytes) if nbytes <= _SMALL and _is_graph(row) else None


def _is_graph(row: Row) -> bool:
    """Whether an engine's row is in a CUDA graph: others wait for the host. Those over PCIe are of other machines."""
    return not row["kernel_source"].endswith("eager") and DATA["gpus"][row["gpu"]]["switch"]


class Computed(NamedTuple):
    """How a class reads a row's shape (None for a row of another class) and computes its seconds.

    `machine` returns what `seconds` needs to know of a GPU for a dtype; `extra` are seconds of kernels timed too.
    """

    read: Callable[[Row], Any]
    seconds: Callable[[Any, Any, Any], float]
    machine: Callable[[str, str], Any] = _processor
    extra: Callable[[Sample], float] = lambda sample: 0.0


COMPUTED = {
    "memory": Computed(_read_memory, lambda shape, gpu, figures: memory_seconds(shape[0], gpu.bandwidth, figures)),
    "product": Computed(_read_product, product_seconds, extra=_scaling),
    "attention": Computed(_read_attention, attention_seconds),
    "encoder": Computed(_read_encoder, attention_seconds),
    "decode": Computed(_read_attention, decode_seconds),
    "trtllm decode": Computed(_read_small_groups, decode_seconds),
    "latent": Computed(_read_latent, attention_seconds),
    "latent decode": Computed(_read_latent_decode, decode_seconds),
    "mixture": Computed(_read_mixture, mixture_seconds),
    "collective": Computed(_read_collective, collective_seconds, _fabric),
    "peers": Computed(_read_all_reduce, peer_seconds, _fabric),
    "recurrent": Computed(_read_recurrence, recurrent_seconds),
}
