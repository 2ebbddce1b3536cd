"""The kernels of a recorded pass: matrix products, attention, and memory-bound kernels."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from fvflops.counting.cost_models import TableCostModel
from fvflops.counting.count_trace import SignatureCache, find_dtype
from fvflops.counting.traffic.traffic import StorageInfo, op_traffic
from fvflops.devices.kernel_models.fused_attention import Attention
from fvflops.devices.kernel_models.products import Product
from fvflops.devices.utilisation import is_of_cudnn, with_attention
from fvflops.formulas import load_table
from fvflops.formulas.functions.attention import MASKS
from fvflops.plan.communication import NAMESPACES, collective_of, is_communication
from fvflops.trace import Signature, Status, TensorSpec, Trace, Value, tensors_in


class Kernel(NamedTuple):
    """The work of one kernel: its kind, multiply-adds, bytes from and to memory, and compute dtype.

    `shape` is a Product or an Attention, None for others. `bytes_only` is True for an op without a formula, of which
    only the bytes are known.
    """

    kind: str
    macs: int
    nbytes: int
    dtype: str
    shape: Product | Attention | None = None
    bytes_only: bool = False

    @property
    def figures_class(self) -> str:
        """The class of kernels whose figures its time rests on."""
        shape = self.shape
        if not isinstance(shape, Attention):
            return "memory" if shape is None else "mixture" if shape.is_grouped else "product"
        is_decoding = shape.is_decoding and self.kind == "attention"
        if shape.values != shape.size:
            return "latent decode" if is_decoding else "latent"
        return "decode" if is_decoding else "attention" if shape.causal else "encoder"


# Compute dtype of cuDNN's products of float32, which take the peak of tf32 where the device has it.
CUDNN = "tf32"
# A kernel of unknown cost.
UNKNOWN = Kernel("unknown", 0, 0, "")
_KNOWN: SignatureCache[dict[bool | None, Kernel | None]] = SignatureCache()
# They move data on the host or for bookkeeping, without a kernel of their own.
_NO_KERNEL = frozenset({"aten::lift_fresh", "aten::empty", "aten::empty_like", "aten::empty_strided", "aten::detach"})
# Ops that are products however few multiply-adds they have for their bytes, as with one row.
_PRODUCT = re.compile(r"mm|matmul|linear|conv|einsum")
# Classes of modules that are one kernel on CUDA, and several ops in a recording.
_ONE_KERNEL = frozenset({"torch.nn.RMSNorm"})


def kernel_of(signature: Signature, moved: bool | None = None) -> Kernel | None:
    """Return the kernel that a call launches, None for views, allocations and collectives.

    It is `UNKNOWN` for an op of unknown work and for a communication op without a rule. `moved` says whether its
    results are in new storages, None where that is unknown: `reshape` may copy or not.

    >>> from fvflops.trace import TensorSpec
    >>> a, b, c = (TensorSpec(shape, "bfloat16") for shape in ((64, 32), (32, 16), (64, 16)))
    >>> schema = "aten::mm(Tensor self, Tensor mat2) -> Tensor"
    >>> kernel = kernel_of(Signature("aten::mm", ("self", "mat2"), (a, b), (c,), schema))
    >>> kernel.kind, kernel.macs, kernel.shape[:3]
    ('matmul', 32768, (64, 16, 32))
    """
    known = _KNOWN.get(signature)
    if known is None:
        known = _KNOWN.put(signature, {})
    if moved not in known:
        known[moved] = _read_kernel(signature, moved)
    return known[moved]


def _read_kernel(signature: Signature, moved: bool | None) -> Kernel | None:
    packet = signature.packet
    if packet in _NO_KERNEL:
        return None
    if packet.partition("::")[0] in NAMESPACES:
        has_rule = collective_of(signature) is not None or not is_communication(packet)
        return None if has_rule else UNKNOWN
    traffic = op_traffic(signature, StorageInfo(moved))
    nbytes = 0 if traffic is None else sum(traffic)
    costs = TableCostModel(load_table("exact"), "flops").op_cost(signature)
    macs = sum(cost.macs for cost in costs)
    if not nbytes and not macs:
        return UNKNOWN if traffic is None else None
    dtype = find_dtype(signature.op, signature.names, signature.inputs, signature.outputs)
    if dtype == "float32" and is_of_cudnn(packet):
        dtype = CUDNN
    if "attention" in packet and macs:
        if _has_gathered_keys(signature):
            macs //= 2  # of a causal mask over the whole sequence: the mean of the ranks
        else:
            skipping = with_attention(load_table("exact"), "causal")
            macs = sum(cost.macs for cost in TableCostModel(skipping, "flops").op_cost(_skipping(signature)))
        kind = "attention backward" if "backward" in packet else "attention"
        return Kernel(kind, macs, nbytes, dtype, _attention_shape(signature, macs))
    # Reductions count a few multiply-adds: norms, means and losses are memory-bound.
    if macs < nbytes and not (macs and _PRODUCT.search(packet)):
        bytes_only = any(cost.status is Status.UNSUPPORTED for cost in costs)
        return Kernel("memory", macs, nbytes, dtype, bytes_only=bytes_only)
    if _is_depthwise(signature):
        return Kernel("memory", macs, nbytes, dtype)
    shape = _product_shape(signature, macs, nbytes)
    # Experts without tokens are not read.
    return Kernel("matmul", macs, min(nbytes, shape.nbytes) if shape.is_grouped else nbytes, dtype, shape)


def _is_depthwise(signature: Signature) -> bool:
    """Return whether a call is a convolution of each channel by itself, which is memory-bound."""
    given = dict(zip(signature.names, signature.inputs, strict=True))
    weight, groups = given.get("weight"), given.get("groups")
    if "depthwise" in signature.packet or "causal_conv" in signature.packet:
        return True
    return "conv" in signature.packet and isinstance(weight, TensorSpec) and weight.shape[1:2] == (1,) and groups != 1


def _has_gathered_keys(signature: Signature) -> bool:
    """Return whether a rank's queries meet the keys of a whole sequence under a causal mask (context parallelism)."""
    given = dict(zip(signature.names, signature.inputs, strict=True))
    query, key = given.get("query"), given.get("key")
    if given.get("is_causal") is not True or not (isinstance(query, TensorSpec) and isinstance(key, TensorSpec)):
        return False
    return query.shape[-2] < key.shape[-2]


