"""The process-wide cache of shape execution: outcomes of op calls by their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch

from fvflops.capture.real_mode import clear_calls
from fvflops.capture.recorder.tensor_specs import OpSchema, clear_signatures, describe_op, group_size, signature_count
from fvflops.capture.shapes.metadata import Metadata, clear_metadata, interned_count
from fvflops.capture.shapes.rules.data_dependent import reads_values
from fvflops.torch_internals import (
    has_kernel_for_key,
    is_cudnn_attention_enabled,
    is_efficient_enabled,
    is_flash_enabled,
    is_math_enabled,
    is_mkldnn_enabled,
    pytree,
)
from fvflops.trace import Signature, StopsAt
from fvflops.trace.calls import packet_of

# With more outcomes or metadata the cache is cleared, to bound the memory of processes with ever new shapes.
_MAX_ENTRIES = 1 << 16
# So are the signatures, of about 1 KB each: an optimizer step's has the learning rate, which may change each time.
_MAX_SIGNATURES = 1 << 15

Settings = tuple[Any, ...]

SCALARS = frozenset({int, float, bool, str, type(None)})

# Namespaces, of torch and its libraries, of ops whose outcomes depend on their arguments only.
_PURE_NAMESPACES = frozenset(
    {
        *("_c10d_functional", "_c10d_functional_autograd", "_quantized", "aten", "c10d", "fbgemm", "higher_order"),
        *("inductor", "mkl", "mkldnn", "onednn", "prim", "prims", "quantization", "quantized", "sparse", "symm_mem"),
        *("fsdp", "torchaudio", "torchvision"),
    }
)


# By name without overload: settings that choose the kernel, which a model may change while it runs.
_KERNEL_SETTINGS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(
        [
            *("aten::_convolution", "aten::_convolution_mode", "aten::convolution", "aten::convolution_backward"),
            *(f"aten::conv{rank}d" for rank in (1, 2, 3)),
            *(f"aten::conv_transpose{rank}d" for rank in (1, 2, 3)),
        ],
        is_mkldnn_enabled,
    ),
    "aten::scaled_dot_product_attention": lambda: (
        *(is_flash_enabled(), is_efficient_enabled(), is_cudnn_attention_enabled(), is_math_enabled()),
    ),
}


def substitute(value: Any, tensor: Callable[[torch.Tensor], Any], device: Callable[[torch.device], Any]) -> Any:
    """Return nested arguments with tensors and devices replaced."""
    if type(value) in SCALARS:
        return value
    if isinstance(value, torch.Tensor):
        return tensor(value)
    if isinstance(value, torch.device):
        return device(value)
    if isinstance(value, (list, tuple)):
        items = [item if type(item) in SCALARS else substitute(item, tensor, device) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: substitute(item, tensor, device) for key, item in value.items()}
    return value


def unpack_result(result: Any) -> tuple[list[Any], Callable[[list[Any]], Any] | None]:
    """Return the items of an op's result, and the function that rebuilds it from items, None for a single item."""
    if not isinstance(result, (list, tuple)):
        return [result], None
    if not any(isinstance(item, (list, tuple)) for item in result):
        return list(result), tuple if isinstance(result, tuple) else list
    items, spec = pytree.tree_flatten(result)
    return items, lambda items: pytree.tree_unflatten(items, spec)


class Output(NamedTuple):
    """One result of an op: a new tensor, a view of the argument tensor `source`, or (`same`) that argument itself.

    `metadata` is None for a non-tensor result `value`. `row` is the storage of a new tensor, which may be larger than
    the tensor: some kernels shrink their results. `offset` is a view's, relative to its argument.
    """

    metadata: Metadata | None
    source: int | None = None
    same: bool = False
    value: Any = None
    row: tuple[Any, ...] = ()
    offset: int = 0


@dataclass(eq=False)
class CachedResult:
    """The outcome of an op call: its signature and how to build its results.

    `build` is None for a single result, else it builds the result from a list of items. `resized` are argument tensors
    whose metadata the op changes. `concrete`: the op is computed, since all arguments are known and small; its
    signature is None if the result's shape depends on values. `lazy`: results may have lazy values. Shortcuts, None in
    the general case: `fresh` is the metadata of a single new tensor, `row` its storage; `source` is the argument that
    is the single result or its base, `view` the view's metadata. `cacheable` is False for an outcome that depends on
    more than the cache key. `promoted` is the default dtype to which the call promoted integers, on which the outcome
    depends.
    """

    signature: Signature | None
    outputs: tuple[Output, ...] = ()
    build: Callable[[list[Any]], Any] | None = None
    resized: tuple[tuple[int, Metadata], ...] = ()
    written: tuple[int, ...] = ()
    concrete: bool = False
    lazy: bool = False
    cacheable: bool = True
    promoted: torch.dtype | None = None

    def __post_init__(self) -> None:
        self.find_shortcuts()

    def find_shortcuts(self) -> None:
        """Set the shortcuts from the other attributes."""
        is_general = self.resized or self.concrete or self.lazy or self.promoted is not None
        only = self.outputs[0] if self.build is None and len(self.outputs) == 1 and not is_general else None
        self.fresh = only.metadata if only is not None and only.source is None and not self.written else None
        self.row: Any = None if only is None else only.row
        self.source = only.source if only is not None and self.written in ((), (only.source,)) else None
        self.view = None if only is None or only.same else only.metadata


