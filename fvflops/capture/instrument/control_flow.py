"""Record what torch's higher-order ops run (cond, while_loop, scan), in Python, and launches of Triton kernels."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fvflops.capture.decomposed_attention import BLOCK_MASKS, count_mask
from fvflops.capture.instrument.patching import Patch, Wrapper, calling
from fvflops.capture.real_mode import RecordingMode
from fvflops.capture.recorder.caller_lines import find_source_line
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.recorder.tensor_specs import OpSchema, tensors_of
from fvflops.capture.restore import interrupts
from fvflops.capture.shapes.shape_mode import ShapeMode
from fvflops.torch_internals import (
    DispatchKey,
    DispatchModeKey,
    HigherOrderOperator,
    MissingInternal,
    compile_and_call,
    disable_dispatch_modes,
    get_dispatch_mode,
    is_batched,
    is_functorch_wrapped,
    pytree,
    too_old_message,
    unwrap_functorch,
)

_DENSE = DispatchKey.CompositeExplicitAutograd
# torch's function that compiles a function and calls it; older versions have none.
_COMPILED = None if compile_and_call is None else Patch(*compile_and_call)
_CALLS = Patch(HigherOrderOperator, "__call__")
_NO_FLEX_ATTENTION = too_old_message("flex_attention")  # it accepts no mode of ours
_TRACERS = tuple(DispatchModeKey.__members__.values())


@dataclass(frozen=True, slots=True)
class HigherOrderCall:
    """One call of a higher-order op: the op, torch's implementation, the recorder and the dispatch mode."""

    op: HigherOrderOperator
    original: Callable[..., Any]
    recorder: Recorder
    mode: Mode

    @property
    def name(self) -> str:
        return f"higher_order::{self.op.name()}"

    def evaluate_condition(self, value: Any) -> bool | None:
        """Return whether a condition is true, or None if unknown."""
        while isinstance(value, torch.Tensor) and is_functorch_wrapped(value):
            value = unwrap_functorch(value)
        if isinstance(value, torch.Tensor) and not self.mode.has_values([value]):
            return None
        if isinstance(value, torch.Tensor):
            self.recorder.python_reads.record([value])
        with interrupts.deferred(), disable_dispatch_modes():
            return bool(value)


def run_control_flow(recorder: Recorder, mode: Mode) -> list[Wrapper]:
    """Return the wrappers that run branches and bodies in Python, in this thread.

    torch runs them below the dispatch modes, unrecorded, and differentiates them through a traced graph. In Python each
    op is recorded at each execution and differentiated like any other; the forward of a branch or body that torch's
    backward would rerun is not counted. Ops in `stops_at` run as in torch; Triton kernels are always recorded by name.
    """
    applies = recorder.is_recording_thread
    wrappers: list[Wrapper] = [(_CALLS, calling(partial(_run_in_python, recorder, mode), applies))]
    if _COMPILED is not None:  # the compiled code would include the dispatch mode
        call = calling(lambda _, function, args, kwargs=None: function(*args, **(kwargs or {})), applies)
        wrappers.append((_COMPILED, call))
    return wrappers


def _run_in_python(
    recorder: Recorder, mode: Mode, original: Callable[..., Any], op: HigherOrderOperator, /, *args: Any, **kwargs: Any
) -> Any:
    if _NO_FLEX_ATTENTION and op.name().startswith("flex_attention"):
        raise MissingInternal(_NO_FLEX_ATTENTION)
    op_call = HigherOrderCall(op, partial(original, op), recorder, mode)
    handler, decomposes = _SINGLE_CALLS.get(op.name()), False
    if handler is None and op_call.name not in recorder.stops_at:
        handler, decomposes = _DECOMPOSED.get(op.name()), True
    is_traced = any(get_dispatch_mode(key) is not None for key in _TRACERS)
    if handler is None or is_traced:
        return op_call.original(*args, **kwargs)
    if decomposes:
        recorder.decompose(op_call.name)
    return handler(op_call, *args, **kwargs)