def _skipping(signature: Signature) -> Signature:
    """Return the call without the values of mask tensors: kernels skip only pairs outside causal masks and windows."""
    inputs = [
        replace(value, values=None) if isinstance(value, TensorSpec) and name in MASKS else value
        for name, value in zip(signature.names, signature.inputs, strict=True)
    ]
    return replace(signature, inputs=tuple(inputs))


def _product_shape(signature: Signature, macs: int, nbytes: int) -> Product:
    """Return the shape of a product from its result's and its multiply-adds, a cube where they do not determine it."""
    given = dict(zip(signature.names, signature.inputs, strict=True))
    size = min(_element_size(spec) for spec in tensors_in(signature.inputs) if spec.numel)
    results = [value for value in signature.outputs if isinstance(value, TensorSpec)]
    if len(results) != 1 or len(results[0].shape) < 2 or not results[0].numel or macs % results[0].numel:
        side = max(1, round(macs ** (1 / 3)))
        return Product(side, side, side, operand_bytes=size, moved=nbytes)
    (result,) = results
    shape, inner = result.shape, macs // result.numel
    result_size = _element_size(result)
    if "convolution" in signature.packet:
        groups = given.get("groups")
        batch = groups if isinstance(groups, int) else 1
        columns = shape[1] // batch
        alignment = math.gcd(16, int(columns * size) or 1)
        weight = given.get("weight")
        if isinstance(weight, TensorSpec) and inner * weight.shape[0] == weight.numel:
            step = int(_CHANNEL_BYTES / size)
            inner = inner // weight.shape[1] * math.ceil(weight.shape[1] / step) * step
        return Product(result.numel // shape[1], columns, inner, batch, size, result_size, alignment, moved=nbytes)
    if "grouped_mm" in signature.packet:
        count, rows, columns = _experts(given, shape)
        return Product(rows, columns, inner, count, size, result_size, is_grouped=True)
    if signature.packet in ("aten::bmm", "aten::baddbmm"):
        batch, rows, columns = shape
        alignment = math.gcd(16, *(int(length * size) or 1 for length in (rows, columns, inner)))
        return Product(rows, columns, inner, batch, size, result_size, alignment)
    columns, stored = shape[-1], 0.0
    weight = next((spec for name in _WEIGHTS if isinstance(spec := given.get(name), TensorSpec)), None)
    if _STORED.fullmatch(signature.packet) and weight is not None:
        size, stored = result_size, weight.nbytes / (columns * inner)
    alignment = math.gcd(16, int(columns * size) or 1)
    return Product(math.prod(shape[:-1]), columns, inner, 1, size, result_size, alignment, stored)


# A convolution's kernels take the channels of one position of the window in whole steps of 64 bytes.
_CHANNEL_BYTES = 64
_WEIGHTS = ("mat2", "weight")
# Products with weights that are stored in fewer bits than the dtype of their multiply-adds.
_STORED = re.compile(r"aten::(_weight_int[48]pack_mm(_with_scales_and_zeros)?|_mixed_dtypes_linear)")


def _experts(given: Mapping[str, Value], result: Sequence[int]) -> tuple[int, int, int]:
    """Return how many products a grouped product is, and the rows and columns of an equal share of the tokens."""
    first, second, offsets = (given.get(name) for name in ("self", "mat2", "offs"))
    assert isinstance(first, TensorSpec) and isinstance(second, TensorSpec)
    count = offsets.shape[0] if isinstance(offsets, TensorSpec) else first.shape[0]
    if len(first.shape) == len(second.shape):  # parts of the inner dimension, or equal parts already
        return count, result[-2], result[-1]
    axis = 0 if len(second.shape) == 3 else 1
    count = max(1, min(count, result[axis]))
    rows, columns = (math.ceil(length / count) if index == axis else length for index, length in enumerate(result))
    return count, rows, columns


def _element_size(spec: TensorSpec) -> float:
    return spec.nbytes / spec.numel


def _attention_shape(signature: Signature, macs: int) -> Attention | None:
    """Return the shape of a fused attention; its window follows from the pairs of query and key that are computed."""
    given = dict(zip(signature.names, signature.inputs, strict=True))
    tensors = [next((given[name] for name in names if name in given), None) for names in _QUERY_KEY_VALUE]
    specs = [spec for spec in tensors if isinstance(spec, TensorSpec) and len(spec.shape) >= 3 and spec.numel]
    if len(specs) < 3:
        return None
    query, key, value = specs
    axis = -3 if any(name in signature.packet for name in _HEADS_FIRST) else -2
    heads, key_heads, size = query.shape[axis], key.shape[axis], query.shape[-1]
    batch, queries, keys = _sequences(given, query, key, heads, key_heads)
    products = 3 * size + 2 * value.shape[-1] if "backward" in signature.packet else size + value.shape[-1]
    pairs = macs / (products * batch * heads)
    return Attention(
        *(batch, queries, keys, heads, key_heads, size),
        causal=pairs < queries * keys,
        window=_find_window(pairs, queries, keys),
        element_bytes=_element_size(query),
        key_bytes=_element_size(key),
        value_size=value.shape[-1],
    )


_QUERY_KEY_VALUE = (("query", "q"), ("key", "k"), ("value", "v"))
# Ops of [..., heads, tokens, size]; others have [..., tokens, heads, size].
_HEADS_FIRST = ("scaled_dot_product", "_cudnn_attention", "flex_attention")
# Offsets of the sequences that are packed in a tensor.
_OFFSETS = ("cum_seq_q", "cu_seq_q", "cu_seqlens_q", "seqstart_q")


def _sequences(
    given: Mapping[str, Value], query: TensorSpec, key: TensorSpec, heads: int, key_heads: int
) -> tuple[int, int, int]:
    """Return the number of sequences, and the mean of the queries and the keys of each."""
    specs = (item for name in _OFFSETS if isinstance(item := given.get(name), TensorSpec))
    offsets = next((spec for spec in specs if spec.numel > 1), None)
    batch = math.prod(query.shape[:-3]) if offsets is None else offsets.numel - 1
    tokens = query.numel // (query.shape[-1] * heads), key.numel // (key.shape[-1] * key_heads)
    # Batches broadcast.
    keys = tokens[1] // (math.prod(key.shape[:-3]) if offsets is None else batch)
    return batch, max(tokens[0] // batch, 1), max(keys, 1)


def _find_window(pairs: float, queries: int, keys: int) -> float:
    """Return the most keys that a query attends to, from the pairs of one head: infinite without a window."""
    if pairs >= queries * keys - queries * (queries - 1) / 2:
        return math.inf
    if queries < keys:
        return pairs / queries
    return queries - math.sqrt(max(queries * queries - 2 * pairs, 0.0))


def list_fused(trace: Trace, classes: Collection[str]) -> list[str | None]:
    """Return stack → the module of some classes whose call is one kernel and that an op ran in, None outside of one.

    Products and collectives inside stay kernels of their own. PyTorch's RMSNorm is always one kernel.
    """
    wanted = _ONE_KERNEL.union(classes)
    names = {name for name, module in trace.modules.by_name.items() if not wanted.isdisjoint(module.classes)}
    return [next((name for name in scope if name in names), None) for scope in trace.scopes()]