class LeafCall:
    """A call of a leaf module that dispatched one op: its outcome, and the positions of the tensors that it reads.

    `composite` is the composite op that was decomposed into it, or "". `context` returns the settings that chose the
    op's kernel, `setting` is its result.
    """

    __slots__ = ("composite", "context", "outcome", "reads", "setting")

    def __init__(self, outcome: CachedResult, reads: tuple[int, ...], composite: str) -> None:
        assert outcome.signature is not None
        self.outcome = outcome
        self.reads = reads
        self.composite = composite
        self.context = context_of(outcome.signature.op)
        self.setting = None if self.context is None else self.context()


# For one kind of settings: (kind of module, metadata of its tensors) → metadata of the input → call.
LeafCallCache = dict[tuple[Any, ...], dict[Metadata, LeafCall]]


class OpCache:
    """The cache of one op: its schema, its outcomes, and properties of the op.

    `has_extra_key`: the key includes more than the arguments' metadata (`context`, ranks of a process group, values
    that its cost depends on). `changes_view`: it changes the shape, strides or memory of its first argument.
    `communicates`: with other ranks. `random`: it generates random numbers. `reads_values`: its result, or the size of
    it, depends on values. `writes`: to arguments. `has_mixed_lists`: it accepts lists of ints mixed with other types.
    `context` returns further settings that a call depends on, such as the default dtype for an op that creates a
    tensor. `pure` is False for ops of other libraries, whose outcomes are not cached.

    `outcomes` are stored per settings of a run. `expansions` are outcomes of a composite op that decomposes into a
    single call of another op on the same tensors, per settings and `stops_at`.
    """

    def __init__(self, func: Any, values: tuple[str, ...]) -> None:
        self.schema: OpSchema = describe_op(func, values)
        tags = getattr(func, "tags", ())
        self.random = torch.Tag.nondeterministic_seeded in tags
        self.changes_view = torch.Tag.inplace_view in tags
        self.reads_values = reads_values(self.schema.name)
        self.outcomes: dict[Settings, dict[tuple[Any, ...], CachedResult]] = {}
        self.expansions: dict[tuple[Settings, Any], dict[tuple[Any, ...], CachedResult]] = {}
        self.communicates = self.schema.group is not None or self.schema.name.startswith("c10d::")
        self.writes = bool(self.schema.written)
        arguments = getattr(getattr(func, "_schema", None), "arguments", None)
        self.has_mixed_lists = arguments is None or any("List[number]" in str(argument.type) for argument in arguments)
        self.pure = self.schema.name.partition("::")[0] in _PURE_NAMESPACES
        creates_tensor = "device" in self.schema.position
        self.context = torch.get_default_dtype if creates_tensor else context_of(self.schema.name)
        self.has_extra_key = bool(self.context or self.schema.group is not None or self.schema.value_arguments)

    def needs_other_ranks(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call communicates with other ranks, of which a group of one has none."""
        return self.communicates and group_size(self.schema, args, kwargs) != 1


class ShapeCall(NamedTuple):
    """A call in shape execution: `tensors` in order, `reads` their storages' indices, `key` its key in the cache."""

    func: Any
    op: OpCache
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    tensors: list[torch.Tensor]
    reads: list[int]
    key: tuple[Any, ...] = ()

    def with_replaced(
        self, tensor: Callable[[torch.Tensor], Any], device: Callable[[torch.device], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return substitute((tuple(self.args), dict(self.kwargs)), tensor, device)


def context_of(name: str) -> Callable[[], Any] | None:
    """Return the getter of the settings that choose an op's kernel, or None."""
    return _KERNEL_SETTINGS.get(packet_of(name))


@cache
def is_autocast(name: str) -> bool:
    """Return whether autocast converts an op's arguments."""
    return any(has_kernel_for_key(name, f"Autocast{kind}") for kind in ("CPU", "CUDA"))


def settings_of(device: torch.device) -> Settings:
    """Return the current settings that outcomes on a device depend on."""
    return (
        device,
        torch.get_num_threads() > 1,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.backends.cuda.matmul.allow_tf32,
        torch.backends.cudnn.enabled,
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.backends.mha.get_fastpath_enabled(),
    )


_OPS: dict[tuple[Any, tuple[str, ...]], OpCache] = {}
_LEAF_CALLS: dict[tuple[Settings, Any], LeafCallCache] = {}


def op_cache(func: Any, values: tuple[str, ...]) -> OpCache:
    """Return the cache of an op whose arguments `values` are recorded with their values."""
    op = _OPS.get((func, values))
    if op is None:
        op = _OPS[func, values] = OpCache(func, values)
    return op


def outcome_count() -> int:
    return sum(len(cached) for op in _OPS.values() for cached in op.outcomes.values())


def leaf_calls_of(settings: Settings, stops_at: StopsAt) -> LeafCallCache:
    """Return the cached calls of leaf modules in runs with these settings."""
    return _LEAF_CALLS.setdefault((settings, stops_at.key), {})


def clear_cache() -> None:
    """Clear this cache and the cache of real execution, as in a new process; not to be called during a run."""
    _OPS.clear()
    _LEAF_CALLS.clear()
    clear_calls()
    clear_signatures()
    clear_metadata()


def trim_cache() -> None:
    """Clear the cache if it has grown past the limit; it is asked before each run, so nothing long is iterated over."""
    # The calls of one kind of module have an outcome each.
    modules = sum(map(len, _LEAF_CALLS.values()))
    if max(interned_count(), outcome_count(), modules) > _MAX_ENTRIES or signature_count() > _MAX_SIGNATURES:
        clear_cache()