def _cond(op_call: HigherOrderCall, pred: Any, true_fn: Any, false_fn: Any, operands: Sequence[Any] = ()) -> Any:
    """Run the branch taken; if the condition is unknown, run both and record the costlier.

    If `vmap` batches the condition, both run and results are selected elementwise, as in torch.
    """
    if isinstance(pred, torch.Tensor) and is_batched(pred):
        return pytree.tree_map(partial(torch.where, pred), true_fn(*operands), false_fn(*operands))
    truth = op_call.evaluate_condition(pred)
    if truth is not None:
        return (true_fn if truth else false_fn)(*operands)
    op_call.mode.assume_outcome(op_call.name, "the costlier branch", bound=True)
    return op_call.recorder.keep_costliest_branch([partial(true_fn, *operands), partial(false_fn, *operands)])


def _while_loop(
    op_call: HigherOrderCall, cond_fn: Any, body_fn: Any, carried: Any, additional: Any = (), **_: Any
) -> Any:
    """Run the body while the condition holds; once if the condition is unknown from the start."""
    values, result = list(carried), None
    while (truth := op_call.evaluate_condition(cond_fn(*values, *additional))) is not False:
        if truth is None:
            outcome = "one iteration" if result is None else "the iterations that are known"
            op_call.mode.assume_outcome(op_call.name, outcome, bound=False)
            if result is not None:
                break
        result = body_fn(*values, *additional)
        values = pytree.tree_leaves(result)
        if truth is None:
            break
    if result is None:
        return tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in values)
    return result


def _scan(
    op_call: HigherOrderCall, combine_fn: Any, init: Sequence[Any], xs: Sequence[Any], additional_inputs: Sequence[Any]
) -> Any:
    """Run the body for each slice, passing the carry on, and stack its outputs.

    A traced graph returns a flat list, a Python function a pair of nested structures (carry, outputs); the result has
    the same form.
    """
    carry = list(init)
    rows: list[list[Any]] = []
    for index in range(xs[0].shape[0]):
        result = combine_fn(*carry, *(x.select(0, index) for x in xs), *additional_inputs)
        nested = isinstance(combine_fn, partial) and isinstance(result, tuple) and len(result) == 2
        leaves = pytree.tree_leaves(result)
        carry, row = leaves[: len(init)], leaves[len(init) :]
        rows.append(row)
    stacked = [None if column[0] is None else torch.stack(column) for column in zip(*rows, strict=True)]
    return pytree.tree_unflatten([*carry, *stacked], pytree.tree_structure(result)) if nested else (*carry, *stacked)


def _run_named(op_call: HigherOrderCall, subgraph: Any, identifier: str, *operands: Any) -> Any:
    return subgraph(list(operands)) if getattr(subgraph, "_boxed_call", False) else subgraph(*operands)


def _run_kernel(op_call: HigherOrderCall, *args: Any, **kwargs: Any) -> Any:
    """Run torch's kernel for the op under the dispatch mode; the kernel calls the subgraph."""
    return op_call.op.py_kernels[_DENSE](*args, **kwargs)


def _launch_triton(
    op_call: HigherOrderCall, *, kernel_idx: int, constant_args_idx: int, kwargs: Mapping[str, Any], **options: Any
) -> Any:
    """Record a Triton kernel by name and arguments: its body is opaque."""
    with interrupts.deferred():  # an interrupted import cannot be repeated
        from fvflops.torch_internals import triton_kernel_wrap

    clones = options.pop("tensors_to_clone", None)
    table = triton_kernel_wrap.kernel_side_table
    arguments = dict(kwargs)
    for name in clones or ():
        arguments[name] = arguments[name].clone()
    launch = partial(
        triton_kernel_wrap.triton_kernel_wrapper_mutation.py_kernels[_DENSE],
        kernel_idx=kernel_idx,
        constant_args_idx=constant_args_idx,
        kwargs=arguments,
        **options,
    )
    all_arguments = {**arguments, **table.get_constant_args(constant_args_idx)}
    launch_kernel(op_call.mode, table.get_kernel(kernel_idx), all_arguments, launch)
    return None if clones is None else {name: arguments[name] for name in clones}


