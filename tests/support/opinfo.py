"""Compare shape execution with real execution on torch's own samples of its ops, call by call, strides included."""

from __future__ import annotations

import sys
import types
import unittest
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils import _pytree as pytree

from fvflops import load_table
from fvflops.capture.instrument import modules as instrumented
from fvflops.capture.real.real_mode import RecordingMode
from fvflops.capture.run import ExecutionError, record_call
from fvflops.capture.shapes.shape_mode import ShapeMode
from fvflops.trace import StopsAt, Trace

STOPS = load_table("default").stops_at
REFUSALS = (ExecutionError, RuntimeError, NotImplementedError, IndexError, ValueError, TypeError)


def op_infos() -> list[Any]:
    """Return torch's own samples of its ops; they come with its tests, which import a package that they do not need."""
    if "expecttest" not in sys.modules:
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stub
    from torch.testing._internal.common_methods_invocations import op_db

    # Samples look for a running unittest.TestCase by inspect.stack, which is slow.
    sys.modules["torch.testing._internal.common_utils"].extract_test_fn = lambda: None  # type: ignore[attr-defined]
    # Which torch's tests switch off for the whole process; the module that torch.backends is has other globals.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    return op_db


# --- memory formats ----------------------------------------------------------------------------------------------


def as_given(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose last two dimensions are exchanged in memory."""
    return tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy in the memory format channels_last, of five dimensions in channels_last_3d."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return tensor.contiguous(memory_format=formats[tensor.ndim]) if tensor.ndim in formats else tensor


def reversed_dimensions(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy whose dimensions lie in memory in the reverse order."""
    order = tuple(reversed(range(tensor.ndim)))
    return tensor.permute(order).contiguous().permute(order)


def sliced(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy that is every other element of a tensor twice as wide."""
    return tensor.repeat_interleave(2, -1)[..., ::2] if tensor.ndim else tensor


FORMATS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": as_given,
    "transposed": transposed,
    "channels_last": channels_last,
    "reversed": reversed_dimensions,
    "sliced": sliced,
}


def in_format(values: Any, memory_format: str) -> Any:
    """Return nested arguments with each tensor in a memory format."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        plain = tensor.layout is torch.strided and not tensor.is_nested
        changed = FORMATS[memory_format](tensor.detach()) if plain else tensor
        return changed.requires_grad_(tensor.requires_grad) if changed is not tensor else tensor

    return values if memory_format == "contiguous" else pytree.tree_map_only(torch.Tensor, change, values)


# --- one call, in both executions --------------------------------------------------------------------------------


def layout(value: Any) -> Any:
    """Return the shape, the strides (over no elements they say nothing) and the dtype; of anything else its type."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if value.layout is not torch.strided or value.is_nested:
        return str(value.layout)
    stride = tuple(value.stride()) if value.numel() else ()
    return tuple(value.shape), stride, str(value.dtype), value.is_conj(), value.is_neg()


def layouts(values: Any) -> list[Any]:
    """Return what `layout` says of each nested value."""
    return [layout(item) for item in pytree.tree_leaves(values)]


class Run(NamedTuple):
    """What one execution shows: each op call with its results' layouts, op calls with storages, storages' bytes."""

    calls: list[Any]
    storages: list[Any]
    results: list[Any]


@contextmanager
def calls_noted() -> Iterator[list[Any]]:
    """Note the layouts of the results of every op call of recordings, inside composite ops too."""
    notes: list[Any] = []
    with ExitStack() as stack:
        for mode in (RecordingMode, ShapeMode):
            dispatch = mode.__torch_dispatch__

            def noting(
                self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None, dispatch: Any = dispatch
            ) -> Any:
                noted, events = len(notes), len(self.recorder.events)
                result = dispatch(self, func, types, args, kwargs)
                if len(notes) == noted and len(self.recorder.events) == events + 1:
                    notes.append(layouts(result))
                return result

            stack.enter_context(mock.patch.object(mode, "__torch_dispatch__", noting))
        # A replayed call is not dispatched.
        stack.enter_context(mock.patch.object(instrumented, "find_leaf_calls", lambda *_: None))
        yield notes


def storage_table(trace: Trace) -> list[Any]:
    """Return each op call with the storages that it read and wrote, these numbered as they appear, and their bytes."""
    numbers: dict[int, int] = {}
    found = []
    for event in trace.events:
        if event.kind == "op":
            call = trace.signatures[event.item]
            reads, writes = (
                tuple(dict.fromkeys(numbers.setdefault(index, len(numbers)) for index in indices))
                for indices in (event.reads, event.writes)
            )
            sizes = [(trace.storages[index].nbytes, trace.storages[index].origin == "op") for index in event.writes]
            found.append((call.op, call.outputs, reads, writes, [size for size, made in sizes if made]))
    return found


def run(
    op: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    execution: str,
    *,
    stops_at: StopsAt = STOPS,
    loss: Any = None,
    **options: Any,
) -> Run:
    results: list[Any] = []

    def model(*args: Any, **kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        results.append(layouts(result))
        return result

    torch.default_generator.manual_seed(0)
    with calls_noted() as notes:
        trace = record_call(
            model, args, kwargs, execution=execution, quiet=True, stops_at=stops_at, loss=loss, **options
        )
    return Run(notes, storage_table(trace), results[-1])


def difference(real: Run, shapes: Run) -> str:
    """Return the first thing that shape execution shows otherwise than real execution, or ''."""
    names = [[call[0] for call in run.storages] for run in (real, shapes)]
    if names[0] != names[1]:
        return f"calls: real {names[0]}, shapes {names[1]}"
    for name, first, second in zip(names[0], real.calls, shapes.calls, strict=True):
        if first != second:
            return f"layouts: {name} real {first}, shapes {second}"
    for first, second in zip(real.storages, shapes.storages, strict=True):
        if first != second:
            return f"storages: real {first}, shapes {second}"
    return "" if real.results == shapes.results else f"results: real {real.results}, shapes {shapes.results}"


class Checked(NamedTuple):
    """One sample's comparison: `problem` is '' where both agree, `refused` why shape execution cannot run it."""

    op: str
    number: int
    memory_format: str
    problem: str
    refused: str


def check_op(
    info: Any,
    dtype: torch.dtype,
    memory_format: str,
    most: int | None = None,
    *,
    backward: bool = False,
    **options: Any,
) -> Iterator[Checked]:
    """Yield the comparison of each sample of an op, at most so many, that real execution runs."""
    if backward and not (info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)):
        return
    torch.default_generator.manual_seed(0)
    for number, sample in enumerate(info.sample_inputs("cpu", dtype, requires_grad=backward)):
        if most is not None and number >= most:
            return
        given = (sample.input, *sample.args), dict(sample.kwargs)
        args, kwargs = in_format(given, memory_format)
        if memory_format != "contiguous" and layouts(given) == layouts((args, kwargs)):
            continue
        tensors = [item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
        if backward and any(item.numel() < 2 for item in tensors):
            continue  # whether autograd keeps such a gradient or copies it hangs on strides that say nothing
        if backward:
            options["loss"] = total
        try:
            real = run(info.op, args, kwargs, "real", **options)
        except Exception:
            continue  # a sample that raises says nothing
        problem = refused = ""
        try:
            problem = difference(real, run(info.op, args, kwargs, "shapes", **options))
        except REFUSALS as error:
            refused = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        name = f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name
        yield Checked(name, number, memory_format, problem, refused)


def total(result: Any) -> Any:
    """Return the sum of what a result holds, to go back from."""
    parts = [item.sum() for item in pytree.tree_leaves(result) if isinstance(item, torch.Tensor) and item.requires_grad]
    return sum(part.real if part.is_complex() else part for part in parts)


def main_dtype(info: Any) -> torch.dtype | None:
    """Return the dtype to compare an op in: float32 where it has that."""
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64, torch.float64, torch.bfloat16):
        if info.supports_dtype(dtype, "cpu"):
            return dtype
    return None
