"""Record everything a program does with a model between start and stop."""

from __future__ import annotations

import platform
import sys
import threading
import weakref
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from fvflops.capture.compiler import compiler_disabled
from fvflops.capture.errors.model_errors import note_remedy
from fvflops.capture.instrument.backward import gradients_restored
from fvflops.capture.instrument.instrument import instrument
from fvflops.capture.instrument.optimizers import OptimizerSnapshot
from fvflops.capture.instrument.probe import Probe
from fvflops.capture.model.model_index import ModelIndex
from fvflops.capture.model.read_module_tree import unwrap_data_parallel
from fvflops.capture.model.script_copy import copy_scripts
from fvflops.capture.real.real_mode import RecordingMode
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.restore import interrupts
from fvflops.capture.restore.forks import undone_in_child
from fvflops.capture.restore.restore import Snapshot, UndoLog
from fvflops.capture.restore.torch_state import (
    TorchState,
    close_interrupted_contexts,
    function_mode_removed,
    restore_modes,
)
from fvflops.capture.run import (
    CostEstimate,
    ExecutionError,
    choose_device,
    needs_real_execution,
    suspend_outer_recordings,
)
from fvflops.capture.shapes.cuda_kernels import cuda_choices
from fvflops.capture.shapes.data_parallel import reducers_restored
from fvflops.capture.shapes.device_emulation import MissingDeviceMode
from fvflops.capture.shapes.metadata import is_available
from fvflops.capture.shapes.rules.assumptions import how_to_assume
from fvflops.capture.shapes.rules.shape_rules import ShapeRules
from fvflops.capture.shapes.shape_cache import trim_cache
from fvflops.capture.shapes.shape_mode import ShapeMode, in_shape_run
from fvflops.capture.shapes.shape_parameters import ShapeParameters
from fvflops.capture.shapes.survivors import describe_survivors, release
from fvflops.capture.unseen.draw_lines import DrawFinder
from fvflops.capture.unseen.export_patches import saved_exports
from fvflops.capture.unseen.fake_tensors import find_fake_mode
from fvflops.capture.unseen.unseen_work import UnseenWork
from fvflops.torch_internals import TorchDispatchMode, dispatch_mode_stack
from fvflops.trace import ModuleTree, StopsAt, Trace

EXECUTIONS = ("real", "shapes")
# Of longer runs only call counts are retained: this many events take about 100 MB.
_MAX_EVENTS = 1 << 18


