"""Record one call of a model, in shape or real execution, and restore the model afterwards."""

from __future__ import annotations

import logging
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from fvflops.capture.errors.model_errors import noting_remedies
from fvflops.capture.execution import ExecutionError, choose_device, needs_real_execution, suspend_outer_recordings
from fvflops.capture.instrument.autograd import AutogradUsed
from fvflops.capture.model.meta_copy import quantised_on_meta
from fvflops.capture.model.model_index import ModelIndex
from fvflops.capture.model.read_module_tree import unwrap_compiled
from fvflops.capture.model_call import CallOptions, CostEstimate, Loss, Model, ModelCall
from fvflops.capture.recorder.python_reads import DrawFinder
from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.capture.restore import interrupts
from fvflops.capture.restore.forks import at_fork
from fvflops.capture.session import Session
from fvflops.capture.shapes.rules.shape_rules import ShapeRules
from fvflops.capture.shapes.shape_tensor import DataDependentError
from fvflops.capture.shapes.symbolic_imports import without_symbolic_imports
from fvflops.capture.unseen.fake_tensors import find_fake_mode
from fvflops.garbage_collector import gc_paused
from fvflops.text import Unpack, explaining_arguments, printable, shown
from fvflops.torch_internals import OpOverload, pytree
from fvflops.trace import StopsAt, Trace

EXECUTIONS = ("auto", "shapes", "real")

_LOGGER = logging.getLogger("fvflops")
# Recordings exclude each other: two at once of one model would see each other's buffers and random numbers.
_LOCK = threading.RLock()
_POLL_SECONDS = 0.1  # how often a waiting thread lets pending signals be handled
_DECOMPOSE_ALL = StopsAt()


@explaining_arguments
def record_call(
    model: Model,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    stops_at: StopsAt = _DECOMPOSE_ALL,
    loss: Loss | None = None,
    estimate_cost: CostEstimate | None = None,
    autocast: AbstractContextManager[Any] | None = None,
    **options: Unpack[CallOptions],
) -> Trace:
    """Run a model once and return the Trace.

    `execution` is "shapes" (floating-point tensors have no values and nothing is computed on them; weights may be on
    the meta device), "real", or "auto": shape execution, then real execution if the model is data-dependent, which is
    logged. Shape execution records the ops that `device` would run, by default the device of the inputs; under
    autograd, if torch has no such device on this machine, the ops that the CPU runs are recorded. `assume` gives sizes
    to ops with data-dependent output size: {"aten::nonzero": 100}. With execution="shapes" or `device`, a
    data-dependent model raises ExecutionError.

    Composite ops in `stops_at` are recorded as called, others are decomposed; it also names the arguments, such as
    offsets, whose values are recorded (for a formula table, pass `table.stops_at`). The model runs without autograd,
    whose dispatch keys are excluded so that composite ops are not decomposed; if its forward uses autograd, it runs
    again with it. With `loss`, a function from the model's result to a scalar, it runs with autograd and the Trace
    includes the backward pass, whose ops belong to the modules whose forward created them; ops that activation
    checkpointing reruns have the phase "recompute". `torch.cond` records the branch taken or, if the condition is
    unknown, the costlier one by `estimate_cost`; a loop of unknown length runs once. These assumptions are in the
    Trace's `info.assumed`. `quiet` silences Python's warnings. `measure` is as in `fvflops.record`, for
    execution="real". With `lines` the Trace has the source line that called each op: the innermost outside torch and
    Python's standard library. The forward pass and the loss run in `autocast`, if it is given. Exceptions of the model
    propagate. The model, its buffers, its modules' attributes, the inputs and the random generators are restored.
    Recordings in several threads run one after the other.

    >>> trace = record_call(nn.Linear(3, 2), (torch.ones(1, 3),), stops_at=StopsAt(frozenset({"aten::linear"})))
    >>> trace.signatures[0].op
    'aten::linear'
    """
    execution, measure = options["execution"], options["measure"]
    if execution not in EXECUTIONS:
        raise ValueError(f"execution must be one of {', '.join(EXECUTIONS)}; got {shown(execution)}")
    if measure and execution != "real":
        raise ValueError(f"measure={measure!r} requires execution='real'")
    call = ModelCall(args, {} if kwargs is None else dict(kwargs), loss, autocast)
    begin = partial(Session, stops_at=stops_at, measure=measure, lines=options["lines"])
    shape_options = {"device": options["device"], "assume": options["assume"], "estimate_cost": estimate_cost}
    with noting_remedies(), interrupts.deferred(), recording_lock(), suspend_outer_recordings(), ExitStack() as stack:
        if options["quiet"]:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        if isinstance(model, nn.Module):
            model = unwrap_compiled(model)
            stack.enter_context(quantised_on_meta(model))
        return _record(model, call, begin, execution, shape_options)


