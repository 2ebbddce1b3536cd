"""Record one call of a model, in the composite vocabulary where that is possible, and leave the model as it was."""

from __future__ import annotations

import logging
import platform
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fvflops.capture.instrument.autograd_use import AutogradUse, AutogradUsed
from fvflops.capture.instrument.backward import gradients_restored
from fvflops.capture.instrument.instrument import compiler_disabled, instrument
from fvflops.capture.instrument.patching import Wrapping
from fvflops.capture.instrument.probe import Probe
from fvflops.capture.model.model import describe_inputs, unwrap_compiled
from fvflops.capture.model.model_index import ModelIndex
from fvflops.capture.real.real_mode import RecordingMode, SubclassAwareMode
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.recorder.signature import tensors_of
from fvflops.capture.restore.forks import at_fork, undone_in_child
from fvflops.capture.restore.interrupts import allowed, deferred, is_interrupt
from fvflops.capture.restore.restore import Snapshot, UndoLog
from fvflops.capture.restore.torch_state import model_runs
from fvflops.capture.shapes.cuda_kernels import cuda_choices
from fvflops.capture.shapes.data_parallel import reducers_kept
from fvflops.capture.shapes.device_emulation import MissingDeviceMode
from fvflops.capture.shapes.metadata import Metadata, is_available, metadata_of, metadata_of_leaf
from fvflops.capture.shapes.plain_sizes import plain_sizes
from fvflops.capture.shapes.rules import ShapeRules
from fvflops.capture.shapes.shape_cache import trim_cache
from fvflops.capture.shapes.shape_mode import ShapeMode
from fvflops.capture.shapes.shape_parameters import ShapeParameters
from fvflops.capture.shapes.shape_tensor import DataDependentError
from fvflops.capture.shapes.survivors import release, say_kept
from fvflops.capture.unseen.export_patches import saved_exports
from fvflops.capture.unseen.fake_tensors import fake_execution, find_fake_mode
from fvflops.capture.unseen.unseen_work import UnseenWork
from fvflops.garbage_collector import gc_paused
from fvflops.text import printable
from fvflops.torch_internals import below_autograd, dispatch_mode_stack, pytree
from fvflops.trace import Region, Signature, StopsAt, Trace

Model = nn.Module | Callable[..., Any]
Loss = Callable[[Any], torch.Tensor]
Weigh = Callable[[Signature], int]
# Tensors that exist before a run, with their metadata, storages, and these as rows of the Trace.
Known = tuple[Sequence[torch.Tensor], list[Metadata], list[torch.UntypedStorage], list[tuple[int, str, str, str]]]

EXECUTIONS = ("auto", "shapes", "real")

_LOGGER = logging.getLogger("fvflops")
# Two runs at once of one model would see each other's buffers and random numbers: recordings take turns.
_TURN = threading.RLock()
_WAIT = 0.1  # seconds until it is looked whether a signal has come
_NO_STOPS = StopsAt()


class ExecutionError(RuntimeError):
    """A model that cannot be run by shapes alone, and may not or cannot be run for real."""


