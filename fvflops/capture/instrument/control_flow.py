"""Run torch's higher-order control flow ops (cond, while_loop, scan) in Python, so that the ops inside are recorded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from fvflops.capture.instrument.patching import Patch, Wrapping
from fvflops.capture.instrument.triton_launches import launch_kernel
from fvflops.capture.recorder.block_mask import BLOCK_MASKS, count_mask
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.recorder.signature import OpSchema
from fvflops.capture.restore.interrupts import deferred
from fvflops.torch_internals import (
    DispatchKey,
    DispatchModeKey,
    HigherOrderOperator,
    compile_and_call,
    disable_dispatch_modes,
    get_dispatch_mode,
    is_batched,
    is_functorch_wrapped,
    pytree,
    unwrap_functorch,
)

_DENSE = DispatchKey.CompositeExplicitAutograd
# torch's function, if it has one, that compiles the function it is given and calls it.
_COMPILED = None if compile_and_call is None else Patch(*compile_and_call)
_CALLS = Patch(HigherOrderOperator, "__call__")
_TRACERS = tuple(DispatchModeKey.__members__.values())


class Mode(Protocol):
    """The dispatch mode's methods that control flow needs."""

    def has_values(self, tensors: list[Any]) -> bool:
        """Return whether tensors have the values of a real run."""

    def assume_outcome(self, op: str, what: str, *, bound: bool) -> None:
        """Record an assumption about a data-dependent op; `bound`: the op costs at most that."""

    def launch(self, schema: OpSchema, kwargs: Mapping[str, Any], run: Callable[[], Any], source: str) -> Any:
        """Record a launch of a kernel, which may write to all of its tensors, and run it in real execution."""


@dataclass(frozen=True, slots=True)
class Flow:
    """One call of a higher-order op: the op, torch's implementation, the recorder and the dispatch mode."""

    op: HigherOrderOperator
    original: Callable[..., Any]
    recorder: Recorder
    mode: Mode

    @property
    def name(self) -> str:
        """The op's name in a Trace."""
        return f"higher_order::{self.op.name()}"

    def truth_of(self, value: Any) -> bool | None:
        """Return whether a condition is true, or None if unknown."""
        while isinstance(value, torch.Tensor) and is_functorch_wrapped(value):
            value = unwrap_functorch(value)
        if isinstance(value, torch.Tensor) and not self.mode.has_values([value]):
            return None
        with deferred(), disable_dispatch_modes():
            return bool(value)


def run_control_flow(recorder: Recorder, mode: Mode) -> list[Wrapping]:
    """Return the wrappings that run branches and bodies in Python, in this thread.

    torch runs them below the dispatch modes, unrecorded, and differentiates them through a traced graph. In Python each
    op is recorded once per execution, and autograd differentiates it as any other; that torch's own backward reruns the
    forward of a branch or body is not counted. Ops in `stops_at` are left to torch; Triton kernels are always recorded
    by their own name.
    """
    wrappings: list[Wrapping] = [(_CALLS, partial(_run_inside, recorder, mode))]
    if _COMPILED is not None:
        wrappings.append((_COMPILED, partial(_run_uncompiled, recorder)))
    return wrappings