def _record(
    model: Model, call: ModelCall, begin: Callable[..., Session], execution: str, shape_options: Mapping[str, Any]
) -> Trace:
    """Return the Trace of shape execution if it is asked for and possible, else of real execution."""
    draws = DrawFinder()
    begin = partial(begin, model, draws=draws)
    repeatable = not any(issubclass(type(value), Iterator) for value in (*call.args, *call.kwargs.values()))
    failure, shapes = "", None
    if find_fake_mode(tensors_of((call.args, call.kwargs))) is not None:
        execution = "fake"
    if execution == "shapes" or (execution == "auto" and repeatable):
        record_shapes = partial(_record_shapes, begin, model, call, execution, shape_options)
        with gc_paused(), without_symbolic_imports():
            shapes, failure = record_shapes()
            if shapes is not None and not failure:
                if shapes.info.assumed:
                    _LOGGER.warning("assumed (data-dependent): %s", printable(shapes.info.assumed))
                return (record_shapes()[0] if draws.needs_second_run else None) or shapes
    try:
        trace = _record_real(begin, model, call, repeatable=repeatable)
        if draws.needs_second_run and repeatable:
            trace = _record_real(begin, model, call, repeatable=repeatable)
    except Exception as error:
        if shapes is None or interrupts.is_interrupt(error):
            raise
        reason = printable(" ".join(f"{type(error).__name__}: {error}".split())[:200])
        _LOGGER.warning("%s; real execution failed too (%s); shape execution is used", printable(failure), reason)
        return shapes
    if failure:
        _LOGGER.warning("%s; used real execution instead", printable(failure))
    return trace


@contextmanager
def recording_lock() -> Iterator[None]:
    """Exclude recordings of other threads: restoring a model must not overlap another run of it."""
    lock = _LOCK
    while not lock.acquire(timeout=_POLL_SECONDS):
        with interrupts.allowed():
            pass  # an exception of a signal handler ends the wait
    try:
        yield
    finally:
        lock.release()


def _reset_lock() -> None:
    """Replace the lock in a forked child: the parent's threads that might hold it do not exist there."""
    global _LOCK
    _LOCK = threading.RLock()


at_fork(_reset_lock)


def _record_shapes(
    begin: Callable[..., Session], model: Model, call: ModelCall, execution: str, shape_options: Mapping[str, Any]
) -> tuple[Trace | None, str]:
    """Return the Trace of shape execution or None, and the reason for real execution in one line, "" for none."""
    model_index, device = ModelIndex(model), shape_options["device"]
    if model_index.is_fake:
        return None, ""  # FakeTensors have no values anyway
    has_meta_tensors = any(item.type == "meta" for item in model_index.devices) and not _is_offloaded(model_index)
    may_fall_back = execution == "auto" and not has_meta_tensors and device is None
    devices = dict.fromkeys([*(tensor.device for tensor in tensors_of((call.args, call.kwargs))), *model_index.devices])
    rules = ShapeRules(shape_options["assume"], exact=may_fall_back, device=choose_device(device, list(devices)))
    sessions: list[Session] = []

    def begin_next(call: ModelCall) -> Session:
        """Release the previous session and return the next one."""
        if sessions:
            sessions.pop().release(describe=False)
        sessions.append(begin(call=call, execution="shapes", model_index=model_index, rules=rules, **shape_options))
        return sessions[0]

    trace, message = None, ""
    try:
        trace = _record_with_op_set(begin_next, call)
    except Exception as error:
        session = sessions[0]
        if not session.has_started:
            raise
        recorder = session.recorder
        failure, message = recorder.failure, recorder.describe_failure(error)
        if interrupts.is_interrupt(error):
            session.release(describe=False)
            raise
        if not may_fall_back:
            remedy = "pass real weights" if has_meta_tensors else 'use execution="auto"'
            message = session.describe_failure(error, remedy, assumes="output size")
            session.release(describe=False)
            if not needs_real_execution(error if failure is None else failure[2]):
                raise
            raise ExecutionError(message) from error
        recorder.forget_errors()
        failure = None  # the frames of its error include this one
    # After the except clause: the error's frames keep tensors alive.
    leak_message = sessions[0].release() if sessions else ""
    if leak_message and not may_fall_back:
        _LOGGER.warning("%s", printable(leak_message))
    return trace, message or (leak_message if may_fall_back else "")


