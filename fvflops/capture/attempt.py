"""One recorded run of a model, in shape or real execution, after which the model is restored."""

from __future__ import annotations

import platform
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fvflops.capture.instrument.autograd_use import AutogradUse
from fvflops.capture.instrument.backward import gradients_restored
from fvflops.capture.instrument.instrument import instrument
from fvflops.capture.instrument.patching import Patch, Wrapper
from fvflops.capture.instrument.probe import Probe
from fvflops.capture.model.model_index import ModelIndex
from fvflops.capture.model.read_module_tree import describe_inputs
from fvflops.capture.model.script_copy import copy_scripts
from fvflops.capture.real.real_mode import RecordingMode
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.capture.restore.forks import undone_in_child
from fvflops.capture.restore.restore import Snapshot, UndoLog
from fvflops.capture.restore.torch_state import model_runs
from fvflops.capture.shapes.cuda_kernels import cuda_choices
from fvflops.capture.shapes.data_parallel import reducers_restored
from fvflops.capture.shapes.device_emulation import MissingDeviceMode, missing_device_emulated
from fvflops.capture.shapes.metadata import Metadata, is_available, metadata_of, metadata_of_leaf
from fvflops.capture.shapes.rules.shape_rules import ShapeRules
from fvflops.capture.shapes.shape_mode import ShapeMode, in_shape_run
from fvflops.capture.shapes.shape_parameters import ShapeParameters
from fvflops.capture.shapes.survivors import describe_survivors, release
from fvflops.capture.unseen.draw_lines import DrawFinder
from fvflops.capture.unseen.export_patches import saved_exports
from fvflops.capture.unseen.fake_tensors import fake_execution, find_fake_mode
from fvflops.capture.unseen.unseen_work import UnseenWork
from fvflops.torch_internals import below_autograd, is_any_autocast_enabled, is_wrapper_subclass
from fvflops.trace import Region, Signature, StopsAt, Trace

Model = nn.Module | Callable[..., Any]
Loss = Callable[[Any], torch.Tensor]
CostEstimate = Callable[[Signature], int]
# Tensors that exist before a run: the tensors, their metadata, their storages, and the storages' rows of the Trace.
PreexistingTensors = tuple[
    Sequence[torch.Tensor], list[Metadata], list[torch.UntypedStorage], list[tuple[int, str, str, str]]
]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Arguments of `record_call`."""

    model: Model
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    stops_at: StopsAt
    loss: Loss | None
    estimate_cost: CostEstimate | None
    measure: Collection[str]
    lines: bool
    draws: DrawFinder
    autocast: AbstractContextManager[Any] | None = None


# Autocast casts no tensors on other devices than its own, such as weights on the meta device.
_AUTOCAST = Patch(torch.autocast, "__enter__")


def _call_before(action: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that performs an action and then what the function does."""

    def call(*args: Any) -> Any:
        action()
        return function(*args)

    return call


