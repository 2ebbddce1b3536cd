"""The recording of a model: one forward run, in the composite vocabulary where it can be, the model left as it was."""

from __future__ import annotations

import gc
import logging
import platform
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

from fvflops.capture.absent_device import OnThisMachine
from fvflops.capture.control_flow import open_control_flow
from fvflops.capture.dispatch import RecordingMode
from fvflops.capture.functions import function_regions
from fvflops.capture.memo import trim_memo
from fvflops.capture.metadata import Metadata, is_here, metadata_of, metadata_of_leaf
from fvflops.capture.model import describe_inputs, unwrap_compiled
from fvflops.capture.reading import Reading
from fvflops.capture.recompute import recompute_phase
from fvflops.capture.recorder import Recorder
from fvflops.capture.restore import Snapshot, UndoLog, leaves_of
from fvflops.capture.rules import ShapeRules
from fvflops.capture.scopes import module_scopes
from fvflops.capture.shape_dispatch import ShapeMode
from fvflops.capture.shape_tensor import ValueNeeded
from fvflops.capture.signature import tensors_of
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
    silences Python's warnings. Whatever the model raises is raised, and the model, its buffers, its modules'
    attributes, the inputs and the random generators are as before. Recordings in several threads take turns.

    >>> trace = record_call(nn.Linear(3, 2), (torch.ones(1, 3),), stops_at=StopsAt(frozenset({"aten::linear"})))
    >>> trace.signatures[0].op
    'aten::linear'
    """
    if execution not in EXECUTIONS:
        raise ValueError(f"execution is one of {', '.join(EXECUTIONS)}, not {execution!r}")
    kwargs = {} if kwargs is None else dict(kwargs)
    with _TURN, ExitStack() as stack:
        if quiet:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")
        if "torch._dynamo" in sys.modules:
            stack.enter_context(_eager())
        if isinstance(model, nn.Module):
            model = unwrap_compiled(model)
        once = any(isinstance(value, Iterator) for value in (*args, *kwargs.values()))
        failure = ""
        if execution == "shapes" or (execution == "auto" and not once):
            with _uncollected():
                outcome = _by_shapes(model, args, kwargs, stops_at, execution, device, assume, loss, weigh)
            if isinstance(outcome, Trace):
                if "supposed" in outcome.about:
                    _LOGGER.warning("supposed, for want of a number: %s", outcome.about["supposed"])
                return outcome
            failure = outcome
        trace = _for_real(model, args, kwargs, stops_at, loss, stack, once)
        if failure:
            _LOGGER.warning("%s; the model was run for real", failure)
        return trace


@contextmanager
def _uncollected() -> Iterator[None]:
    """Keep Python's collector of cycles from looking again and again at a record that grows."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _by_shapes(
    model: Model,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    stops_at: StopsAt,
    execution: str,
    device: str | torch.device | None,
    assume: Mapping[str, Any] | None,
    loss: Loss | None,
    weigh: Weigh | None,
) -> Trace | str:
    """Return the Trace of a run by shapes, or in one line why there is none and the model is to be run for real."""
    reading = Reading(model)
    homes = list(dict.fromkeys([*(tensor.device for tensor in tensors_of((args, kwargs))), *reading.devices]))
    impersonated = _impersonated(device, homes)
    on_meta = any(home.type == "meta" for home in reading.devices)
    may_fall_back = execution == "auto" and not on_meta and device is None
    trim_memo()
    rules = ShapeRules(assume, exact=may_fall_back, device=impersonated)
    vocabulary = "composite" if loss is None else "core"
    while True:
        run = _Run(model, reading, args, kwargs, stops_at, vocabulary, loss, weigh)
        try:
            return run.by_shapes(impersonated, homes, rules)
        except Exception as error:
            other, _ = _another_way(error)
            if vocabulary == "composite" and other == "core" and not isinstance(error, ValueNeeded):
                vocabulary = other
                continue
            line = run.why_not(error)
            if may_fall_back:
                return line
            if not _wants_numbers(error if run.failure is None else run.failure[2]):
                raise
            what = "pass real weights" if on_meta else 'use execution="auto"'
            if run.failure is not None and rules.can_assume(run.failure[0]):
                what += f", or give the op a size: assume={{{run.failure[0]!r}: ...}}"
            raise ExecutionError(f"{line}: {what}") from error


def _wants_numbers(error: Exception) -> bool:
    """Return whether an error comes of running by shapes: a number that is not there, or a shape rule."""
    said = ("data is not allocated yet", "no fake impl registered")
    return isinstance(error, (ValueNeeded, NotImplementedError)) or any(text in str(error) for text in said)