def _record_with_op_set(begin: Callable[..., Session], call: ModelCall, *, repeatable: bool = True) -> Trace:
    """Return the Trace with ops as called ("composite"), or as decomposed by autograd ("core") if the model uses it.

    The decomposed Trace is returned only if it has a backward pass or calls other modules than the run without
    autograd. `repeatable` is False if an argument can be read only once: a model that uses autograd then raises
    ExecutionError.
    """
    if call.loss is not None:
        return begin(call=call).record()
    session = begin(call=replace(call, op_set="composite", detects_autograd=True))
    composite, failed = None, False
    try:
        composite = session.record()
    except AutogradUsed:
        pass  # recorded again below, with autograd
    except Exception as error:
        failed = True  # recorded again below, with autograd, which raises what is wrong with the model itself
        uses_autograd = session.first_autograd_use or _may_need_autograd(error)
        if interrupts.is_interrupt(error) or not repeatable or not uses_autograd:
            raise
    if composite is not None and not session.first_autograd_use:
        return composite
    if not repeatable:
        raise ExecutionError(
            f"the model uses autograd ({session.first_autograd_use}) and has to run twice, "
            "but an argument is an iterator, which can be read only once: pass a list"
        )
    core = begin(call=call).record()
    if failed or any(phase != "forward" for _, _, phase in core.calls):
        return core
    if composite is None:
        try:
            composite = begin(call=replace(call, op_set="composite")).record()
        except Exception as error:  # it fails without autograd, though it runs no backward pass: a tensor hook
            if interrupts.is_interrupt(error):
                raise
            return core
    calls_same_modules = sum(core.region_calls.values()) == sum(composite.region_calls.values())
    return composite if calls_same_modules else core


def _record_real(begin: Callable[..., Session], model: Model, call: ModelCall, *, repeatable: bool) -> Trace:
    """Return the Trace of real execution; `repeatable` is False if an argument is an iterator."""
    model_index = ModelIndex(model)
    parameters = {device for _, device, kind, _ in model_index.rows if kind == "parameter"}
    if isinstance(model, nn.Module) and parameters == {"meta"} and not _is_offloaded(model_index):
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (call.args, call.kwargs))
        call = replace(call, args=args, kwargs=kwargs)
    begin = partial(begin, model_index=model_index)
    try:
        return _record_with_op_set(begin, call, repeatable=repeatable)
    except Exception as error:
        # torch raises this for code compiled under another dispatch mode: the next session runs it uncompiled.
        if interrupts.is_interrupt(error) or not repeatable or "torch dispatch mode present" not in str(error):
            _append_device_mismatches(error, model, call.args, call.kwargs)
            raise
    return _record_with_op_set(begin, call)


def _is_offloaded(model_index: ModelIndex) -> bool:
    """Return whether accelerate offloads the weights and loads them module by module, for each call."""
    return any("_hf_hook" in vars(module) for module in model_index.names)


def _may_need_autograd(error: Exception) -> bool:
    """Return whether the cause of an error may be that the forward uses autograd and ran without it."""
    if isinstance(error, DataDependentError):
        return False
    if isinstance(error, NotImplementedError) and error.args and isinstance(error.args[0], OpOverload):
        return True  # nested tensors of torch 2.6 have some ops with autograd only
    files = (frame.filename.replace("\\", "/") for frame in traceback.extract_tb(error.__traceback__))
    mentions_grad = isinstance(error, RuntimeError) and "grad" in str(error)
    return mentions_grad or any("torch/autograd/" in file for file in files)


def _append_device_mismatches(error: Exception, model: Model, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Append to torch's message about devices the inputs that are on another device than the model."""
    names_devices = isinstance(error, RuntimeError) and any(word in str(error) for word in ("device", "meta"))
    if not (names_devices and isinstance(model, nn.Module)):
        return
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    mismatches = [
        f"{name} is on {tensor.device}"
        for name, value in (*((f"argument {index}", value) for index, value in enumerate(args)), *kwargs.items())
        for tensor in tensors_of(value)
        if devices and str(tensor.device) not in devices
    ]
    if mismatches and error.args:
        note = f"{'; '.join(mismatches)}; the model is on {', '.join(devices)}"
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