def record_call(
    model: Model,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    stops_at: StopsAt = _NO_STOPS,
    execution: str = "auto",
    device: str | torch.device | None = None,
    assume: Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    weigh: Weigh | None = None,
    quiet: bool = False,
    measure: Collection[str] = (),
    lines: bool = False,
) -> Trace:
    """Run a model once and return the Trace of what it did.

    `execution` is "shapes" (tensors of floating point have no numbers, nothing is computed on them, weights may be on
    the meta device), "real", or "auto": by shapes, and for real where a number turns out to be needed, which is logged.
    A shape run shows the ops of `device`, by default that of the inputs; under autograd, a machine without that device
    shows the CPU's kernels. `assume` gives sizes to ops whose result's size depends on values: {"aten::nonzero": 100}.
    A run by shapes that needs a number raises ExecutionError where it cannot be made for real.

    Composite ops in `stops_at` are recorded as they are called, others are looked into. The run is made below autograd;
    a model that uses autograd in its forward is run again under it. With `loss`, a function of the model's result that
    returns a scalar, the run is under autograd and goes on through the backward pass, whose ops belong to the modules
    whose forward made them; what activation checkpointing runs again is the phase "recompute". Of `torch.cond` the
    branch that is taken is recorded; by shapes, where that is not known, the larger one, by what `weigh` says that a
    call counts for, and a loop whose end is not known turns once: the Trace tells such under "supposed". `quiet`
    silences Python's warnings. `measure` is that of `fvflops.record`, for execution="real". With `lines` the Trace has
    the line of source that called each op, the innermost that is neither torch's nor Python's own. Whatever the model
    raises is raised, and the model, its buffers, its modules' attributes, the inputs and the random generators are as
    before. Recordings in several threads take turns.

    >>> trace = record_call(nn.Linear(3, 2), (torch.ones(1, 3),), stops_at=StopsAt(frozenset({"aten::linear"})))
    >>> trace.signatures[0].op
    'aten::linear'
    """
    if execution not in EXECUTIONS:
        raise ValueError(f"execution is one of {', '.join(EXECUTIONS)}, not {execution!r}")
    if measure and execution != "real":
        raise ValueError(f"measure={measure!r} is for a real run: say execution='real'")
    kwargs = {} if kwargs is None else dict(kwargs)
    with deferred(), recording_lock(), suspend_outer_recordings(), ExitStack() as stack:
        if quiet:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        stack.enter_context(compiler_disabled())
        if isinstance(model, nn.Module):
            model = unwrap_compiled(model)
        request = _Request(model, args, kwargs, stops_at, loss, weigh, measure, lines)
        once = any(issubclass(type(value), Iterator) for value in (*args, *kwargs.values()))
        failure, shapes = "", None
        if find_fake_mode(tensors_of((args, kwargs))) is not None:
            execution = "fake"
        if execution == "shapes" or (execution == "auto" and not once):
            with gc_paused(), plain_sizes():
                shapes, failure = _by_shapes(request, execution, device, assume)
            if shapes is not None and not failure:
                if shapes.info.assumed:
                    _LOGGER.warning("supposed, for want of a number: %s", printable(shapes.info.assumed))
                return shapes
        try:
            trace = _for_real(request, stack, once=once)
        except Exception as error:
            if shapes is None or is_interrupt(error):
                raise
            _LOGGER.warning("%s, and the model cannot be run for real", printable(failure))
            return shapes
        if failure:
            _LOGGER.warning("%s; the model was run for real", printable(failure))
        return trace


@contextmanager
def recording_lock() -> Iterator[None]:
    """Let this thread have its turn: a run that leaves no trace must not meet another one on the same model."""
    turn = _TURN
    while not turn.acquire(timeout=_WAIT):
        with allowed():
            pass  # what a signal's handler raises ends the waiting
    try:
        yield
    finally:
        turn.release()


def _take_turns_anew() -> None:
    """In a forked child, wait for no thread of the parent."""
    global _TURN
    _TURN = threading.RLock()


at_fork(_take_turns_anew)


@contextmanager
def suspend_outer_recordings() -> Iterator[None]:
    """Keep the recordings that go on around this one from taking down what it runs."""
    outer = [mode.recorder for mode in dispatch_mode_stack() if isinstance(mode, SubclassAwareMode)]
    with ExitStack() as stack:
        for recorder in outer:
            stack.callback(recorder.resume)
            recorder.pause()
        yield


@dataclass(frozen=True, slots=True, eq=False)
class _Request:
    """What `record_call` is asked to record: a call of a model, and what of it."""

    model: Model
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    stops_at: StopsAt
    loss: Loss | None
    weigh: Weigh | None
    measure: Collection[str]
    lines: bool


class _Attempts:
    """The runs of one request, of which the next begins when the one before is let go of; `last` is None for none."""

    def __init__(self, request: _Request, reading: ModelIndex) -> None:
        self._request = request
        self._reading = reading
        self.last: _Run | None = None

    def begin(self, vocabulary: str, *, detect: bool) -> _Run:
        """Return the next run."""
        last, self.last = self.last, None
        if last is not None:
            last.forget_errors()
            last.release()
        self.last = _Run(self._request, self._reading, vocabulary, detect=detect)
        return self.last


