"""The session: a recording of whatever a program does with a model while it lasts."""

from __future__ import annotations

import platform
import sys
import threading
import weakref
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from fvflops.capture.instrument.backward import gradients_restored
from fvflops.capture.instrument.instrument import compiler_disabled, instrument
from fvflops.capture.instrument.optimizers import OptimizerStates
from fvflops.capture.instrument.probe import Probe
from fvflops.capture.model.model import unwrap_compiled
from fvflops.capture.model.model_index import ModelIndex
from fvflops.capture.real.real_mode import RecordingMode
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.restore.forks import undone_in_child
from fvflops.capture.restore.interrupts import deferred
from fvflops.capture.restore.restore import Snapshot, UndoLog
from fvflops.capture.restore.torch_state import TorchState, end_contexts, function_mode_goes, put_back_modes
from fvflops.capture.run import ExecutionError, Weigh, choose_device, shape_run_is_on, suspend_outer_recordings
from fvflops.capture.shapes.cuda_kernels import cuda_choices
from fvflops.capture.shapes.data_parallel import reducers_kept
from fvflops.capture.shapes.device_emulation import MissingDeviceMode
from fvflops.capture.shapes.metadata import is_available
from fvflops.capture.shapes.rules import ShapeRules
from fvflops.capture.shapes.shape_cache import trim_cache
from fvflops.capture.shapes.shape_mode import ShapeMode
from fvflops.capture.shapes.shape_parameters import ShapeParameters
from fvflops.capture.shapes.survivors import release, say_kept
from fvflops.capture.unseen.export_patches import saved_exports
from fvflops.capture.unseen.fake_tensors import find_fake_mode
from fvflops.capture.unseen.unseen_work import UnseenWork
from fvflops.torch_internals import TorchDispatchMode, dispatch_mode_stack
from fvflops.trace import ModuleTree, StopsAt, Trace

EXECUTIONS = ("real", "shapes")
# Of a longer run only the numbers of calls are kept: so many events take some 100 MB.
_EVENTS = 1 << 18


