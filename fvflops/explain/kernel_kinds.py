"""Classes of GPU work, by the op that launched a kernel, else by the kernel's name."""

from __future__ import annotations

import re
from functools import lru_cache

import torch

# Class → heading of its rows.
KINDS = {
    "matmul": "matmul",
    "attention": "attention",
    "convolution": "convolution",
    "experts": "mixture of experts",
    "normalisation": "normalisation",
    "elementwise": "elementwise",
    "reduction": "reduction",
    "embedding": "embedding",
    "optimizer": "optimizer",
    "copy": "copies, fills and indexing",
    "communication": "communication",
    "other": "other",
}
# A kernel belongs to the outermost op of these classes that it runs in, and else to its own op's class.
COMPOSITE = ("communication", "experts", "attention", "convolution", "normalisation", "embedding")

_OPS = {
    "communication": r"^c10d|record_param_comms|^nccl:|_c10d_functional|all_?reduce|all_?gather|reduce_?scatter"
    r"|all_?to_?all|symm_mem",
    "experts": r"moe|grouped_mm|grouped_gemm|experts",
    "attention": r"attention|flash|fmha|sdpa",
    "convolution": r"conv(?!ert)",
    "normalisation": r"(batch|layer|group|instance|rms|local_response)_?norm|::_?native_norm",
    "embedding": r"(?<!rotary_)embedding",
    "optimizer": r"_fused_(adam|sgd|adagrad)|fused_adam|multi_tensor|_amp_",
    "matmul": r"::_?(addmm|mm|bmm|baddbmm|addbmm|matmul|linear|addmv|mv|dot|vdot|einsum|_?scaled_(grouped_)?mm\w*"
    r"|_int_mm|_addmm_activation|_grouped_mm)(_backward|_out)?$|gemm|scaled_mm",
    "copy": r"::_?(copy_?|to|_to_copy|clone|contiguous|cat|stack|fill_?|zero_|zeros\w*|ones\w*|full\w*|empty\w*"
    r"|index\w*|gather|scatter\w*|slice\w*|select\w*|permute|transpose|repeat\w*|roll|flip|constant_pad_nd|pad|nonzero|narrow"
    r"|masked_select|arange|pin_memory|_local_scalar_dense|item|chunk_cat|split_with_sizes_copy|reshape_and_cache\w*"
    r"|unfold\w*|tril|triu|index_put_?)(_out)?$",
    "reduction": r"softmax|::(sum|mean|amax|amin|max|min|argmax|argmin|any|all|prod|norm|linalg_vector_norm|var|std"
    r"|var_mean|cumsum|cumprod|topk|sort|logsumexp|nll_loss\w*|mse_loss|cross_entropy\w*|multinomial|unique\w*)$",
}
_KERNELS = {
    "communication": r"nccl|rccl|^gloo:|cross_device_reduce|multimem_\w*reduce|multimem_\w*gather|(one|two)_shot_all"
    r"|nvshmem|deep_ep|allreduce|all_reduce_kernel|userbuffers",
    "copy": r"^memcpy|^memset|^dma",
    "experts": r"moe|grouped_?gemm|matmul_ogs|_routing|bitmatrix|_topk_forward|matmul_scatter|group_gemm",
    "attention": r"flash|fmha|attention|attn|mha_|softmax.*mma",
    "convolution": r"conv|igemm_(fwd|bwd|wrw)|nchwtonhwc|nhwctonchw|winograd|implicit_gemm|fprop|dgrad|wgrad|miopensp",
    "normalisation": r"norm|rmsnorm",
    "optimizer": r"multi_tensor_apply|adam",
    "matmul": r"gemm|cijk_|nvjet|cutlass|xmma|^bmm_|matmul|triton_tem_fused.*mm|splitk|gemv",
    "embedding": r"(?<!rotary_)embedding|indexselect",
    "reduction": r"reduce|softmax|argmax|topk|radixsort|scan|triton_(red|per)_|loss",
    "elementwise": r"elementwise|functor|rotary|gelu|silu|act_and_mul|quant|dropout|triton_(poi|for)_|optensor"
    r"|subtensorop",
    "copy ": r"copy|cat|transpose|permute|gather|scatter|fill|index",
}
_TRITON = re.compile(r"triton_(?:poi|per|red|tem|for|unk|split_scan)_fused_(.*?)(?:_\d+)*$")
_TEMPLATE, _PARAMETERS = re.compile(r"<[^<>]*>"), re.compile(r"\([^()]*\)")
_op_patterns, _kernel_patterns = (
    [(kind.strip(), re.compile(pattern)) for kind, pattern in table.items()] for table in (_OPS, _KERNELS)
)


@lru_cache(maxsize=65536)
def kind_of_op(name: str) -> str:
    """Return the class of an op's kernels by its name, "" if unknown.

    >>> [kind_of_op(name) for name in ("aten::addmm", "vllm::unified_attention", "aten::mul", "mine::op")]
    ['matmul', 'attention', 'elementwise', '']
    """
    lowered = name.lower()
    found = next((kind for kind, pattern in _op_patterns if pattern.search(lowered)), "")
    return found or ("elementwise" if _is_pointwise(name) else "")


def _is_pointwise(name: str) -> bool:
    namespace, _, op = name.partition("::")
    for variant in (op, op.removesuffix("_"), op.removesuffix("_backward")):
        packet = getattr(torch.ops.aten, variant, None) if namespace == "aten" and variant else None
        if packet is not None:
            return any(torch.Tag.pointwise in getattr(packet, overload).tags for overload in packet.overloads())
    return op.startswith("_foreach_")


@lru_cache(maxsize=65536)
def kind_of_kernel(name: str) -> str:
    """Return the class of a kernel by its name, "other" if unknown.

    >>> [kind_of_kernel(name) for name in ("ncclDevKernel_Generic", "nvjet_tst_64x64", "triton_poi_fused_add_mul_0")]
    ['communication', 'matmul', 'elementwise']
    """
    lowered = name.lower()
    return next((kind for kind, pattern in _kernel_patterns if pattern.search(lowered)), "other")


@lru_cache(maxsize=65536)
def shorten_kernel(name: str) -> str:
    """Return a kernel's name without types and arguments, or the ops that torch.compile fused in it.

    >>> shorten_kernel("void at::native::elementwise_kernel<128, 4, std::array<char*, 2ul>>(int, float*)")
    'elementwise_kernel'
    >>> shorten_kernel("triton_poi_fused_add_native_layer_norm_3")
    'fused add_native_layer_norm'
    """
    if match := _TRITON.match(name):
        return f"fused {match[1].strip('_')}" if match[1].strip("_") else "fused"
    short = name.replace("(anonymous namespace)", "anonymous").replace("->", "")
    for pattern in (_TEMPLATE, _PARAMETERS):
        while (shorter := pattern.sub("", short)) != short:
            short = shorter
    return short.split("(")[0].split("<")[0].split("::")[-1].removeprefix("void ").strip() or name