def _by_shapes(
    request: _Request, execution: str, device: str | torch.device | None, assume: Mapping[str, Any] | None
) -> tuple[Trace | None, str]:
    """Return the Trace of a run by shapes, if there is one, and in one line why the model is to be run for real."""
    reading = ModelIndex(request.model)
    if reading.is_fake:
        return None, ""  # FakeTensors have shapes alone as it is
    inputs = tensors_of((request.args, request.kwargs))
    homes = list(dict.fromkeys([*(tensor.device for tensor in inputs), *reading.devices]))
    impersonated = choose_device(device, homes)
    on_meta = any(home.type == "meta" for home in reading.devices) and not _is_offloaded(reading)
    may_fall_back = execution == "auto" and not on_meta and device is None
    trim_cache()
    rules = ShapeRules(assume, exact=may_fall_back, device=impersonated)
    attempts = _Attempts(request, reading)
    trace, line = None, ""
    try:
        trace = _in_vocabulary(attempts.begin, lambda run: run.by_shapes(impersonated, homes, rules), request.loss)
    except Exception as error:
        run = attempts.last
        if run is None:  # it could not be made
            raise
        failure, line = run.failure, run.why_not(error)
        run.forget_errors()
        if is_interrupt(error):
            raise
        if not may_fall_back:
            run.release()
            if not is_data_dependent(error if failure is None else failure[2]):
                raise
            remedy = _remedy(on_meta, failure[0] if failure is not None and rules.can_assume(failure[0]) else "")
            raise ExecutionError(f"{line}: {remedy}") from error
        failure = None  # its error's frames are this one too
    kept = "" if attempts.last is None else attempts.last.release()  # without the error, whose frames hold tensors too
    if kept and not may_fall_back:
        _LOGGER.warning("%s", printable(kept))
    return trace, line or (kept if may_fall_back else "")


def _remedy(on_meta: bool, op: str) -> str:
    """Return what helps where a run by shapes lacks a number; `op` is one whose result's size can be given, or ""."""
    what = "pass real weights" if on_meta else 'use execution="auto"'
    return f"{what}, or give the op a size: assume={{{op!r}: ...}}" if op else what


def _in_vocabulary(
    attempt: Callable[..., _Run], execute: Callable[[_Run], Trace], loss: Loss | None, *, once: bool = False
) -> Trace:
    """Return the Trace of a run in the composite vocabulary, or in the core one where the model uses autograd.

    It does where a core run makes a backward pass, or calls other modules. `once` says that there is one run only.
    """
    if loss is not None:
        return execute(attempt("core", detect=False))
    below = attempt("composite", detect=True)
    trace = None
    failed = False
    try:
        trace = execute(below)
    except AutogradUsed:
        pass  # the model is run again below, under autograd
    except Exception as error:
        failed = True
        if is_interrupt(error) or once or not (below.autograd.seen or _fails_below_autograd(error)):
            raise
    if trace is not None and not below.autograd.seen:
        return trace
    if once:
        raise ExecutionError(
            f"the model uses autograd ({below.autograd.seen}), for which it is run a second time, "
            "and an argument can be read only once: pass a list instead of the iterator"
        )
    again = execute(attempt("core", detect=False))
    if failed or any(phase != "forward" for _, _, phase in again.calls):
        return again
    if trace is None:
        try:
            trace = execute(attempt("composite", detect=False))
        except Exception as error:  # what it does without a backward pass (a hook on a tensor) fails below autograd too
            if is_interrupt(error):
                raise
            return again
    same = sum(again.region_calls.values()) == sum(trace.region_calls.values())
    return trace if same else again


def is_data_dependent(error: Exception) -> bool:
    """Return whether an error comes of running by shapes: a number that is not there, or a shape rule."""
    said = ("data is not allocated yet", "no fake impl registered")
    return isinstance(error, (DataDependentError, NotImplementedError)) or any(text in str(error) for text in said)


def _for_real(request: _Request, stack: ExitStack, *, once: bool) -> Trace:
    """Return the Trace of a run with numbers; `once` says that an argument can be read once only."""
    reading = ModelIndex(request.model)
    request = replace(request, weigh=None)
    if isinstance(request.model, nn.Module) and _on_meta(reading):
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor.to("meta"), (request.args, request.kwargs)
        )
        request = replace(request, args=args, kwargs=kwargs)

    def attempt(vocabulary: str, *, detect: bool) -> _Run:
        return _Run(request, reading, vocabulary, detect=detect)

    try:
        return _in_vocabulary(attempt, _Run.for_real, request.loss, once=once)
    except Exception as error:
        # Code that was compiled under another dispatch mode.
        if is_interrupt(error) or once or "torch dispatch mode present" not in str(error):
            _name_input(error, request.model, request.args, request.kwargs)
            raise
    stack.enter_context(compiler_disabled())
    return _in_vocabulary(attempt, _Run.for_real, request.loss)


def choose_device(device: str | torch.device | None, homes: Sequence[torch.device]) -> torch.device:
    """Return the device that a shape run answers for: the one asked for, else the first real one, else the CPU."""
    if device is None:
        return next((home for home in homes if home.type != "meta"), torch.device("cpu"))
    asked = torch.device(device)
    if asked.type == "meta":
        raise ValueError("a shape run answers for a device that computes, such as 'cpu' or 'cuda', not for 'meta'")
    return asked if asked.type == "cpu" or asked.index is not None else torch.device(asked.type, 0)


