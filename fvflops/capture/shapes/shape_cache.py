"""The memo of shape execution: what each op gave for each way in which it was called, for the life of the process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from fvflops.capture.recorder.signature import OpSchema, describe_op, group_size
from fvflops.capture.shapes.metadata import Metadata, forget_metadata, interned
from fvflops.torch_internals import (
    has_kernel_for_key,
    is_cudnn_attention_enabled,
    is_efficient_enabled,
    is_flash_enabled,
    is_math_enabled,
    is_mkldnn_enabled,
)
from fvflops.trace import Signature, StopsAt
from fvflops.trace.signature import packet_of

# Past this many outcomes or metadata everything is forgotten: a process that meets new shapes for ever stays small.
_LIMIT = 1 << 16

Settings = tuple[Any, ...]

# The libraries whose ops give the same for the same arguments: those of torch and its sisters.
_PURE = frozenset(
    {
        *("_c10d_functional", "_c10d_functional_autograd", "_quantized", "aten", "c10d", "fbgemm", "higher_order"),
        *("inductor", "mkl", "mkldnn", "onednn", "prim", "prims", "quantization", "quantized", "sparse", "symm_mem"),
        *("fsdp", "torchaudio", "torchvision"),
    }
)


def _kernels_of_attention() -> tuple[bool, ...]:
    allowed = is_flash_enabled(), is_efficient_enabled()
    return *allowed, is_cudnn_attention_enabled(), is_math_enabled()


# By name without overload: what chooses the kernel, which a model may change as it runs.
_CONTEXTS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(
        [
            *("aten::_convolution", "aten::_convolution_mode", "aten::convolution", "aten::convolution_backward"),
            *(f"aten::conv{rank}d" for rank in (1, 2, 3)),
            *(f"aten::conv_transpose{rank}d" for rank in (1, 2, 3)),
        ],
        is_mkldnn_enabled,
    ),
    "aten::scaled_dot_product_attention": _kernels_of_attention,
}


class Output(NamedTuple):
    """One result of an op: a new tensor, a view of the argument tensor `source`, or (`same`) that argument itself.

    `metadata` is None for a result that is no tensor, whose value is then `value`. `row` is the storage of a new
    tensor, which may be larger than the tensor: some kernels shrink what they allocated.
    """

    metadata: Metadata | None
    source: int | None = None
    same: bool = False
    value: Any = None
    row: tuple[int, str, str] | None = None


class CachedResult:
    """What one way of calling an op gives: its signature and how its results are made.

    `build` is None where the op has one result, else what makes its results from a list of them. `grown` are argument
    tensors whose metadata the op changes. `concrete` says that the op runs for real, because all that goes in is known
    and small; its signature is then None where its result's shape depends on values. `fresh` is the metadata of the
    result where that is one new tensor, `row` that of its storage; where it is one of the arguments or a view of it,
    `source` is that argument and `view` the metadata of the view. They are None where more happens than that. An
    outcome that depends on values otherwise is not `remembered`. `promoted` is the default dtype of the call, where
    whole numbers became floating-point ones: with another default it gives something else.
    """

    __slots__ = (
        "build",
        "concrete",
        "fresh",
        "grown",
        "outputs",
        "promoted",
        "remembered",
        "row",
        "signature",
        "source",
        "view",
        "written",
    )

    def __init__(
        self,
        signature: Signature | None,
        outputs: tuple[Output, ...] = (),
        build: Callable[[list[Any]], Any] | None = None,
        grown: tuple[tuple[int, Metadata], ...] = (),
        written: tuple[int, ...] = (),
        concrete: bool = False,
    ) -> None:
        self.signature = signature
        self.outputs = outputs
        self.build = build
        self.grown = grown
        self.written = written
        self.concrete = concrete
        self.remembered = True
        self.promoted: torch.dtype | None = None
        self._find_shortcuts()

    def run_for_real(self) -> None:
        """Let the op be computed, instead of its results being made."""
        self.concrete = True
        self._find_shortcuts()

    def promote(self, default: torch.dtype) -> None:
        """Note that the outcome is that under a default dtype, which is then to be compared at every call."""
        self.promoted = default
        self._find_shortcuts()

    def _find_shortcuts(self) -> None:
        build, outputs, grown, written, concrete = self.build, self.outputs, self.grown, self.written, self.concrete
        simple = build is None and len(outputs) == 1 and not grown and not concrete and self.promoted is None
        only = outputs[0] if simple else None
        self.fresh = only.metadata if only is not None and only.source is None and not written else None
        self.row: Any = None if only is None else only.row
        self.source = only.source if only is not None and written in ((), (only.source,)) else None
        self.view = None if only is None or only.same else only.metadata


class OpCache:
    """What is known of one op: its schema, the outcomes met so far, and what kind of op it is.

    It can depend on more than its arguments' metadata (`looks_closer`: the name of a process group, or numbers that its
    cost depends on), communicate with other ranks (`communicates`), be `random`, write to its arguments, or take
    lists of which one item is an int and another is not (`mixes`). `context` gives what a call depends on besides its
    arguments and the run's settings, such as the default dtype for an op that makes a tensor from none. An op of
    somebody's library, which may keep state of its own, or of an object that does, is not `pure`: what it gives is
    never remembered.

    Outcomes are kept apart by the settings of a run. `expansions` are outcomes too, for each set of stops, of a
    composite op that comes down to one call of another op on the same tensors.
    """

    __slots__ = (
        "communicates",
        "context",
        "expansions",
        "looks_closer",
        "mixes",
        "outcomes",
        "pure",
        "random",
        "schema",
        "writes",
    )

    def __init__(self, func: Any) -> None:
        self.schema: OpSchema = describe_op(func)
        self.random = torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())
        self.outcomes: dict[Settings, dict[tuple[Any, ...], CachedResult]] = {}
        self.expansions: dict[tuple[Settings, StopsAt], dict[tuple[Any, ...], CachedResult]] = {}
        self.looks_closer = self.schema.group is not None or bool(self.schema.valued)
        self.communicates = self.schema.group is not None or self.schema.name.startswith("c10d::")
        self.writes = bool(self.schema.written)
        arguments = getattr(getattr(func, "_schema", None), "arguments", None)
        self.mixes = arguments is None or any("List[number]" in str(argument.type) for argument in arguments)
        self.pure = self.schema.name.partition("::")[0] in _PURE
        makes = "device" in self.schema.position
        self.context = torch.get_default_dtype if makes else context_of(self.schema.name)

    def needs_others(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call communicates with other ranks, of which there are none in a group of one."""
        return self.communicates and group_size(self.schema, args, kwargs) != 1


