"""The op, phase and module that launched a kernel, the class of its work, and why the GPU was idle before it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch

from fvflops.capture.instrument.torch_profiler import kind_of_range, module_of_range
from fvflops.explain.trace_columns import MEMCPY, MEMSET, OP, PYTHON, RANGE, RUNTIME, TraceColumns

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


MODULE = "nn.Module: "
_OPTIMIZER = ("Optimizer.step#", "Optimizer.zero_grad#")
# Classes of work that an optimizer's ops may have too.
_GENERIC = ("elementwise", "reduction", "copy", "other", "")


class Context(NamedTuple):
    """Where a kernel was launched; `op` is the host span whose work it does, -1 for none.

    `composite` is the class of the outermost enclosing op of COMPOSITE, `own` of the innermost op, "" if unknown.
    `is_graph` is whether a captured graph was launched.
    """

    op: int
    phase: str
    module: str
    composite: str
    own: str
    is_graph: bool


class LaunchContexts:
    """Contexts of a trace's activities; `is_counted` says of an op and its inputs whether its work is known."""

    def __init__(self, columns: TraceColumns, is_counted: Callable[[str, Sequence[Any]], bool]) -> None:
        self._columns = columns
        self._is_counted = is_counted
        self._of_span = cache(self._find)
        self._forward = _find_forward_ops(columns)
        names = columns.names.values
        self._graphs = {number for number, name in enumerate(names) if "GraphLaunch" in name}

    def of(self, op: int, launch: int) -> Context:
        """Return the context of an activity by its op and its runtime call, each -1 if unknown."""
        is_graph = launch >= 0 and self._columns.host.name[launch] in self._graphs
        context = self._of_span(op if op >= 0 else launch)
        return context._replace(is_graph=True) if is_graph else context

    def kind(self, context: Context, name: str, activity: int) -> str:
        """Return the class of an activity by its context, name and kind."""
        by_name = kind_of_kernel(name)
        if by_name == "communication" or activity == MEMCPY:
            return by_name if by_name == "communication" else "copy"
        if context.composite and not (context.composite == "communication" and context.own in ("copy", "elementwise")):
            return context.composite
        found = context.own or ("copy" if activity == MEMSET else by_name)
        return "optimizer" if context.phase == "optimizer" and found in _GENERIC else found

    def _find(self, span: int) -> Context:
        if span < 0:
            return Context(-1, "", "", "", "", is_graph=False)
        host, names = self._columns.host, self._columns.names
        chain = [(index, host.kind[index], names[host.name[index]]) for index in host.ancestors(span)]
        ops = [(index, name) for index, kind, name in chain if kind == OP]
        phase, node = "forward", -1
        for index, kind, name in chain:
            if kind in (OP, RANGE) and kind_of_range(name) == "node":
                phase, node = "backward", index
            elif name.startswith(_OPTIMIZER):
                phase = "optimizer"
        module = self._module(span if node < 0 else self._forward.get(host.sequence[node], -1))
        if node >= 0:
            inside = next((index for index, kind, name in chain if _module_of(kind, name)), -1)
            if inside > node:  # a module that runs in a node of autograd: checkpointing
                phase, module = "recompute", self._module(inside)
        composite = next((found for _, name in reversed(ops) if (found := kind_of_op(name)) in COMPOSITE), "")
        own = kind_of_op(ops[0][1]) if ops else ""
        return Context(self._work_op(ops, own), phase, module, composite, own, is_graph=False)

    def _work_op(self, ops: list[tuple[int, str]], own: str) -> int:
        """Return the innermost op of known work among the enclosing ops of its class, else the innermost."""
        for index, name in ops:
            if kind_of_op(name) != own:
                break
            inputs = self._columns.host.inputs[index]
            if inputs >= 0 and self._is_counted(name, self._columns.inputs[inputs]):
                return index
        return ops[0][0] if ops else -1

    def _module(self, span: int) -> str:
        host, names = self._columns.host, self._columns.names
        for index in host.ancestors(span):
            if module := _module_of(host.kind[index], names[host.name[index]]):
                return module
        return ""


def _module_of(kind: int, name: str) -> str:
    """Return the name of the module whose call a span is, "" for another span."""
    if kind == PYTHON:
        return name.removeprefix(MODULE) if name.startswith(MODULE) else ""
    return "" if kind == RUNTIME else module_of_range(name) or ""


def _find_forward_ops(columns: TraceColumns) -> dict[int, int]:
    """Return the sequence number of autograd → the first op that has it, in the forward pass."""
    host = columns.host
    found: dict[int, int] = {}
    for index, number in enumerate(host.sequence):
        if number >= 0 and (number not in found or host.start[index] < host.start[found[number]]):
            found[number] = index
    return found


