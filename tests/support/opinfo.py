"""Compare shape execution with real execution on torch's own samples of its ops, call by call, strides included."""

import sys
import types
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from queue import SimpleQueue
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from fvflops import load_table
from fvflops.capture.instrument import modules as instrumented
from fvflops.capture.real_mode import RecordingMode
from fvflops.capture.run import ExecutionError, record_call
from fvflops.capture.shapes.shape_mode import ShapeMode
from fvflops.trace import Trace

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

            def noting(self, func, types, args=(), kwargs=None, dispatch=dispatch):
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


def run(op, args, kwargs, execution, *, stops_at=STOPS, loss=None, **options):
    results: SimpleQueue[Any] = SimpleQueue()  # a list of the model's would be restored where a tensor was cached

    def model(*args: Any, **kwargs: Any) -> Any:
        result = op(*args, **kwargs)
        results.put(layouts(result))
        return result

    torch.default_generator.manual_seed(0)
    with calls_noted() as notes:
        trace = record_call(
            model, args, kwargs, execution=execution, quiet=True, stops_at=stops_at, loss=loss, **options
        )
    return Run(notes, storage_table(trace), results.get_nowait())


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


def check_op(info, dtype, memory_format, most=None, *, backward=False, **options):
    """Yield the comparison of each sample of an op, up to a maximum number, that real execution runs."""
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


# Of five dimensions, four, three, two and one.
VOLUME, IMAGE, ROWS, TABLE, LINE = (
    numbers(*shape) for shape in ((2, 3, 4, 5, 4), (2, 3, 4, 5), (2, 3, 4), (3, 4), (3,))
)
COMPLEX = numbers(3, 4, 5, dtype=torch.complex64)


def call(name: str, *args: Any, op: Any = None) -> tuple[str, Any, tuple[Any, ...]]:
    """Return the name of a rule, and a call: of the op of this name unless another is given, on these arguments."""
    return f"aten::{name}", op or getattr(OPS, name.partition(".")[0]), args