def _for_real(
    model: Model,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    stops_at: StopsAt,
    loss: Loss | None,
    stack: ExitStack,
    once: bool,
) -> Trace:
    reading = Reading(model)
    if isinstance(model, nn.Module) and _on_meta(reading):
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
    first = "composite" if loss is None else "core"
    try:
        return _Run(model, reading, args, kwargs, stops_at, first, loss).for_real()
    except Exception as error:
        vocabulary, eager = _another_way(error)
        if once or (vocabulary == first and not eager):
            _say_which_input(error, model, args, kwargs)
            raise
    if eager:
        stack.enter_context(_eager())
    return _Run(model, reading, args, kwargs, stops_at, vocabulary, loss).for_real()


def _impersonated(device: str | torch.device | None, homes: Sequence[torch.device]) -> torch.device:
    """Return the device that a shape run answers for: the one asked for, else the first real one, else the CPU."""
    if device is None:
        return next((home for home in homes if home.type != "meta"), torch.device("cpu"))
    asked = torch.device(device)
    if asked.type == "meta":
        raise ValueError("a shape run answers for a device that computes, such as 'cpu' or 'cuda', not for 'meta'")
    return asked if asked.type == "cpu" or asked.index is not None else torch.device(asked.type, 0)


def _eager() -> AbstractContextManager[None]:
    """Return a context in which compiled code runs eagerly.

    Without it, torch.compile meets the dispatch mode, marks the code as not to be compiled ever again, and refuses to
    run where a whole graph was asked for.
    """
    return torch.compiler.set_stance("force_eager")


