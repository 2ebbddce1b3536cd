"""Defects planted in the work of planned steps on GPUs, each with the finding that must come first."""

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tests.support.planted.planned_work import PRODUCTS, TYPES, work_of
from tests.support.planted.synthetic_trace import Collective, Gap, Op, Sync, Wait, Work

_ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::Functor>(int)"
_COPY = "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>(int)"
_SOFTMAX = "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float>(int)"
_BF16, _FLOAT = TYPES["bfloat16"], TYPES["float32"]
_BANDWIDTH = 3.35e12 * 0.8
Change = Callable[[list[Work]], list[Work]]


class Defect(NamedTuple):
    """A planned step, the change that plants the defect in its work, and the code of its finding."""

    name: str
    case: str
    code: str
    change: Change


def _where(matches: Callable[[Work], bool], change: Callable[[Any], list[Work]]) -> Change:
    """Return a change of each item that matches."""

    def apply(work: list[Work]) -> list[Work]:
        changed = [new for item in work for new in (change(item) if matches(item) else [item])]
        assert changed != work
        return changed

    return apply


def _each(change: Callable[[Op], list[Work]], wanted: str) -> Change:
    """Return a change of each op whose name matches."""
    return _where(lambda item: isinstance(item, Op) and re.search(wanted, item.op), change)


def _each_collective(wanted: str, change: Callable[[Collective], list[Work]]) -> Change:
    return _where(lambda item: isinstance(item, Collective) and item.collective == wanted, change)


def _op(name: str, dims: Sequence[Any], kernel: str, seconds: float, like: Op, *types: str) -> Op:
    """Return an op of one kernel in the phase of another, on tensors of bfloat16 unless types are given."""
    given = types or (_BF16,) * len(dims)
    return Op(op=f"aten::{name}", kernels=((kernel, seconds),), dims=tuple(dims), types=given, phase=like.phase)


def _every(number: int, added: Callable[[int], list[Work]], phase: str = "forward") -> Change:
    """Return a change that adds work after each so-many-th op of a phase."""

    def apply(work: list[Work]) -> list[Work]:
        changed, seen = [], 0
        for item in work:
            changed.append(item)
            if isinstance(item, Op) and item.phase == phase:
                seen += 1
                if seen % number == 0:
                    changed += added(seen)
        return changed

    return apply