def convolution_backward(sides: Sequence[int], kernel: Sequence[int]) -> tuple[str, Any, tuple[Any, ...]]:
    x, weight, ones = numbers(2, 4, *sides), numbers(4, 4, *kernel), [1] * len(sides)
    options = (ones, [kernel[0] // 2] * len(sides), ones, False, [0] * len(sides), 1, [True] * 3)
    return call("convolution_backward", x, x, weight, [4], *options)


# By name of the rule: calls whose results' strides or storage torch's own rules give otherwise.
LAYOUTS: list[tuple[str, Any, tuple[Any, ...]]] = [
    call("floor_divide", numbers(4, 1, 3), numbers(4, 3) + 1),
    call("glu", numbers(1, 2, 6, 4), 2),
    call("ldexp.Tensor", numbers(4, 1, 3), numbers(4, 3)),
    call("mvlgamma", TABLE + 2, 2),
    call("pow.Scalar", 2.0, TABLE),
    call("log_sigmoid", TABLE),
    call("log_sigmoid_forward", TABLE),
    call("log_sigmoid_backward", TABLE, TABLE, TABLE),
    *(call(name, TABLE, TABLE) for name in ("binary_cross_entropy", "mse_loss", "smooth_l1_loss", "soft_margin_loss")),
    call("huber_loss_backward", TABLE, TABLE, TABLE, 0, 1.0),
    call("mse_loss_backward", TABLE, TABLE, TABLE, 0),
    call("smooth_l1_loss_backward", TABLE, TABLE, TABLE, 0, 1.0),
    *(call(f"{name}_backward_data", TABLE, TABLE, 1, torch.float32) for name in ("_log_softmax", "_softmax")),
    call("col2im", numbers(2, 36, 16), [4, 4], [3, 3], [1, 1], [1, 1], [1, 1]),
    call("im2col", numbers(2, 3, 5, 5), [2, 2], [2, 2], [0, 0], [4, 4]),
    call("normal.Tensor_Tensor", TABLE, TABLE),
    call("normal.Tensor_float", TABLE, 1.0),
    call("normal.float_Tensor", 1.0, TABLE),
    call("_upsample_nearest_exact1d", ROWS, [6]),
    call("upsample_nearest1d", ROWS, [6]),
    call("upsample_linear1d", ROWS, [6], False),
    *(
        call(name, x, [6, 7], *(() if "nearest" in name else (False,)))
        for name in (
            *("_upsample_nearest_exact2d", "upsample_bicubic2d", "upsample_bilinear2d", "upsample_nearest2d"),
            *("_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa"),
        )
        for x in (IMAGE, numbers(2, 1, 4, 5))
    ),
    call("_upsample_nearest_exact3d", VOLUME, [6, 7, 5]),
    call("upsample_nearest3d", VOLUME, [6, 7, 5]),
    call("upsample_trilinear3d", VOLUME, [6, 7, 5], False),
    call("linalg_vector_norm", numbers(2, 1, 4, 5), 2, [1], True),
    call("roll", IMAGE, [1, 2], [2, 3]),
    call("native_dropout", numbers(2, 1, 4, 5), 0.5, True),
    *(
        made
        for name in ("replication_pad", "reflection_pad")
        for made in (
            call(f"{name}2d", IMAGE, [1, 2, 0, 1]),
            call(f"{name}3d", VOLUME, [1, 2, 0, 1, 1, 1]),
            call(f"{name}2d_backward", numbers(2, 3, 5, 8), IMAGE, [1, 2, 0, 1]),
        )
    ),
    call("channel_shuffle", numbers(2, 4, 3, 5), 2),
    call("native_channel_shuffle", numbers(2, 4, 3, 5), 2),
    call("pixel_shuffle", numbers(2, 8, 3, 5), 2),
    call("pixel_unshuffle", numbers(2, 3, 4, 6), 2),
    call("max_unpool2d", numbers(2, 3, 2, 3), F.max_pool2d(numbers(2, 3, 4, 6), 2, return_indices=True)[1], [4, 6]),
    call("max_pool1d", numbers(2, 3, 8), [2]),
    call("nll_loss2d_forward", IMAGE, torch.zeros(2, 4, 5, dtype=torch.int64), None, 0, -100),
    *(call("_fft_c2c", COMPLEX, dims, 0, True) for dims in ([0], [1, 2], [0, 2])),
    *(call("_fft_c2r", COMPLEX, dims, 0, 2 * COMPLEX.shape[dims[-1]] - 2) for dims in ([0], [1, 2], [2, 0])),
    *(call("_fft_r2c", numbers(3, 4, 5), dims, 0, True) for dims in ([0], [1, 2], [2, 0])),
    *(
        call("convolution", numbers(2, 4, *sides), numbers(4, 4, *kernel), op=op[len(sides)])
        for op in (
            (None, F.conv1d, F.conv2d, F.conv3d),
            (None, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        )
        for sides, kernel in (((6,), (3,)), ((6, 5), (3, 3)), ((6, 5), (1, 1)), ((6, 5, 6), (3, 3, 3)))
    ),
    call("convolution", numbers(2, 4, 6, 5), numbers(4, 1, 3, 3), None, 1, 0, 1, 4, op=F.conv2d),
    call("convolution", numbers(2, 4, 1, 1), numbers(4, 4, 1, 1), op=F.conv2d),
    call("native_batch_norm_backward", IMAGE, IMAGE, *[LINE] * 5, True, 1e-5, [True] * 3),
    call("batch_norm_backward", IMAGE, IMAGE, *[LINE] * 5, True, 1e-5, [True] * 3, numbers(0)),
    call(
        *("native_layer_norm_backward", IMAGE, IMAGE, [4, 5], *[numbers(2, 3, 1, 1)] * 2, *[numbers(4, 5)] * 2),
        [True] * 3,
    ),
    convolution_backward((6,), (3,)),
    convolution_backward((6, 5), (3, 3)),
    convolution_backward((1, 1), (1, 1)),
    convolution_backward((4, 4, 4), (3, 3, 3)),
    call(
        *(
            "_convolution",
            numbers(2, 4, 6, 5),
            numbers(4, 4, 3, 3),
            None,
            *[[1, 1]] * 3,
            False,
            [0, 0],
            1,
            False,
            False,
        ),
        *(True, True),
    ),
    call("native_group_norm", numbers(2, 4, 3, 5), 4, numbers(4), numbers(4), op=OPS.group_norm),
    call("group_norm", numbers(2, 4, 3, 5), 2),
    *(
        call("native_batch_norm", numbers(*shape), *[numbers(shape[1])] * 4, trains, 0.1, 1e-5, op=op)
        for op in (OPS.native_batch_norm, OPS._native_batch_norm_legit)
        for shape in ((2, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1), (1, 3, 1, 1))
        for trains in (False, True)
    ),
    call("native_batch_norm", ROWS, None, None, None, None, True, 0.1, 1e-5),
    call("_native_batch_norm_legit.no_stats", numbers(1, 2, 3), None, None, True, 0.1, 1e-5),
]