class _Run:
    """One run of a model, in one vocabulary; the next attempt is another run."""

    def __init__(
        self,
        model: Model,
        reading: Reading,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        stops_at: StopsAt,
        vocabulary: str,
        loss: Loss | None,
        weigh: Weigh | None = None,
    ) -> None:
        self._model = model
        self._args = args
        self._kwargs = kwargs
        self._vocabulary = vocabulary
        self._loss = loss
        self._recorder = Recorder(stops_at, backward=vocabulary == "core", weigh=weigh)
        self._reading = reading
        self._modules = reading.tree
        self._gradients: list[tuple[torch.Tensor, torch.Tensor | None]] = []

    def for_real(self) -> Trace:
        """Return the Trace of a run with numbers."""
        for columns in (self._held(), self._inputs()):
            self._recorder.know(*columns[2:])
        with self._restored() as undo_log:
            with self._watched(RecordingMode(self._recorder, undo_log)):
                self._call(self._args, self._kwargs)
            return self._trace("real")

    def by_shapes(self, device: torch.device, homes: Sequence[torch.device], rules: ShapeRules) -> Trace:
        """Return the Trace of a run without numbers."""
        with self._restored() as undo_log:
            mode = ShapeMode(self._recorder, undo_log, device, homes, rules, nested=_shape_run_is_on())
            mode.reals.know(*self._held())
            mode.reals.know(*self._inputs())
            args, kwargs = self._args, self._kwargs
            if self._vocabulary == "core":
                args, kwargs = self._stand_in(mode, device)
            try:
                with self._watched(mode), nullcontext() if is_here(device) else OnThisMachine(device):
                    self._call(args, kwargs)
            finally:
                mode.close()
            if self.failure is not None:  # the model caught it, and took another path than it would have
                raise self.failure[2]
            about = {"device": str(device)}
            if rules.bounds:
                about["bounds"] = ", ".join(sorted(rules.bounds))
            if rules.supposed:
                about["supposed"] = ", ".join(f"{op}: {what}" for op, what in sorted(rules.supposed.items()))
            return self._trace("shapes", **about)

    @property
    def failure(self) -> tuple[str, str, Exception] | None:
        """The first thing that the run could not do: the op's name, the module's, and the error."""
        return self._recorder.failure

    def why_not(self, error: Exception) -> str:
        """Return in one line what a run by shapes could not do, and in which module."""
        if self.failure is not None:
            op, module, cause = self.failure
            return f"{op or 'a tensor'} in module {module!r} cannot be run by shapes ({_first_line(cause)})"
        return f"module {self._recorder.where(error)!r} cannot be run by shapes ({_first_line(error)})"

    def _trace(self, execution: str, **more: str) -> Trace:
        return self._recorder.trace(
            self._modules,
            {
                "torch": str(torch.__version__),
                "python": platform.python_version(),
                "vocabulary": self._vocabulary,
                "execution": execution,
                "inputs": ", ".join(describe_inputs(self._args, self._kwargs)),
                **more,
            },
        )

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

    def _stand_in(self, mode: ShapeMode, device: torch.device) -> tuple[Any, Any]:
        """Put shape tensors for the parameters and buffers on another device than the run's, and return such inputs.

        Autograd wants a gradient on the device of what it belongs to. The snapshot puts the modules' tensors back.
        """
        twins: dict[int, torch.Tensor] = {}

        def twin(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device == device or tensor.layout is not torch.strided:
                return tensor
            if id(tensor) not in twins:
                wraps = is_traceable_wrapper_subclass(tensor)
                twins[id(tensor)] = _wrap_again(tensor, twin) if wraps else mode.stand_in(tensor)
            return twins[id(tensor)]

        for module in self._reading.names:
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = twin(tensor)  # type: ignore[assignment]
            if isinstance(module, nn.RNNBase):
                module._flat_weights = [None if item is None else twin(item) for item in module._flat_weights]
        return pytree.tree_map_only(torch.Tensor, twin, (self._args, self._kwargs))

    @contextmanager
    def _watched(self, mode: RecordingMode | ShapeMode) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(module_scopes(self._recorder, self._reading))
            stack.enter_context(function_regions(self._recorder))
            stack.enter_context(open_control_flow(self._recorder, mode))
            if self._loss is not None:
                stack.enter_context(recompute_phase(self._recorder))
            if self._vocabulary == "composite":
                stack.enter_context(torch.no_grad())
                stack.enter_context(torch._C._AutoDispatchBelowAutograd())
            elif self._loss is not None:
                stack.enter_context(torch.enable_grad())
            stack.enter_context(mode)
            yield

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        model = self._model
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            # The wrapper's own forward scatters and synchronises; what is counted is the model in it.
            model = model.module
        elif isinstance(model, nn.Module):
            result = model(*args, **kwargs)
            self._go_back(result)
            return
        token = self._recorder.enter(self._recorder.region(Region("module", "")), (args, kwargs))
        result = model(*args, **kwargs)
        self._recorder.leave(token, result)
        self._go_back(result)

    def _go_back(self, result: Any) -> None:
        if self._loss is not None:
            loss = self._loss(result)
            # The snapshot knows the model's own; a function, or a module, may use others too.
            self._gradients += [(leaf, leaf.grad) for leaf in leaves_of(loss)]
            loss.backward()

    @contextmanager
    def _restored(self) -> Iterator[UndoLog]:
        snapshot = Snapshot(self._reading, (self._args, self._kwargs))
        undo_log = UndoLog()
        try:
            yield undo_log
        finally:
            try:
                undo_log.undo()
            finally:
                for leaf, gradient in self._gradients:
                    leaf.grad = gradient
                snapshot.restore()
                # Under a caller's autocast the run cast weights below autograd; its cache would hand them on.
                torch.clear_autocast_cache()


def _wrap_again(tensor: Any, twin: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return a wrapper (a DTensor, a quantised weight) like another, around other tensors."""
    names, context = tensor.__tensor_flatten__()
    held = {name: getattr(tensor, name) for name in names}
    inner = {name: twin(value) if isinstance(value, torch.Tensor) else value for name, value in held.items()}
    again = type(tensor).__tensor_unflatten__(inner, context, tensor.shape, tensor.stride())
    again.requires_grad_(tensor.requires_grad)
    again._is_param = isinstance(tensor, nn.Parameter)
    return again


def _shape_run_is_on() -> bool:
    return any(isinstance(mode, ShapeMode) for mode in _get_current_dispatch_mode_stack())


def _first_line(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _on_meta(reading: Reading) -> bool:
    kinds = zip(reading.metadata, reading.rows, strict=True)
    return {metadata.device.type for metadata, (_, _, kind, _) in kinds if kind == "parameter"} == {"meta"}


def _another_way(error: Exception) -> tuple[str, bool]:
    """Return the vocabulary in which a run that failed may succeed, and whether compiled functions must run eagerly.

    A model that uses autograd in its forward fails below autograd; ("composite", False) is what has failed already.
    """
    if "torch dispatch mode present" in str(error):
        return "composite", True
    files = (frame.filename.replace("\\", "/") for frame in traceback.extract_tb(error.__traceback__))
    says_so = isinstance(error, RuntimeError) and "grad" in str(error)
    uses_autograd = says_so or any("torch/autograd/" in file for file in files)
    return ("core" if uses_autograd else "composite"), False


def _say_which_input(error: Exception, model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
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