def _flex_attention(op_call: HigherOrderCall, *args: Any, **kwargs: Any) -> Any:
    return op_call.original(*count_mask(args, BLOCK_MASKS[op_call.op.name()], op_call.mode.has_values), **kwargs)


# Ops recorded as one call, with more information than the dispatch mode receives.
_SINGLE_CALLS: dict[str, Callable[..., Any]] = {
    "flex_attention": _flex_attention,
    "flex_attention_backward": _flex_attention,
    "triton_kernel_wrapper_functional": _launch_triton,
    "triton_kernel_wrapper_mutation": _launch_triton,
}

# Ops that are decomposed.
_DECOMPOSED: dict[str, Callable[..., Any]] = {
    "cond": _cond,
    "while_loop": _while_loop,
    "scan": _scan,
    "invoke_subgraph": _run_named,
    **dict.fromkeys(
        ("foreach_map", "invoke_quant", "invoke_quant_packed", "local_map_hop"),
        lambda _, subgraph, *operands, **__: subgraph(*operands),
    ),
    **dict.fromkeys(("run_const_graph", "strict_mode"), lambda _, subgraph, operands: subgraph(*operands)),
    **dict.fromkeys(("map_impl", "associative_scan", "hints_wrapper", "out_dtype", "with_effects"), _run_kernel),
    **dict.fromkeys(("auto_functionalized", "auto_functionalized_v2"), _run_kernel),
}


# Modules and classes whose `run` launches a kernel. `Heuristics.run` only adds arguments and calls one of these.
_KERNEL_CLASSES = (
    ("triton.runtime.jit", "JITFunction"),
    ("triton.runtime.interpreter", "InterpretedFunction"),
    ("triton.runtime.autotuner", "Autotuner"),
)
_PATCHES: dict[type, Patch] = {}
# Whether a thread is inside a launch: launches that an autotuner makes within its own launch are not recorded.
_thread_local = threading.local()

Mode = RecordingMode | ShapeMode


def triton_launches(recorder: Recorder, mode: Mode) -> list[Wrapper]:
    """Return the wrappers that record launches by the model's code, `kernel[grid](...)`."""
    if "triton" not in sys.modules:
        return []
    classes = [getattr(sys.modules.get(path), name, None) for path, name in _KERNEL_CLASSES]
    found = [cls for cls in classes if cls is not None]
    launch = calling(partial(_run, mode), recorder.is_active)
    return [(_PATCHES.setdefault(cls, Patch(cls, "run")), launch) for cls in found]


def launch_kernel(mode: Mode, kernel: Any, arguments: Mapping[str, Any], call_kernel: Callable[[], Any]) -> Any:
    """Record one launch as `triton::NAME`, with the kernel's parameter names, and run it in real execution."""
    names = tuple(arguments)
    name = f"triton::{_function_of(kernel).__name__}"
    schema = OpSchema(
        name,
        names,
        (None,) * len(names),
        {argument: index for index, argument in enumerate(names)},
        tuple(index for index, value in enumerate(arguments.values()) if any(True for _ in tensors_of(value))),
        False,
        f"{name}({', '.join(names)})",
    )

    def launch() -> Any:
        _thread_local.is_launching = True
        try:
            return call_kernel()
        finally:
            _thread_local.is_launching = False

    return mode.launch(schema, arguments, launch, find_source_line(sys._getframe(1)).line)


def _run(mode: Mode, original: Callable[..., Any], kernel: Any, /, *args: Any, **kwargs: Any) -> Any:
    if getattr(_thread_local, "is_launching", False) or kwargs.get("warmup"):
        return original(kernel, *args, **kwargs)
    signature = inspect.signature(_function_of(kernel))
    named = {name: value for name, value in kwargs.items() if name in signature.parameters}  # no compiler options
    bound = signature.bind_partial(*args, **named)
    bound.apply_defaults()
    return launch_kernel(mode, kernel, bound.arguments, partial(original, kernel, *args, **kwargs))


def _function_of(kernel: Any) -> Any:
    while hasattr(kernel, "fn") and not inspect.isfunction(kernel):
        kernel = kernel.fn
    return kernel