def _run_inside(recorder: Recorder, mode: Mode, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(op: HigherOrderOperator, /, *args: Any, **kwargs: Any) -> Any:
        flow = Flow(op, partial(original, op), recorder, mode)
        run, decomposes = _SINGLE_CALLS.get(op.name()), False
        if run is None and flow.name not in recorder.stops_at:
            run, decomposes = _DECOMPOSED.get(op.name()), True
        if run is None or not recorder.is_recording_thread() or _is_traced():
            return flow.original(*args, **kwargs)
        if decomposes:
            recorder.decompose(flow.name)
        return run(flow, *args, **kwargs)

    return call


def _run_uncompiled(recorder: Recorder, compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Call what `torch.cond` and others pass to torch.compile directly: compiling would include the dispatch mode."""

    def call(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Any:
        if not recorder.is_recording_thread():
            return compiled(function, args, kwargs)
        return function(*args, **(kwargs or {}))

    return call


def _is_traced() -> bool:
    """Return whether torch traces a graph, for which it has its own rules."""
    return any(get_dispatch_mode(key) is not None for key in _TRACERS)


def _cond(flow: Flow, pred: Any, true_fn: Any, false_fn: Any, operands: Sequence[Any] = ()) -> Any:
    """Run the branch taken; if unknown, run both and keep the costlier.

    Where `vmap` batches the condition, both run and are selected elementwise, as in torch.
    """
    if isinstance(pred, torch.Tensor) and is_batched(pred):
        return pytree.tree_map(partial(torch.where, pred), true_fn(*operands), false_fn(*operands))
    truth = flow.truth_of(pred)
    if truth is not None:
        return (true_fn if truth else false_fn)(*operands)
    flow.mode.assume_outcome(flow.name, "the costlier branch", bound=True)
    return flow.recorder.keep_costliest_branch([partial(true_fn, *operands), partial(false_fn, *operands)])


def _while_loop(
    flow: Flow, cond_fn: Any, body_fn: Any, carried: Sequence[Any], additional: Sequence[Any] = (), **_: Any
) -> Any:
    """Run the body while the condition holds; once if the condition is unknown from the start."""
    values, result = list(carried), None
    while (truth := flow.truth_of(cond_fn(*values, *additional))) is not False:
        if truth is None:
            what = "one iteration" if result is None else "the iterations that are known"
            flow.mode.assume_outcome(flow.name, what, bound=False)
            if result is not None:
                break
        result = body_fn(*values, *additional)
        values = pytree.tree_leaves(result)
        if truth is None:
            break
    if result is None:
        return tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in values)
    return result


def _scan(flow: Flow, combine_fn: Any, init: Sequence[Any], xs: Sequence[Any], additional_inputs: Sequence[Any]) -> Any:
    """Run the body for each slice, passing the carry on, and stack its outputs.

    A graph returns all results in one list. A function called by `scan` returns carry and outputs as nested structures,
    which `scan` expects back.
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


def _run_first(flow: Flow, subgraph: Any, *operands: Any, **_: Any) -> Any:
    """Call the first argument with the others."""
    return subgraph(*operands)


def _run_named(flow: Flow, subgraph: Any, identifier: str, *operands: Any) -> Any:
    """Call the first argument with all others but its name, the second."""
    return subgraph(list(operands)) if getattr(subgraph, "_boxed_call", False) else subgraph(*operands)


def _run_on_list(flow: Flow, subgraph: Any, operands: Sequence[Any]) -> Any:
    """Call the first argument with the items of the second, a list."""
    return subgraph(*operands)


def _run_kernel(flow: Flow, *args: Any, **kwargs: Any) -> Any:
    """Run torch's own kernel under the dispatch mode; it calls the function inside."""
    return flow.op.py_kernels[_DENSE](*args, **kwargs)


def _launch_triton(
    flow: Flow, *, kernel_idx: int, constant_args_idx: int, kwargs: Mapping[str, Any], **rest: Any
) -> Any:
    """Record a Triton kernel by its own name and arguments: its body is opaque."""
    with deferred():  # an interrupted import cannot be repeated
        from fvflops.torch_internals import triton_kernel_wrap

    clones = rest.pop("tensors_to_clone", None)
    table = triton_kernel_wrap.kernel_side_table
    arguments = dict(kwargs)
    for name in clones or ():
        arguments[name] = arguments[name].clone()
    run = partial(
        triton_kernel_wrap.triton_kernel_wrapper_mutation.py_kernels[_DENSE],
        kernel_idx=kernel_idx,
        constant_args_idx=constant_args_idx,
        kwargs=arguments,
        **rest,
    )
    all_arguments = {**arguments, **table.get_constant_args(constant_args_idx)}
    launch_kernel(flow.mode, table.get_kernel(kernel_idx), all_arguments, run, sys._getframe(1))
    return None if clones is None else {item: arguments[item] for item in clones}


def _flex_attention(flow: Flow, *args: Any, **kwargs: Any) -> Any:
    """Run torch's flex attention with the pairs of its block mask counted."""
    return flow.original(*count_mask(args, BLOCK_MASKS[flow.op.name()], flow.mode.has_values), **kwargs)


# Ops recorded as one call, with more information than the dispatch mode gets.
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
    "map_impl": _run_kernel,
    "associative_scan": _run_kernel,
    "auto_functionalized": _run_kernel,
    "auto_functionalized_v2": _run_kernel,
    "foreach_map": _run_first,
    "hints_wrapper": _run_kernel,
    "invoke_quant": _run_first,
    "invoke_quant_packed": _run_first,
    "invoke_subgraph": _run_named,
    "local_map_hop": _run_first,
    "out_dtype": _run_kernel,
    "run_const_graph": _run_on_list,
    "strict_mode": _run_on_list,
    "with_effects": _run_kernel,
}