_SYNCHRONISES = re.compile(r"(Stream|Device|Event|Ctx)Synchronize|^(cuda|hip|cu)Memcpy(?!.*Async)")
_SLOW_CALLS = re.compile(
    r"Malloc|Free|HostAlloc|HostRegister|Module(Load|Unload)|Library(Load|Unload)|GraphInstantiate"
)
# Cause → spans in which the host does other work than a step's, with ops or without; the first that matches.
_OTHER_WORK = {
    "data": re.compile(r"DataLoader\w*[).]|torch/utils/data/|_next_data"),
    "compilation": re.compile(
        r"\(dynamo_timed\)|^entire_frame_compile$|^dynamo$|torch/_dynamo/convert_frame|triton/compiler/|: _do_compile$"
    ),
    "garbage": re.compile(r"gc\.collect|function collect>|gc_collect"),
    "saving": re.compile(
        r"torch/serialization|torch/distributed/checkpoint/.*save|torch\.save|: \w*(save_(\w+_)?checkpoint|_save)$"
    ),
}
_SLOW_NS = 100_000  # a launch takes some 5 µs
# Python frames that are not the program's own.
_OF_LIBRARIES = re.compile(r"^(torch/|<built-in|<string>|nn\.Module: |threading\.py|contextlib\.py)|site-packages")


class IdlePiece(NamedTuple):
    """A part of a gap: its cause, a key of CAUSES, and the op, frame or call at which the host was."""

    cause: str
    name: str
    ns: int


class IdleCauses:
    """Causes of the idle times of a trace."""

    def __init__(self, columns: TraceColumns) -> None:
        self._columns = columns
        self._of_span = cache(self._find)
        self._other = {
            number: cause
            for number, name in enumerate(columns.names.values)
            for cause, pattern in reversed(_OTHER_WORK.items())
            if pattern.search(name)
        }

    def of_gap(self, start: int, end: int, launch: int) -> Iterator[IdlePiece]:
        """Yield the parts of a gap before the kernel that the runtime call `launch` launched, -1 if none is known."""
        host = self._columns.host
        if launch < 0:
            yield IdlePiece("unknown", "", end - start)
            return
        launched = host.start[launch]
        if launched > start:
            yield from self.on_host(start, min(launched, end), host.thread[launch])
        name, returned = self._columns.names[host.name[launch]], min(host.end[launch], end)
        if start < launched < returned:  # the first launch of a kernel loads it
            yield IdlePiece("runtime" if returned - launched > _SLOW_NS else "launch", name, returned - launched)
            launched = returned
        if launched < end:
            yield IdlePiece("start" if launched > start else "queue", name, end - max(launched, start))

    def on_host(self, start: int, end: int, thread: int) -> Iterator[IdlePiece]:
        """Yield the activities of a thread of the host in an interval.

        If the host was waiting for the GPU when that ran out of work, all that it does until the next launch is due to
        this synchronisation, except for work that is not the step's.
        """
        waited = ""
        for position, (begin, stop, span) in enumerate(self._columns.host.pieces(thread, start, end)):
            cause, name = self._of_span(span)
            if position == 0 and cause == "synchronisation":
                waited = name
            if waited and cause not in _OTHER_WORK:
                cause, name = "synchronisation", waited
            yield IdlePiece(cause, name, stop - begin)

    def is_other_work(self, span: int) -> bool:
        """Return whether a span is in work that is not the step's, such as data loading or compilation."""
        return bool(self._other) and self._of_span(span)[0] in _OTHER_WORK

    def _find(self, span: int) -> tuple[str, str]:
        if span < 0:
            return "host", "outside of recorded events"
        host, names = self._columns.host, self._columns.names
        around = list(host.ancestors(span))
        chain = [(host.kind[index], names[host.name[index]]) for index in around]
        kind, name = chain[0]
        for index in around:
            if cause := self._other.get(host.name[index]):
                return cause, names[host.name[index]]
        frames = [frame for kind_around, frame in chain if kind_around == PYTHON]
        frame = next((frame for frame in frames if not _OF_LIBRARIES.search(frame)), frames[0] if frames else "")
        ops = [op for kind_around, op in chain if kind_around == OP]
        if kind == RUNTIME and _SYNCHRONISES.search(name):
            return "synchronisation", " in ".join([name, *ops[-1:]]) + (f" at {frame}" if frame else "")
        if kind == RUNTIME and _SLOW_CALLS.search(name):
            return "runtime", name
        if ops:
            return "launch", ops[0]
        return "host", frame or name