class Session:
    """A recording that lasts from `start` to `stop`, in the thread that starts it and in autograd's.

    `model` is a module, whose wrapper for data parallelism is looked through, or None. `execution` is "real": the
    program runs as it would without, and what it changes stays changed; or "shapes": nothing is computed, as in
    `record_call`, recordings around this one see nothing of it, and at the end the model and the optimizers that took a
    step are as they were, and so are `inputs`, and what `code` uses.
    """

    def __init__(
        self,
        model: nn.Module | None,
        *,
        stops_at: StopsAt,
        execution: str = "real",
        device: str | torch.device | None = None,
        assume: Mapping[str, Any] | None = None,
        weigh: Weigh | None = None,
        measure: Collection[str] = (),
        inputs: Any = (),
        code: Iterable[Any] = (),
    ) -> None:
        self._recorder: Recorder | None = None
        if execution not in EXECUTIONS:
            raise ValueError(f"execution is one of {', '.join(EXECUTIONS)}, not {execution!r}")
        if not isinstance(model, (nn.Module, type(None))):
            raise TypeError(f"record takes a torch.nn.Module, or nothing, not {type(model).__name__}: {model!r:.60}")
        if measure and execution != "real":
            raise ValueError(f"measure={measure!r} is for a real run: by shapes nothing is computed")
        if execution == "real" and (device is not None or assume is not None):
            raise ValueError('device= and assume= are for a run by shapes: give execution="shapes" too')
        if isinstance(model, nn.Module):
            model = unwrap_compiled(model)
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = unwrap_compiled(model.module)
        self._reading = ModelIndex(model)  # type: ignore[arg-type]
        self._execution = execution
        self._stops_at = stops_at
        self._device = device
        self._assume = assume
        self._weigh = weigh
        self._measure = measure
        self._inputs = inputs
        self._code = code
        self._mode: weakref.ref[ShapeMode] | None = None
        self._stack = ExitStack()
        self._thread = 0
        self._modes: list[TorchDispatchMode] = []
        self._before: TorchState | None = None
        self._rules: ShapeRules | None = None
        self._stand_ins: ShapeParameters | None = None
        self._complete = True
        self._about: dict[str, str] = {}

    @property
    def modules(self) -> ModuleTree:
        """The model's module tree."""
        return self._reading.tree

    def start(self) -> None:
        """Record from now on; a session can be started once."""
        if self._recorder is not None:
            raise RuntimeError("a recording was begun a second time: make another")
        limit = _EVENTS if self._execution == "real" and not self._measure else None
        meter = Probe(self._measure, next(iter(self._reading.devices), None)) if self._measure else None
        recorder = self._recorder = Recorder(self._stops_at, weigh=self._weigh, limit=limit, meter=meter)
        recorder.module_of_tensor = self._reading.source_devices()
        self._thread = threading.get_ident()
        with deferred(), ExitStack() as stack:
            self._modes = dispatch_mode_stack()
            stack.callback(recorder.close)
            stack.enter_context(undone_in_child(recorder.pause))
            stack.enter_context(compiler_disabled())
            if self._execution == "real":
                recorder.register_storages(self._reading.storages, self._reading.rows)
                recorder.unseen = UnseenWork(recorder, numbers=meter is None)
                stack.enter_context(instrument(recorder, self._reading, RecordingMode(recorder)))
            else:
                self._start_shapes(recorder, stack)
            self._stack = stack.pop_all()

    def _start_shapes(self, recorder: Recorder, stack: ExitStack) -> None:
        reading = self._reading
        if find_fake_mode(reading.tensors) is not None:
            raise ExecutionError(
                "a model of FakeTensors, or in a FakeTensorMode, has no training step by shapes: build it on the meta "
                'device, with torch.device("meta"), and count that outside the mode'
            )
        homes = list(reading.devices)
        device = choose_device(self._device, homes)
        trim_cache()
        self._rules = ShapeRules(self._assume, exact=False, device=device)
        self._about["device"] = str(device)
        stack.enter_context(suspend_outer_recordings())
        self._before = TorchState()
        snapshot, undo_log = Snapshot(reading, self._inputs, self._code, program=not self._code), UndoLog()
        stack.callback(torch.clear_autocast_cache)
        stack.callback(snapshot.restore)
        stack.enter_context(undone_in_child(snapshot.restore))
        stack.callback(undo_log.undo)
        stack.enter_context(gradients_restored())
        stack.enter_context(reducers_kept())
        mode = ShapeMode(recorder, undo_log, device, homes, self._rules, nested=shape_run_is_on())
        self._mode = weakref.ref(mode)
        stack.callback(mode.close)
        recorder.unseen = UnseenWork(recorder, is_real=False, numbers=False)
        mode.reals.register(reading.tensors, reading.metadata, reading.storages, reading.rows)
        self._stand_ins = ShapeParameters(mode)
        self._stand_ins.put_into(reading)
        states = OptimizerStates(mode, self._stand_ins)
        stack.callback(states.restore)
        stack.enter_context(undone_in_child(states.restore))
        stack.enter_context(
            instrument(recorder, reading, mode, saved_exports(undo_log, recorder.fresh), prepare=states.prepare)
        )
        if not is_available(device):
            elsewhere = MissingDeviceMode(device)
            stack.enter_context(function_mode_goes(elsewhere))
            elsewhere.__enter__()
        if device.type == "cuda":
            stack.enter_context(cuda_choices(device))

    def stop(self, *, complete: bool = True) -> None:
        """Record no more, and leave no trace; `complete` says that the program came to its end.

        A run by shapes in which the program caught the error of something that cannot be run by shapes, and so took
        another way than it would have, raises ExecutionError.
        """
        recorder = self._running()
        self.check_thread()
        self._complete = complete
        with deferred():
            try:
                if not complete:
                    end_contexts(sys.exc_info()[1])
                self._stack.close()
            finally:
                self._stand_ins = None
                if self._before is not None and not complete:
                    self._before.restore()
                elif not complete:
                    put_back_modes(self._modes)
        if self._rules is not None:
            self._about.update(self._rules.about())
            if recorder.failure is not None and complete:
                self._complete = False
                error = recorder.failure[2]
                raise ExecutionError(f"{recorder.why_not(error)}: record for real") from error

    def abandon(self) -> None:
        """End a recording that nobody ends; of what the thread holds in which it was begun, another can end nothing."""
        if self._recorder is not None and self._recorder.recording:
            with deferred():
                self._recorder.pause()
                self._stack.close()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.abandon()

    def release(self) -> str:
        """Take the tensors of a run by shapes that is over out of what keeps them; return in one line what still does.

        That is for a caller who has let go of them: a program may go on with those that its run gave it.
        """
        self._stack = ExitStack()
        return say_kept(release(self._mode)) if self._mode is not None else ""

    def explain(self, error: BaseException) -> None:
        """Add to the error of what cannot be run by shapes in which module that is, and what to do."""
        if self._rules is None or self._recorder is None or self._recorder.failure is None or not error.args:
            return
        op, _, cause = self._recorder.failure
        if cause is error:
            what = 'record for real (execution="real")'
            if self._rules.can_assume(op):
                what += f", or give the op a size or a value: assume={{{op!r}: ...}}"
            error.args = (f"{self._recorder.why_not(cause)}: {what}", *error.args[1:])

    def check_thread(self) -> None:
        """Raise RuntimeError in any other thread than that in which the recording was begun, and is to end."""
        if threading.get_ident() != self._thread:
            raise RuntimeError("a recording ends in the thread in which it was begun")

    @property
    def length(self) -> int:
        """How many events there are so far."""
        return self._running().length

    def pause(self) -> None:
        """Take nothing down until `resume`."""
        self._running().pause()

    def resume(self) -> None:
        """Take down what happens from now on."""
        self._running().resume()

    @property
    def failure(self) -> tuple[str, str, Exception] | None:
        """The first thing that a run by shapes could not do: the op's name, the module's, and the error."""
        return self._running().failure

    def why_not(self, error: Exception) -> str:
        """Return in one line what a run by shapes could not do, and in which module."""
        return self._running().why_not(error)

    def in_shapes(self, values: Any) -> Any:
        """Return nested values with shape tensors in the place of tensors on another device than the run's."""
        return values if self._stand_ins is None else self._stand_ins.in_values(values)

    def trace(self) -> Trace:
        """Return what was recorded; of a recording that goes on, what there is so far, as incomplete."""
        if self._recorder is None:
            raise RuntimeError("nothing is recorded yet")
        about = {
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "vocabulary": "core",
            "execution": self._execution,
            **self._about,
        }
        if self._recorder.probe is not None:
            about |= self._recorder.probe.about()
        return self._recorder.trace(self._reading.tree, about, complete=self._complete and not self._recorder.recording)

    def _running(self) -> Recorder:
        if self._recorder is None or not self._recorder.recording:
            raise RuntimeError("no recording goes on")
        return self._recorder