class _Run:
    """One run of a model, in one vocabulary; the next attempt is another run."""

    def __init__(self, request: _Request, reading: ModelIndex, vocabulary: str, *, detect: bool) -> None:
        self._model = request.model
        self._args = request.args
        self._kwargs = request.kwargs
        self._vocabulary = vocabulary
        self._loss = request.loss
        probe = Probe(request.measure, next(iter(reading.devices), None)) if request.measure else None
        self._recorder = Recorder(
            request.stops_at,
            backward=vocabulary == "core",
            weigh=request.weigh,
            meter=probe,
            lines=request.lines,
        )
        self._recorder.module_of_tensor = reading.source_devices() if request.loss is not None else {}
        self._reading = reading
        self._modules = reading.tree
        self._mode: weakref.ref[ShapeMode] | None = None
        self._detect = detect
        self.autograd = AutogradUse(self._recorder)

    def for_real(self) -> Trace:
        """Return the Trace of a run with numbers."""
        for columns in (self._held(), self._inputs()):
            self._recorder.register_storages(*columns[2:])
        self._recorder.unseen = UnseenWork(self._recorder, numbers=self._recorder.probe is None)
        fake_mode = find_fake_mode((*self._reading.tensors, *tensors_of((self._args, self._kwargs))))
        with self._restored() as undo_log:
            with (
                fake_execution(fake_mode, (self._args, self._kwargs)) as (args, kwargs),
                self._grad_mode(),
                instrument(
                    self._recorder,
                    self._reading,
                    RecordingMode(self._recorder, undo_log),
                    self._wrappings(undo_log),
                    training=self._loss is not None,
                    grad_mode=self._grad_mode,
                ),
                model_runs(),
            ):
                copy_context().run(self._call, args, kwargs)
            return self._trace("real" if fake_mode is None else "fake")

    def by_shapes(self, device: torch.device, homes: Sequence[torch.device], rules: ShapeRules) -> Trace:
        """Return the Trace of a run without numbers."""
        with self._restored() as undo_log:
            mode = ShapeMode(self._recorder, undo_log, device, homes, rules, nested=shape_run_is_on())
            self._mode = weakref.ref(mode)
            mode.reals.register(*self._held())
            mode.reals.register(*self._inputs())
            self._recorder.unseen = UnseenWork(self._recorder, is_real=False, numbers=False)
            args, kwargs = self._args, self._kwargs
            if self._vocabulary == "core":
                stand_ins = ShapeParameters(mode)
                stand_ins.put_into(self._reading)
                args, kwargs = stand_ins.in_values((args, kwargs))
            try:
                with (
                    self._grad_mode(),
                    reducers_kept() if self._vocabulary == "core" else nullcontext(),
                    instrument(
                        *(self._recorder, self._reading, mode, self._wrappings(undo_log)),
                        training=self._loss is not None,
                        grad_mode=self._grad_mode,
                    ),
                    nullcontext()
                    if is_available(device)
                    else MissingDeviceMode(device, trains=self._vocabulary == "core"),
                    cuda_choices(device) if device.type == "cuda" and self._vocabulary == "core" else nullcontext(),
                    model_runs(),
                ):
                    copy_context().run(self._call, args, kwargs)
            finally:
                mode.close()
            if self.failure is not None:  # the model caught it, and took another path than it would have
                raise self.failure[2]
            return self._trace("shapes", device=str(device), **rules.about())

    @property
    def failure(self) -> tuple[str, str, Exception] | None:
        """The first thing that the run could not do: the op's name, the module's, and the error."""
        return self._recorder.failure

    def why_not(self, error: Exception) -> str:
        """Return in one line what a run by shapes could not do, and in which module."""
        return self._recorder.why_not(error)

    def forget_errors(self) -> None:
        """Let go of errors, whose frames hold this run and its tensors."""
        self._recorder.forget_errors()

    def release(self) -> str:
        """Take the tensors of a run by shapes out of what keeps them; return in one line what cannot be undone."""
        return say_kept(release(self._mode)) if self._mode is not None else ""

    def _trace(self, execution: str, **more: str) -> Trace:
        self._recorder.close()
        meter = self._recorder.probe
        return self._recorder.trace(
            self._modules,
            {
                "torch": str(torch.__version__),
                "python": platform.python_version(),
                "vocabulary": self._vocabulary,
                "execution": execution,
                "inputs": ", ".join(describe_inputs(self._args, self._kwargs)),
                **more,
                **({} if meter is None else meter.about()),
            },
        )

    @contextmanager
    def _grad_mode(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._vocabulary == "composite":
                stack.enter_context(torch.no_grad())
                stack.enter_context(below_autograd())
            elif self._loss is not None:
                stack.enter_context(torch.enable_grad())
            yield

    def _held(self) -> Known:
        reading = self._reading
        return reading.tensors, reading.metadata, reading.storages, reading.rows

    def _inputs(self) -> Known:
        tensors = [tensor for tensor in tensors_of((self._args, self._kwargs)) if metadata_of_leaf(tensor) is not None]
        metadata = [metadata_of(tensor) for tensor in tensors]
        storages = [tensor.untyped_storage() for tensor in tensors]
        rows = [
            (storage.nbytes(), item.spec.device, "input", "") for storage, item in zip(storages, metadata, strict=True)
        ]
        return tensors, metadata, storages, rows

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        model = self._model
        synchronises = isinstance(model, nn.parallel.DistributedDataParallel) and self._loss is not None
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) and not synchronises:
            # The wrapper's own forward scatters; what is counted of a forward pass is the model in it.
            model = model.module
        elif isinstance(model, nn.Module):
            result = model(*args, **kwargs)
            self._run_backward(result)
            return
        unseen = self._recorder.unseen
        if unseen is not None:
            unseen.enter((args, kwargs))
        token = self._recorder.enter(self._recorder.region(Region("module", "")), (args, kwargs))
        result = model(*args, **kwargs)
        if unseen is not None:
            unseen.leave(result, model)
        self._recorder.leave(token, result)
        self._run_backward(result)

    def _run_backward(self, result: Any) -> None:
        if self._loss is not None:
            self._loss(result).backward()

    @contextmanager
    def _restored(self) -> Iterator[UndoLog]:
        snapshot = Snapshot(self._reading, (self._args, self._kwargs), (self._model, self._loss))
        undo_log = UndoLog()
        try:
            # The snapshot knows the model's own gradients; a function, or a module, may use others too.
            with undone_in_child(snapshot.restore), nullcontext() if self._loss is None else gradients_restored():
                try:
                    yield undo_log
                finally:
                    undo_log.undo()
        finally:
            try:
                snapshot.restore()
            finally:
                # Under a caller's autocast the run cast weights below autograd; its cache would hand them on.
                torch.clear_autocast_cache()

    def _wrappings(self, undo_log: UndoLog) -> list[Wrapping]:
        return [*saved_exports(undo_log, self._recorder.fresh), *(self.autograd.wrappings() if self._detect else ())]