class Attempt:
    """One recorded run of a model.

    Its `op_set` is "composite" (ops as called, without autograd) or "core" (ops as decomposed by autograd). With
    `detect_autograd` the model's uses of autograd are recorded in `autograd`.
    """

    def __init__(self, request: Request, model_index: ModelIndex, op_set: str, *, detect_autograd: bool) -> None:
        self._model = request.model
        self._args = request.args
        self._kwargs = request.kwargs
        self._op_set = op_set
        self._loss = request.loss
        self._autocast = request.autocast or nullcontext()
        self._draws = request.draws
        self._snapshot: Snapshot | None = None
        probe = Probe(request.measure, next(iter(model_index.devices), None)) if request.measure else None
        self._recorder = Recorder(
            request.stops_at,
            backward=op_set == "core",
            estimate_cost=request.estimate_cost,
            probe=probe,
            lines=request.lines,
        )
        self._recorder.module_of_tensor = model_index.module_of_tensor() if request.loss is not None else {}
        self._recorder.register_storages(model_index.inner_storages, model_index.inner_rows)
        self._model_index = model_index
        self._modules = model_index.tree
        # A measured run is the script's own.
        self._scripts = copy_scripts(model_index.names) if model_index.has_scripts and probe is None else {}
        self._mode: weakref.ref[ShapeMode] | None = None
        self._detect_autograd = detect_autograd
        self.autograd = AutogradUse(self._recorder)

    def record_real(self) -> Trace:
        """Return the Trace in real execution."""
        for columns in (self._model_tensors(), self._input_tensors()):
            self._recorder.register_storages(*columns[2:])
        has_values = self._recorder.probe is None
        self._recorder.unseen = UnseenWork(self._recorder, has_values=has_values, runs_results=self._loss is None)
        self._recorder.unseen.watch(self._model_index.storages)
        fake_mode = find_fake_mode((*self._model_index.tensors, *tensors_of((self._args, self._kwargs))))
        with self._restored() as undo_log:
            with (
                fake_execution(fake_mode, (self._args, self._kwargs)) as (args, kwargs),
                self._grad_mode(),
                instrument(
                    self._recorder,
                    self._model_index,
                    RecordingMode(self._recorder, undo_log),
                    self._wrappers(undo_log),
                    training=self._loss is not None,
                    grad_mode=self._grad_mode,
                    scripts=self._scripts,
                ),
                model_runs(),
                self._draws.locating(self._recorder),
            ):
                copy_context().run(self._call, args, kwargs)
            return self._trace("real" if fake_mode is None else "fake")

    def record_shapes(self, device: torch.device, devices: Sequence[torch.device], rules: ShapeRules) -> Trace:
        """Return the Trace in shape execution."""
        with self._restored() as undo_log:
            mode = ShapeMode(self._recorder, undo_log, device, devices, rules, nested=in_shape_run())
            self._mode = weakref.ref(mode)
            if not is_available(device):
                mode.emulate_device = partial(MissingDeviceMode, device, under_autograd=False)
            mode.concrete.register(*self._model_tensors())
            mode.concrete.register(*self._input_tensors())
            self._recorder.unseen = UnseenWork(
                self._recorder, is_real=False, has_values=False, runs_results=self._loss is None
            )
            self._recorder.unseen.watch_inputs((self._args, self._kwargs))
            shape_parameters = ShapeParameters(mode)
            replace = partial(shape_parameters.replace_in, self._model_index, self._scripts.values())
            args, kwargs = self._args, self._kwargs
            wrappers = self._wrappers(undo_log)
            if self._op_set == "core" or is_any_autocast_enabled():
                replace()
            elif any(tensor.device != device for tensor in self._model_index.tensors):
                wrappers.append((_AUTOCAST, partial(_call_before, replace)))
            if self._op_set == "core" or any(tensor.is_meta for tensor in self._input_tensors()[0]):
                args, kwargs = shape_parameters.in_values((args, kwargs))
            try:
                with (
                    self._grad_mode(),
                    reducers_restored() if self._op_set == "core" else nullcontext(),
                    instrument(
                        *(self._recorder, self._model_index, mode, wrappers),
                        training=self._loss is not None,
                        grad_mode=self._grad_mode,
                        scripts=self._scripts,
                    ),
                    nullcontext()
                    if is_available(device)
                    else missing_device_emulated(device, under_autograd=self._op_set == "core"),
                    cuda_choices(device) if device.type == "cuda" and self._op_set == "core" else nullcontext(),
                    model_runs(),
                    self._draws.locating(self._recorder),
                ):
                    copy_context().run(self._call, args, kwargs)
            finally:
                mode.close()
            if self.failure is not None:  # caught by the model, which may have taken another branch
                raise self.failure[2]
            return self._trace("shapes", device=str(device), **rules.about())

    @property
    def failure(self) -> tuple[str, str, Exception] | None:
        """The first failure of the run: op name, module name, error."""
        return self._recorder.failure

    def describe_failure(self, error: Exception) -> str:
        """Return in one line which op shape execution cannot run, in which module."""
        return self._recorder.describe_failure(error)

    def forget_errors(self) -> None:
        """Discard errors: their frames keep this object and its tensors alive."""
        self._recorder.forget_errors()

    def release(self) -> str:
        """Remove shape tensors from objects that outlive the run; return in one line what still refers to some."""
        return describe_survivors(release(self._mode)) if self._mode is not None else ""

    def _trace(self, execution: str, **details: str) -> Trace:
        if self._snapshot is not None:
            self._draws.compare(self._snapshot, self._recorder)
        self._recorder.close()
        probe = self._recorder.probe
        return self._recorder.trace(
            self._modules,
            {
                "torch": str(torch.__version__),
                "python": platform.python_version(),
                "vocabulary": self._op_set,
                "execution": execution,
                "inputs": ", ".join(describe_inputs(self._args, self._kwargs)),
                **details,
                **({} if probe is None else probe.metadata()),
            },
        )

    @contextmanager
    def _grad_mode(self) -> Iterator[None]:
        with ExitStack() as stack:
            if self._op_set == "composite":
                stack.enter_context(torch.no_grad())
                stack.enter_context(below_autograd())
            elif self._loss is not None:
                stack.enter_context(torch.enable_grad())
            yield

    def _model_tensors(self) -> PreexistingTensors:
        model_index = self._model_index
        return model_index.tensors, model_index.metadata, model_index.storages, model_index.rows

    def _input_tensors(self) -> PreexistingTensors:
        tensors = [tensor for tensor in tensors_of((self._args, self._kwargs)) if metadata_of_leaf(tensor) is not None]
        metadata = [metadata_of(tensor) for tensor in tensors]
        storages = [tensor.untyped_storage() for tensor in tensors]
        rows = [
            (0 if is_wrapper_subclass(tensor) else storage.nbytes(), item.spec.device, "input", "")
            for tensor, storage, item in zip(tensors, storages, metadata, strict=True)
        ]
        return tensors, metadata, storages, rows

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        model = self._model
        synchronises = isinstance(model, nn.parallel.DistributedDataParallel) and self._loss is not None
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)) and not synchronises:
            # The wrapper's forward scatters its inputs; a forward pass counts the wrapped model.
            model = model.module
        elif isinstance(model, nn.Module):
            with self._autocast:
                result = model(*args, **kwargs)
            self._run_backward(result)
            return
        unseen_work = self._recorder.unseen
        if unseen_work is not None:
            unseen_work.enter((args, kwargs))
        token = self._recorder.enter(self._recorder.region(Region("module", "")), (args, kwargs))
        with self._autocast:
            result = model(*args, **kwargs)
        if unseen_work is not None:
            unseen_work.leave(result, model)
            unseen_work.finish(result, model)
        self._recorder.leave(token, result)
        self._run_backward(result)

    def _run_backward(self, result: Any) -> None:
        if self._loss is not None:
            with self._autocast:
                loss = self._loss(result)
            loss.backward()
        unseen_work = self._recorder.unseen
        if unseen_work is not None:
            unseen_work.unfinished.end()
            for array in () if self._snapshot is None else self._snapshot.changed_arrays():
                owners = (name for module, name in self._model_index.names.items() if _has_attribute(module, array))
                unseen_work.report_array(array, self._recorder.stack_at(next(owners, "")))

    @contextmanager
    def _restored(self) -> Iterator[UndoLog]:
        snapshot = Snapshot(self._model_index, (self._args, self._kwargs), (self._model, self._loss))
        undo_log = UndoLog()
        try:
            # The snapshot covers the model's gradients; its code may use others.
            with undone_in_child(snapshot.restore), nullcontext() if self._loss is None else gradients_restored():
                try:
                    self._snapshot = snapshot
                    yield undo_log
                finally:
                    self._snapshot = None
                    undo_log.undo()
        finally:
            try:
                snapshot.restore()
            finally:
                # Under a caller's autocast the run cast weights without autograd: the cache must not return those.
                torch.clear_autocast_cache()

    def _wrappers(self, undo_log: UndoLog) -> list[Wrapper]:
        return [
            *saved_exports(undo_log, self._recorder.fresh, self._recorder.is_recording_thread),
            *(self.autograd.wrappers() if self._detect_autograd else ()),
        ]


def _has_attribute(module: nn.Module, value: Any) -> bool:
    return any(item is value for item in vars(module).values())
