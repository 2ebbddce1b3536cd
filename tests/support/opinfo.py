"""Compare shape execution with real execution on torch's own samples of its ops, call by call, strides included."""

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
from fvflops.capture.real_mode import RecordingMode
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
    for name in ("common_utils", "opinfo.core"):
        sys.modules[f"torch.testing._internal.{name}"].extract_test_fn = lambda: None  # type: ignore[attr-defined]
    # Which torch's tests switch off for the whole process; the module that torch.backends is has other globals.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    return op_db


# --- memory formats ----------------------------------------------------------------------------------------------


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
    "contiguous": lambda tensor: tensor,
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


def compare(op: Any, args: tuple[Any, ...], **options: Any) -> str:
    return difference(*(run(op, args, {}, execution, **options) for execution in ("real", "shapes")))


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


# --- calls whose results torch's shape rules lay out in memory otherwise than its kernels do --------------------------

OPS = torch.ops.aten


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def places(*shape: int) -> torch.Tensor:
    """Return the places that max_pool2d_with_indices gives."""
    return torch.nn.functional.max_pool2d(numbers(*shape), 2, return_indices=True)[1]


# By name of the rule: calls whose results' strides or storage torch's own rules give otherwise.
LAYOUTS: list[tuple[str, Any, tuple[Any, ...]]] = [
    ("aten::floor_divide", OPS.floor_divide, (numbers(4, 1, 3), numbers(4, 3) + 1)),
    ("aten::glu", OPS.glu, (numbers(1, 2, 6, 4), 2)),
    ("aten::ldexp.Tensor", OPS.ldexp, (numbers(4, 1, 3), numbers(4, 3))),
    ("aten::mvlgamma", OPS.mvlgamma, (numbers(3, 4) + 2, 2)),
    ("aten::pow.Scalar", OPS.pow, (2.0, numbers(3, 4))),
    ("aten::log_sigmoid", OPS.log_sigmoid, (numbers(3, 4),)),
    ("aten::log_sigmoid_forward", OPS.log_sigmoid_forward, (numbers(3, 4),)),
    ("aten::log_sigmoid_backward", OPS.log_sigmoid_backward, (numbers(3, 4), numbers(3, 4), numbers(3, 4))),
    *(
        (f"aten::{name}", getattr(OPS, name), (numbers(3, 4), numbers(3, 4), *rest))
        for name, rest in (
            ("binary_cross_entropy", ()),
            ("mse_loss", ()),
            ("smooth_l1_loss", ()),
            ("soft_margin_loss", ()),
        )
    ),
    *(
        (f"aten::{name}", getattr(OPS, name), (numbers(3, 4), numbers(3, 4), numbers(3, 4), 0, *rest))
        for name, rest in (
            ("huber_loss_backward", (1.0,)),
            ("mse_loss_backward", ()),
            ("smooth_l1_loss_backward", (1.0,)),
        )
    ),
    *(
        (f"aten::{name}", getattr(OPS, name), (numbers(3, 4), numbers(3, 4), 1, torch.float32))
        for name in ("_log_softmax_backward_data", "_softmax_backward_data")
    ),
    ("aten::col2im", OPS.col2im, (numbers(2, 36, 16), [4, 4], [3, 3], [1, 1], [1, 1], [1, 1])),
    ("aten::im2col", OPS.im2col, (numbers(2, 3, 5, 5), [2, 2], [2, 2], [0, 0], [4, 4])),
    ("aten::normal.Tensor_Tensor", OPS.normal, (numbers(3, 4), numbers(3, 4))),
    ("aten::normal.Tensor_float", OPS.normal, (numbers(3, 4), 1.0)),
    ("aten::normal.float_Tensor", OPS.normal, (1.0, numbers(3, 4))),
    ("aten::_upsample_nearest_exact1d", OPS._upsample_nearest_exact1d, (numbers(2, 3, 4), [6])),
    ("aten::upsample_nearest1d", OPS.upsample_nearest1d, (numbers(2, 3, 4), [6])),
    *(
        (f"aten::{name}2d{more}", getattr(OPS, f"{name}2d{more}"), (numbers(*shape), [6, 7], *rest))
        for name, more, rest in (
            ("_upsample_nearest_exact", "", ()),
            ("upsample_bicubic", "", (False,)),
            ("upsample_bilinear", "", (False,)),
            ("upsample_nearest", "", ()),
            ("_upsample_bicubic", "_aa", (False,)),
            ("_upsample_bilinear", "_aa", (False,)),
        )
        for shape in ((2, 3, 4, 5), (2, 1, 4, 5))
    ),
    *(
        (f"aten::{name}3d", getattr(OPS, f"{name}3d"), (numbers(2, 3, 4, 5, 4), [6, 7, 5], *rest))
        for name, rest in (("_upsample_nearest_exact", ()), ("upsample_nearest", ()), ("upsample_trilinear", (False,)))
    ),
    ("aten::upsample_linear1d", OPS.upsample_linear1d, (numbers(2, 3, 4), [6], False)),
    ("aten::linalg_vector_norm", OPS.linalg_vector_norm, (numbers(2, 1, 4, 5), 2, [1], True)),
    ("aten::roll", OPS.roll, (numbers(2, 3, 4, 5), [1, 2], [2, 3])),
    ("aten::native_dropout", OPS.native_dropout, (numbers(2, 1, 4, 5), 0.5, True)),
    ("aten::replication_pad2d", OPS.replication_pad2d, (numbers(2, 3, 4, 5), [1, 2, 0, 1])),
    ("aten::replication_pad3d", OPS.replication_pad3d, (numbers(2, 3, 4, 5, 4), [1, 2, 0, 1, 1, 1])),
    ("aten::reflection_pad2d", OPS.reflection_pad2d, (numbers(2, 3, 4, 5), [1, 2, 0, 1])),
    ("aten::reflection_pad3d", OPS.reflection_pad3d, (numbers(2, 3, 4, 5, 4), [1, 2, 0, 1, 1, 1])),
    *(
        (
            f"aten::{name}_backward",
            getattr(OPS, f"{name}_backward"),
            (numbers(2, 3, 5, 8), numbers(2, 3, 4, 5), [1, 2, 0, 1]),
        )
        for name in ("reflection_pad2d", "replication_pad2d")
    ),
    ("aten::channel_shuffle", OPS.channel_shuffle, (numbers(2, 4, 3, 5), 2)),
    ("aten::native_channel_shuffle", OPS.native_channel_shuffle, (numbers(2, 4, 3, 5), 2)),
    ("aten::pixel_shuffle", OPS.pixel_shuffle, (numbers(2, 8, 3, 5), 2)),
    ("aten::pixel_unshuffle", OPS.pixel_unshuffle, (numbers(2, 3, 4, 6), 2)),
    ("aten::max_unpool2d", OPS.max_unpool2d, (numbers(2, 3, 2, 3), places(2, 3, 4, 6), [4, 6])),
    ("aten::max_pool1d", OPS.max_pool1d, (numbers(2, 3, 8), [2])),
    (
        "aten::nll_loss2d_forward",
        OPS.nll_loss2d_forward,
        (numbers(2, 3, 4, 5), torch.zeros(2, 4, 5, dtype=torch.int64), None, 0, -100),
    ),
    *(
        ("aten::_fft_c2c", OPS._fft_c2c, (numbers(3, 4, 5, dtype=torch.complex64), dims, 0, True))
        for dims in ([0], [1, 2], [0, 2])
    ),
    *(
        ("aten::_fft_c2r", OPS._fft_c2r, (numbers(3, 4, 5, dtype=torch.complex64), dims, 0, 2 * size - 2))
        for dims, size in (([0], 3), ([1, 2], 5), ([2, 0], 3))
    ),
    *(("aten::_fft_r2c", OPS._fft_r2c, (numbers(3, 4, 5), dims, 0, True)) for dims in ([0], [1, 2], [2, 0])),
    *(
        (
            "aten::convolution",
            getattr(torch.nn.functional, f"conv{transposed}{rank}d"),
            (numbers(2, *sides), numbers(*weight)),
        )
        for transposed in ("", "_transpose")
        for rank, sides, weight in (
            (1, (4, 6), (4, 4, 3)),
            (2, (4, 6, 5), (4, 4, 3, 3)),
            (2, (4, 6, 5), (4, 4, 1, 1)),
            (3, (4, 6, 5, 6), (4, 4, 3, 3, 3)),
        )
    ),
    ("aten::convolution", torch.nn.functional.conv2d, (numbers(2, 4, 6, 5), numbers(4, 1, 3, 3), None, 1, 0, 1, 4)),
    ("aten::convolution", torch.nn.functional.conv2d, (numbers(2, 4, 1, 1), numbers(4, 4, 1, 1))),
    *(
        (f"aten::{name}", getattr(OPS, name), (numbers(2, 3, 4, 5), numbers(2, 3, 4, 5), *rest))
        for name, rest in (
            ("native_batch_norm_backward", (*[numbers(3) for _ in range(5)], True, 1e-5, [True, True, True])),
            ("batch_norm_backward", (*[numbers(3) for _ in range(5)], True, 1e-5, [True] * 3, numbers(0))),
            (
                "native_layer_norm_backward",
                ([4, 5], *[numbers(2, 3, 1, 1)] * 2, *[numbers(4, 5)] * 2, [True, True, True]),
            ),
        )
    ),
    *(
        (
            "aten::convolution_backward",
            OPS.convolution_backward,
            (
                numbers(2, 4, *sides),
                numbers(2, 4, *sides),
                numbers(4, 4, *kernel),
                [4],
                *again,
                False,
                zeros,
                1,
                [True] * 3,
            ),
        )
        for sides, kernel in (((6,), (3,)), ((6, 5), (3, 3)), ((1, 1), (1, 1)), ((4, 4, 4), (3, 3, 3)))
        for again, zeros in ((([1] * len(sides), [kernel[0] // 2] * len(sides), [1] * len(sides)), [0] * len(sides)),)
    ),
    (
        "aten::_convolution",
        OPS._convolution,
        (numbers(2, 4, 6, 5), numbers(4, 4, 3, 3), None, *[[1, 1]] * 3, False, [0, 0], 1, False, False, True, True),
    ),
    ("aten::native_group_norm", OPS.group_norm, (numbers(2, 4, 3, 5), 4, numbers(4), numbers(4))),
    ("aten::group_norm", OPS.group_norm, (numbers(2, 4, 3, 5), 2)),
    *(
        ("aten::native_batch_norm", op, (numbers(*shape), *[numbers(shape[1]) for _ in range(4)], trains, 0.1, 1e-5))
        for op in (OPS.native_batch_norm, OPS._native_batch_norm_legit)
        for shape in ((2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (1, 3, 1, 1))
        for trains in (False, True)
    ),
    ("aten::native_batch_norm", OPS.native_batch_norm, (numbers(2, 3, 4), None, None, None, None, True, 0.1, 1e-5)),
    (
        "aten::_native_batch_norm_legit.no_stats",
        OPS._native_batch_norm_legit,
        (numbers(1, 2, 3), None, None, True, 0.1, 1e-5),
    ),
]