def shape_run_is_on() -> bool:
    """Return whether a run by shapes goes on in this thread."""
    return any(isinstance(mode, ShapeMode) for mode in dispatch_mode_stack())


def _on_meta(reading: ModelIndex) -> bool:
    kinds = zip(reading.metadata, reading.rows, strict=True)
    return not _is_offloaded(reading) and {
        metadata.device.type for metadata, (_, _, kind, _) in kinds if kind == "parameter"
    } == {"meta"}


def _is_offloaded(reading: ModelIndex) -> bool:
    """Return whether accelerate keeps the weights elsewhere, and puts them into each module for its call."""
    return any("_hf_hook" in vars(module) for module in reading.names)


def _fails_below_autograd(error: Exception) -> bool:
    """Return whether a run may have failed for being made below autograd: the model uses autograd in its forward."""
    if isinstance(error, DataDependentError):
        return False
    files = (frame.filename.replace("\\", "/") for frame in traceback.extract_tb(error.__traceback__))
    says_so = isinstance(error, RuntimeError) and "grad" in str(error)
    return says_so or any("torch/autograd/" in file for file in files)


def _name_input(error: Exception, model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Add to torch's message about devices which input is elsewhere than the model."""
    about_devices = isinstance(error, RuntimeError) and any(word in str(error) for word in ("device", "meta"))
    if not (about_devices and isinstance(model, nn.Module)):
        return
    homes = sorted({str(parameter.device) for parameter in model.parameters()})
    strays = [
        f"{name} is on {tensor.device}"
        for name, value in (*((f"argument {index}", value) for index, value in enumerate(args)), *kwargs.items())
        for tensor in tensors_of(value)
        if homes and str(tensor.device) not in homes
    ]
    if strays and error.args:
        note = f"{'; '.join(strays)}; the model is on {', '.join(homes)}"
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