class Session:
    """A recording from `start` to `stop`, in the starting thread and autograd's threads.

    `model` is a module or None; a data-parallel wrapper is unwrapped. With `execution` "real" the program runs as usual
    and its changes remain. With "shapes" nothing is computed, as in `record_call`, and enclosing recordings are paused;
    `stop` restores the model, the optimizers that took a step, `inputs`, and the objects that `code` uses. `kernels`
    is the kind of device whose kernels shape execution chooses, by default that of `device`; with "cuda", tensors on
    the CPU get CUDA's. `draws` finds draws from generators of Python and NumPy.
    """

    def __init__(
        self,
        model: nn.Module | None,
        *,
        stops_at: StopsAt,
        execution: str = "real",
        device: str | torch.device | None = None,
        kernels: str | torch.device | None = None,
        assume: Mapping[str, Any] | None = None,
        estimate_cost: CostEstimate | None = None,
        measure: Collection[str] = (),
        inputs: Any = (),
        code: Iterable[Any] = (),
        draws: DrawFinder | None = None,
    ) -> None:
        self._recorder: Recorder | None = None
        if execution not in EXECUTIONS:
            raise ValueError(f"execution must be one of {', '.join(EXECUTIONS)}; got {execution!r}")
        if not isinstance(model, (nn.Module, type(None))):
            raise TypeError(f"record needs a torch.nn.Module or None; got {type(model).__name__}: {model!r:.60}")
        if measure and execution != "real":
            raise ValueError(f"measure={measure!r} requires execution='real': shape execution computes nothing")
        if execution == "real" and (device is not None or assume is not None):
            raise ValueError('device= and assume= require execution="shapes"')
        if isinstance(model, nn.Module):
            model = unwrap_data_parallel(model)
        self._model: Any = model
        self._model_index: ModelIndex | None = None
        self._execution = execution
        self._stops_at = stops_at
        self._device = device
        self._kernels = None if kernels is None else torch.device(kernels)
        self._assume = assume
        self._estimate_cost = estimate_cost
        self._measure = measure
        self._inputs = inputs
        self._code = code
        self._draws = draws
        self._mode: weakref.ref[ShapeMode] | None = None
        self._stack = ExitStack()
        self._thread = 0
        self._modes: list[TorchDispatchMode] = []
        self._torch_state: TorchState | None = None
        self._rules: ShapeRules | None = None
        self._shape_parameters: ShapeParameters | None = None
        self._complete = True
        self._metadata: dict[str, str] = {}

    @property
    def modules(self) -> ModuleTree:
        """The model's module tree."""
        return (ModelIndex(self._model) if self._model_index is None else self._model_index).tree

    def start(self, created: WeakSet[torch.UntypedStorage] | None = None) -> None:
        """Start recording; a session can be started once.

        `created` are storages that earlier steps of the same program created, the `created` of its last session.
        """
        if self._recorder is not None:
            raise RuntimeError("a recording can be started only once: create another")
        trim_cache()
        model_index = self._model_index = ModelIndex(self._model)
        limit = _MAX_EVENTS if self._execution == "real" and not self._measure else None
        probe = Probe(self._measure, next(iter(model_index.devices), None)) if self._measure else None
        recorder = self._recorder = Recorder(
            self._stops_at, estimate_cost=self._estimate_cost, limit=limit, probe=probe
        )
        if created is not None:
            recorder.of_earlier_steps = created
        recorder.python_reads.is_program = not self._inputs
        recorder.has_modules = model_index.owner is not None
        recorder.module_of_tensor = model_index.module_of_tensor()
        recorder.register_storages(model_index.inner_storages, model_index.inner_rows)
        self._thread = threading.get_ident()
        with interrupts.deferred(), ExitStack() as stack:
            self._modes = dispatch_mode_stack()
            stack.callback(recorder.close)
            stack.enter_context(undone_in_child(recorder.pause))
            stack.enter_context(compiler_disabled())
            if self._execution == "real":
                recorder.register_storages(model_index.storages, model_index.rows)
                recorder.unseen = UnseenWork(recorder, has_values=probe is None)
                recorder.unseen.watch(model_index.storages)
                stack.enter_context(instrument(recorder, model_index, RecordingMode(recorder)))
            else:
                self._start_shapes(recorder, model_index, stack)
            self._stack = stack.pop_all()

    def _start_shapes(self, recorder: Recorder, model_index: ModelIndex, stack: ExitStack) -> None:
        if find_fake_mode(model_index.tensors) is not None:
            raise ExecutionError(
                "a model of FakeTensors, or in a FakeTensorMode, has no training step in shape execution: build it on "
                'the meta device, with torch.device("meta"), and count that outside the mode'
            )
        devices = list(model_index.devices)
        device = choose_device(self._device, devices)
        self._rules = ShapeRules(self._assume, exact=False, device=device)
        self._metadata["device"] = str(device)
        stack.enter_context(suspend_outer_recordings())
        self._torch_state = TorchState()
        snapshot, undo_log = Snapshot(model_index, self._inputs, self._code, program=not self._code), UndoLog()
        stack.callback(torch.clear_autocast_cache)
        stack.callback(snapshot.restore)
        if self._draws is not None:
            stack.callback(self._draws.compare, snapshot, recorder)
        stack.enter_context(undone_in_child(snapshot.restore))
        stack.callback(undo_log.undo)
        stack.enter_context(gradients_restored())
        stack.enter_context(reducers_restored())
        mode = ShapeMode(recorder, undo_log, device, devices, self._rules, nested=in_shape_run())
        self._mode = weakref.ref(mode)
        stack.callback(mode.close)
        recorder.unseen = UnseenWork(recorder, is_real=False, has_values=False)
        mode.concrete.register(model_index.tensors, model_index.metadata, model_index.storages, model_index.rows)
        scripts = copy_scripts(model_index.names) if model_index.has_scripts else {}
        self._shape_parameters = ShapeParameters(mode)
        self._shape_parameters.replace_in(model_index, scripts.values())
        states = OptimizerSnapshot(mode, self._shape_parameters)
        stack.callback(states.restore)
        stack.enter_context(undone_in_child(states.restore))
        stack.enter_context(
            instrument(
                *(recorder, model_index, mode, saved_exports(undo_log, recorder.fresh, recorder.is_recording_thread)),
                prepare=states.prepare,
                scripts=scripts,
            )
        )
        if not is_available(device):
            missing_device = MissingDeviceMode(device)
            mode.emulate_device = lambda: MissingDeviceMode(device, under_autograd=False)
            stack.enter_context(function_mode_removed(missing_device))
            stack.enter_context(missing_device.extended())
            missing_device.__enter__()
        kernels = self._kernels or device
        if kernels.type == "cuda":
            stack.enter_context(cuda_choices(kernels, for_cpu=device.type == "cpu"))
        if self._draws is not None:
            stack.enter_context(self._draws.locating(recorder))

    def stop(self, *, complete: bool = True) -> None:
        """Stop recording and restore; not `complete` if an exception ended the program.

        Raises ExecutionError if the program caught an error of shape execution: it may have taken another branch.
        """
        recorder = self._active_recorder()
        self.check_thread()
        self._complete = complete
        if complete and recorder.unseen is not None:
            recorder.unseen.unfinished.end()
        with interrupts.deferred():
            try:
                if not complete:
                    close_interrupted_contexts(sys.exc_info()[1])
                self._stack.close()
            finally:
                self._shape_parameters = None
                if self._torch_state is not None and not complete:
                    self._torch_state.restore()
                elif not complete:
                    restore_modes(self._modes)
        if self._rules is not None:
            self._metadata.update(self._rules.about())
            if recorder.failure is not None and complete:
                self._complete = False
                error = recorder.failure[2]
                raise ExecutionError(f"{recorder.describe_failure(error)}: use execution='real'") from error

    def abandon(self) -> None:
        """Close an unfinished recording, from any thread; contexts of the starting thread may stay open."""
        if self._recorder is not None and self._recorder.recording:
            with interrupts.deferred():
                self._recorder.pause()
                self._stack.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.abandon()

    def release(self, *, describe: bool = True) -> str:
        """Remove shape tensors from objects that outlive the run; return in one line what still refers to them.

        Only for callers that use none themselves: a program may go on with shape tensors that its run returned. Without
        `describe` it returns "".
        """
        self._stack = ExitStack()
        if self._recorder is not None:
            self._recorder.forget_errors()
        return describe_survivors(release(self._mode, describe=describe)) if self._mode is not None else ""

    def explain(self, error: BaseException) -> None:
        """Add the module and the remedy to the message of an error of shape execution, and to others as a note."""
        rules, recorder = self._rules, self._recorder
        failure = None if recorder is None else recorder.failure
        if rules is None or recorder is None or failure is None or not needs_real_execution(failure[2]):
            note_remedy(error)
        elif failure[2] is error and error.args:
            op, _, cause = failure
            remedy = 'use execution="real"'
            if rules.can_assume(op):
                remedy += f", or assume its output size or value: {how_to_assume(op)}"
            error.args = (f"{recorder.describe_failure(cause)}: {remedy}", *error.args[1:])

    def check_thread(self) -> None:
        """Raise RuntimeError outside the thread that started the recording."""
        if threading.get_ident() != self._thread:
            raise RuntimeError("a recording must be stopped in the thread that started it")

    @property
    def created(self) -> WeakSet[torch.UntypedStorage]:
        """Storages that the recorded code, or an earlier step, created, and that still exist after `stop`."""
        return WeakSet() if self._recorder is None else self._recorder.of_earlier_steps

    @property
    def length(self) -> int:
        """Number of events so far."""
        return self._active_recorder().length

    def pause(self) -> None:
        """Record nothing until `resume`."""
        self._active_recorder().pause()

    def resume(self) -> None:
        """Resume recording."""
        self._active_recorder().resume()

    @property
    def failure(self) -> tuple[str, str, Exception] | None:
        """The first failure of shape execution: op name, module name, error."""
        return self._active_recorder().failure

    def describe_failure(self, error: Exception) -> str:
        """Return in one line which op shape execution cannot run, in which module."""
        return self._active_recorder().describe_failure(error)

    def in_shapes(self, values: Any) -> Any:
        """Return nested values with shape tensors in place of tensors on other devices than the run's."""
        return values if self._shape_parameters is None else self._shape_parameters.in_values(values)

    def trace(self) -> Trace:
        """Return what was recorded; during the recording, the Trace so far, marked incomplete."""
        if self._recorder is None:
            raise RuntimeError("nothing has been recorded yet")
        metadata = {
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "vocabulary": "core",
            "execution": self._execution,
            **self._metadata,
        }
        if self._recorder.probe is not None:
            metadata |= self._recorder.probe.metadata()
        return self._recorder.trace(self.modules, metadata, complete=self._complete and not self._recorder.recording)

    def _active_recorder(self) -> Recorder:
        if self._recorder is None or not self._recorder.recording:
            raise RuntimeError("no recording is running")
        return self._recorder