def _in_middle(*added: Work) -> Change:
    def apply(work: list[Work]) -> list[Work]:
        last = max(index for index, item in enumerate(work) if isinstance(item, Op) and item.phase == "forward")
        return [*work[: last // 2], *added, *work[last // 2 :]]

    return apply


# --- products and attention ---------------------------------------------------------------------------------------


def _unfused(op: Op) -> list[Work]:
    """Attention of products, a softmax and a mask, each of which reads and writes the scores."""
    batch, heads, tokens, size = op.dims[1] if "backward" in op.op else op.dims[0]
    keys, query, transposed = ((batch * heads, *sizes) for sizes in ((tokens, tokens), (tokens, size), (size, tokens)))
    moved = batch * heads * tokens * tokens * 2 / _BANDWIDTH
    product = max(2 * batch * heads * tokens * tokens * size / 5e14, moved)
    scores = (batch, heads, tokens, tokens)
    first = _op("bmm", (query, transposed), PRODUCTS["bfloat16"], product, op)
    second = _op("bmm", (keys, query), PRODUCTS["bfloat16"], product, op)
    if op.phase == "backward":
        softmax = _op("_softmax_backward_data", (scores, scores), _SOFTMAX, 3 * moved, op)
        return [second, first, softmax, _op("mul", (scores,), _ELEMENTWISE, 2 * moved, op), second, second]
    divided, masked = (_op(name, (scores,), _ELEMENTWISE, 2 * moved, op) for name in ("div", "masked_fill_"))
    return [first, divided, masked, _op("_softmax", (scores,), _SOFTMAX, 2 * moved, op), second]


def _as_dtype(dtype: str, kernel: str, slower: float) -> Callable[[Op], list[Work]]:
    def change(op: Op) -> list[Work]:
        types = tuple(dtype if kind == _BF16 else kind for kind in op.types)
        return [replace(op, types=types, kernels=tuple((kernel, seconds * slower) for _, seconds in op.kernels))]

    return change


_MM = r"::(mm|addmm)$"


def _vocabulary(op: Op) -> list[Work]:
    """A vocabulary that is not a multiple of 8: products of one row less alignment take half as long again and more."""
    if not any(50304 in dim for dim in op.dims if dim):
        return [op]
    dims = tuple(tuple(50257 if size == 50304 else size for size in dim) for dim in op.dims)
    return [replace(op.slower(2.2), dims=dims)]


def _thin(rows: int) -> Callable[[Op], list[Work]]:
    """Products of a few rows, which take the time of reading their weights."""

    def change(op: Op) -> list[Work]:
        first, second = op.dims[-2:] if op.op == "aten::mm" else op.dims[1:3]
        inner, columns = first[1], second[1]
        read = _op("mm", ((rows, inner), (inner, columns)), op.kernels[0][0], 2 * inner * columns / _BANDWIDTH, op)
        return [replace(op, op=read.op, dims=read.dims, types=read.types, kernels=read.kernels)]

    return change


def _loop(op: Op) -> list[Work]:
    """Experts one after the other: for each an index, a product of some rows, and a sum."""
    tokens, inner = op.dims[0]
    columns = op.dims[1][-1]
    found = []
    for expert in range(16):
        rows = max(tokens // 64 + 17 * expert % 97, 1)
        seconds = 20e-6 + 2 * rows * inner * columns / 2e14
        found.append(Op(op="aten::nonzero", phase=op.phase, dims=((tokens,),), types=("bool",), launch=20e-6))
        found.append(_op("mm", ((rows, inner), (inner, columns)), PRODUCTS["bfloat16"], seconds, op))
    return found


# --- memory-bound kernels ------------------------------------------------------------------------------------------


def _copied(op: str, *types: str) -> Callable[[Op], list[Work]]:
    def change(item: Op) -> list[Work]:
        dims = next((dim for dim in item.dims if dim), (4096, 4096))
        return [_op(op, (dims,) * len(types), _COPY, 0.35 * item.seconds, item, *types), item]

    return change


def _transfer(kernel: str, seconds: float, sync: str) -> Op:
    return Op(op="aten::copy_", kernels=((kernel, seconds),), category="gpu_memcpy", nbytes=1 << 28, sync=sync)


def _unfuse_optimizer(name: str, number: int) -> Callable[[Op], list[Work]]:
    """Adam by separate ops on each parameter, or by one op on a list of them."""

    def change(op: Op) -> list[Work]:
        ops = ("mul_", "add_", "mul_", "addcmul_", "sqrt", "div_", "add_", "addcdiv_", "lerp_")
        each = 26 / 7 * op.seconds / len(ops) / number
        elements = op.seconds * _BANDWIDTH / 14 / number
        dims = ((int(elements) // 1024, 1024),) * 2
        return [_op(name + one, dims, _ELEMENTWISE, each, op) for _ in range(number) for one in ops]

    return change


# --- the host -----------------------------------------------------------------------------------------------------


def _slow_host(op: Op) -> list[Work]:
    """A host that needs 60 us for an op, and kernels that are short."""
    return [replace(op, launch=60e-6).slower(0.05)]


def _short(op: Op) -> list[Work]:
    """Thousands of launches of 4 us, as of an eager model of small tensors."""
    return [replace(op, kernels=((op.kernels[0][0], 3e-6),), launch=8e-6)] * 10 if op.kernels else [op]


def _item(_: int, phase: str = "forward") -> list[Work]:
    copied = ("Memcpy DtoH (Device -> Pageable)", 2e-6)
    read = Op(op="aten::item", phase=phase, inner="aten::_local_scalar_dense", category="gpu_memcpy", nbytes=4)
    return [
        read.with_kernels(copied, sync="cudaStreamSynchronize"),
        Gap(name="train.py(40): log", seconds=250e-6, category="python_function", phase=phase),
    ]


def _synchronise(_: int) -> list[Work]:
    return [Sync(), Gap(name="timers.py(12): stop", seconds=300e-6, category="python_function")]


def _nonzero(_: int) -> list[Work]:
    copied = ("Memcpy DtoH (Device -> Pinned)", 2e-6)
    found = Op(op="aten::nonzero", category="gpu_memcpy", nbytes=8)
    return [
        found.with_kernels(copied, sync="cudaStreamSynchronize"),
        Gap(name="model.py(9): select", seconds=200e-6, category="python_function"),
    ]


# --- communication ------------------------------------------------------------------------------------------------


def _not_overlapped(wanted: str) -> Change:
    """The compute stream waits for each collective right after its launch, which waits for the kernels before."""
    return _each_collective(wanted, lambda item: [replace(item, gate=None), Wait(item.number)])


def _longer(wanted: str, factor: float, every: int = 1) -> Change:
    """Collectives that take longer, all or each so-many-th one; after each the compute stream waits."""

    def apply(work: list[Work]) -> list[Work]:
        seen = itertools.count(1)
        longer = lambda item: [replace(item, seconds=item.seconds * factor), Wait(item.number)]  # noqa: E731
        return _each_collective(wanted, lambda item: [item] if next(seen) % every else longer(item))(work)

    return apply


def _bubble(factor: float) -> Change:
    return _where(
        lambda item: isinstance(item, Collective) and item.group == "pp",
        lambda item: [replace(item, seconds=item.seconds * factor)],
    )


def _slower_kernels(factor: float) -> Change:
    return _each(lambda op: [op.slower(factor)], "")


def _exchange(work: list[Work]) -> list[Work]:
    """All-to-alls before and after experts, which nothing hides."""
    found = []
    for number, item in enumerate(work):
        if isinstance(item, Op) and "_grouped_mm" in item.op and number % 2:
            sent = Collective(
                number=10_000 + number,
                collective="all_to_all",
                seconds=1.1e-3,
                elements=1 << 27,
                group="ep",
                phase=item.phase,
            )
            found += [sent, Wait(sent.number)]
        found.append(item)
    return found


_LOADING = Gap(name="enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", seconds=60e-3)
_COMPILING = Gap(name="torch/_dynamo/convert_frame.py(514): _compile", seconds=90e-3, category="python_function")
_COLLECTING = Gap(name="<built-in function collect>", seconds=50e-3, category="python_function")
_SAVING = Gap(name="torch/serialization.py(943): save", seconds=80e-3, category="python_function")
_TOKENISING = Gap(name="train.py(77): make_mask", seconds=60e-3, category="python_function")
_ALLOCATING = Gap(name="aten::empty_strided", seconds=50e-3, category="cpu_op", inner="cudaMalloc")
_FREEING = Gap(name="aten::empty", seconds=40e-3, category="cpu_op", inner="cudaFree")
_HTOD, _PINNED = "Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pinned -> Device)"

DEFECTS = (
    Defect("unfused attention", "one GPU", "unfused_attention", _each(_unfused, "attention")),
    Defect("unfused attention of Llama", "llama", "unfused_attention", _each(_unfused, "attention")),
    Defect("unfused forward attention", "sgd", "unfused_attention", _each(_unfused, "attention$")),
    Defect(
        "float32 without TF32",
        "one GPU",
        "float32_without_tf32",
        _each(_as_dtype(_FLOAT, PRODUCTS["float32"], 12), _MM),
    ),
    Defect(
        "float32 head",
        "llama",
        "float32_without_tf32",
        _each(lambda op: _as_dtype(_FLOAT, PRODUCTS["float32"], 12)(op) if op.module == "lm_head" else [op], _MM),
    ),
    Defect(
        "TF32 in place of bfloat16", "llama", "float32_products", _each(_as_dtype(_FLOAT, PRODUCTS["tf32"], 2.1), _MM)
    ),
    Defect("TF32 on an A100", "a100", "float32_products", _each(_as_dtype(_FLOAT, PRODUCTS["tf32"], 2.1), _MM)),
    Defect("float64", "sgd", "float64_products", _each(_as_dtype("double", PRODUCTS["float64"], 15), _MM)),
    Defect("vocabulary of 50,257", "one GPU", "unaligned_size", _each(_vocabulary, _MM)),
    Defect("vocabulary of 50,257 with DDP", "ddp", "unaligned_size", _each(_vocabulary, _MM)),
    Defect("8 rows", "llama", "small_batch", _each(_thin(8), _MM)),
    Defect("64 rows", "llama", "small_batch", _each(_thin(64), _MM)),
    Defect("loop over experts", "experts", "product_loop", _each(_loop, "_grouped_mm")),
    Defect("slow clock", "llama", "slow_products", _slower_kernels(1.4)),
    Defect("slow clock of an A100", "a100", "slow_products", _slower_kernels(1.5)),
    Defect("contiguous copies", "llama", "copies", _each(_copied("copy_", _BF16, _BF16), "attention|::mm$")),
    Defect("clones", "one GPU", "copies", _each(_copied("clone", _BF16), _MM)),
    Defect("concatenation", "one GPU", "copies", _each(_copied("cat", _BF16), _MM)),
    Defect("padding", "sgd", "copies", _each(_copied("constant_pad_nd", _BF16), _MM)),
    Defect("casts", "llama", "casts", _each(_copied("copy_", _FLOAT, _BF16), _MM)),
    Defect("casts of weights", "fsdp", "casts", _each(_copied("_to_copy", _FLOAT), _MM)),
    Defect("index_put", "one GPU", "indexing", _each(_copied("index_put_", _BF16, _BF16), _MM)),
    Defect("zeroed gradients", "one GPU", "zeroing", _each(_copied("zero_", _BF16), _MM)),
    Defect(
        "unpinned batches", "one GPU", "unpinned_copies", _in_middle(_transfer(_HTOD, 8e-3, "cudaStreamSynchronize"))
    ),
    Defect("exposed offloading", "llama", "host_copies", _every(20, lambda _: [_transfer(_PINNED, 4e-3, "")])),
    Defect("optimizer without foreach", "llama", "unfused_optimizer", _each(_unfuse_optimizer("", 40), "_fused_adamw")),
    Defect(
        "foreach optimizer", "experts", "unfused_optimizer", _each(_unfuse_optimizer("_foreach_", 2), "_fused_adamw")
    ),
    Defect("launch-bound", "one GPU", "launch_bound", _each(_slow_host, "")),
    Defect("thousands of short kernels", "one GPU", "launch_bound", _each(_short, "")),
    Defect(".item() after each layer", "one GPU", "synchronisation", _every(10, _item)),
    Defect(
        ".item() in the backward pass",
        "one GPU",
        "synchronisation",
        _every(12, lambda number: _item(number, "backward"), "backward"),
    ),
    Defect("cudaDeviceSynchronize", "one GPU", "synchronisation", _every(12, _synchronise)),
    Defect("nonzero", "experts", "synchronisation", _every(6, _nonzero)),
    Defect("data loading", "one GPU", "data_loading", lambda work: [_LOADING, *work]),
    Defect("recompilation", "one GPU", "compilation", _in_middle(_COMPILING)),
    Defect("garbage collection", "one GPU", "garbage_collection", _in_middle(_COLLECTING)),
    Defect("saving", "one GPU", "checkpoint_saving", _in_middle(_SAVING)),
    Defect("Python code", "one GPU", "host_work", _in_middle(_TOKENISING)),
    Defect("cudaMalloc in the step", "one GPU", "allocation", _in_middle(_ALLOCATING)),
    Defect("cudaFree in the step", "one GPU", "allocation", _in_middle(_FREEING)),
    Defect("all-gather without prefetch", "fsdp", "exposed_all_gather", _not_overlapped("all_gather")),
    Defect("reduce-scatter without overlap", "fsdp", "exposed_reduce_scatter", _not_overlapped("reduce_scatter")),
    Defect("all-reduce after the backward pass", "ddp llama", "exposed_all_reduce", _not_overlapped("all_reduce")),
    Defect("exposed all-to-all", "experts", "exposed_all_to_all", _exchange),
    Defect("pipeline bubble", "pipeline", "pipeline_bubble", _bubble(3)),
    Defect("straggler", "fsdp", "straggler", _longer("all_gather", 12, every=5)),
    Defect("slow network", "fsdp", "slow_network", _longer("all_gather", 6)),
    Defect("slow network of DDP", "ddp", "slow_network", _longer("all_reduce", 15)),
)
CLEAN = ("one GPU", "llama", "fsdp", "ddp", "a100", "experts", "recompute", "sgd")


def plant(defect: Defect) -> list[Work]:
    """Return the work of a step with the defect."""
    return defect.change(work_of(defect.case))


# --- against the plan ---------------------------------------------------------------------------------------------


def _recompute(work: list[Work]) -> list[Work]:
    """The forward pass again before the backward pass, inside of a checkpoint."""
    forward = [item for item in work if isinstance(item, Op) and item.phase == "forward"]
    first = next(index for index, item in enumerate(work) if isinstance(item, Op) and item.phase == "backward")
    again = [replace(item, phase="recompute", module=item.module or "layer") for item in forward]
    return [*work[:first], *again, *work[first:]]


def _padded(op: Op) -> list[Work]:
    dims = tuple(tuple(size * 5 // 4 if size == 8192 else size for size in dim) for dim in op.dims)
    return [replace(op.slower(1.25), dims=dims)]


AGAINST_PLAN = (
    Defect("recomputation", "llama", "unplanned_recomputation", _recompute),
    Defect("padding of batches", "llama", "more_work", _each(_padded, _MM)),
    Defect("slow attention", "llama", "slower_than_planned", _each(lambda op: [op.slower(4)], "attention")),
    Defect("exposed tensor-parallel all-reduce", "tensor", "exposed_all_reduce", _longer("all_reduce", 1.4)),
    Defect("uneven stages", "pipeline", "pipeline_bubble", _bubble(2)),
)
CLEAN_WITH_PLAN = (*CLEAN, "ddp llama", "tensor", "pipeline")