def context_of(name: str) -> Callable[[], Any] | None:
    """Return what tells by which kernel an op is computed now, or None where there is no choice."""
    return _CONTEXTS.get(packet_of(name))


@cache
def is_autocast(name: str) -> bool:
    """Return whether autocast changes the dtype of an op's arguments."""
    return any(has_kernel_for_key(name, f"Autocast{kind}") for kind in ("CPU", "CUDA"))


def settings_of(device: torch.device) -> Settings:
    """Return what the outcomes of a run for a device depend on, as it is now."""
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


_OPS: dict[Any, OpCache] = {}
_SIGNATURES: dict[Signature, Signature] = {}


def op_cache(func: Any) -> OpCache:
    """Return what is known of an op."""
    op = _OPS.get(func)
    if op is None:
        op = _OPS[func] = OpCache(func)
    return op


def intern_signature(signature: Signature) -> Signature:
    """Return the one object that stands for a signature."""
    return _SIGNATURES.setdefault(signature, signature)


def outcomes() -> int:
    """Return how many outcomes are remembered."""
    return sum(len(met) for op in _OPS.values() for met in op.outcomes.values())


def clear_cache() -> None:
    """Forget every outcome, so that the next run is as in a new process; not to be called during a run."""
    _OPS.clear()
    _SIGNATURES.clear()
    forget_metadata()


def trim_cache() -> None:
    """Forget everything if it has grown past the limit."""
    if interned() > _LIMIT or outcomes() > _LIMIT:
        clear_cache()
