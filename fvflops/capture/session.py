"""Record a run between start and stop: a program, or one call of a model, in shape or real execution."""

from __future__ import annotations

import platform
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import copy_context
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer

from fvflops.capture.compiler import compiler_disabled
from fvflops.capture.errors.model_errors import note_remedy
from fvflops.capture.execution import (
    ExecutionError,
    before_autocast,
    choose_device,
    emulate_device,
    needs_real_execution,
    suspend_outer_recordings,
)
from fvflops.capture.instrument.autograd import AutogradUse, gradients_restored
from fvflops.capture.instrument.instrument import instrument
from fvflops.capture.instrument.optimizers import OptimizerSnapshot
from fvflops.capture.instrument.patching import Wrapper
from fvflops.capture.instrument.probe import Probe
from fvflops.capture.model.model_index import ModelIndex
from fvflops.capture.model.read_module_tree import describe_inputs, unwrap_data_parallel
from fvflops.capture.model.script_copy import ScriptCopy, copy_scripts
from fvflops.capture.model_call import CostEstimate, ModelCall, PreexistingTensors
from fvflops.capture.real_mode import RecordingMode
from fvflops.capture.recorder.python_reads import DrawFinder
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.capture.restore import interrupts
from fvflops.capture.restore.forks import undone, undone_in_child
from fvflops.capture.restore.restore import Snapshot, UndoLog
from fvflops.capture.restore.torch_state import TorchState, close_interrupted_contexts, model_runs, restore_modes
from fvflops.capture.shapes.data_parallel import reducers_restored
from fvflops.capture.shapes.rules.assumptions import can_be_assumed, how_to_assume
from fvflops.capture.shapes.rules.shape_rules import ShapeRules
from fvflops.capture.shapes.shape_cache import trim_cache
from fvflops.capture.shapes.shape_mode import ShapeMode, in_shape_run
from fvflops.capture.shapes.shape_parameters import ShapeParameters
from fvflops.capture.shapes.survivors import describe_survivors, release
from fvflops.capture.unseen.fake_tensors import fake_execution, find_fake_mode
from fvflops.capture.unseen.outside_calls import saved_exports
from fvflops.capture.unseen.unseen_work import UnseenWork
from fvflops.text import shown
from fvflops.torch_internals import TorchDispatchMode, dispatch_mode_stack, is_any_autocast_enabled
from fvflops.trace import ModuleTree, StopsAt, Trace

EXECUTIONS = ("real", "shapes")
# Longer runs of a program keep only call counts: this many events take about 100 MB.
_MAX_EVENTS = 1 << 18


@dataclass(eq=False, repr=False)
class Session:
    """A recording from `start` to `stop`, in the starting thread and autograd's threads.

    `model` is a module or None; a data-parallel wrapper is unwrapped. With `execution` "real" the program runs as usual
    and its changes remain. With "shapes" nothing is computed, as in `record_call`, and enclosing recordings are paused;
    `stop` restores the model, the optimizers that took a step, `inputs`, and the objects that `code` uses. `kernels` is
    the kind of device whose kernels shape execution chooses, by default `device`'s; with "cuda", tensors on the CPU get
    CUDA's. `draws` finds draws from generators of Python and NumPy. With a `call` the session records, by `record`,
    that call of the model, which may be a function; such sessions may share `model_index` and `rules`.
    """

    model: Any
    _: KW_ONLY
    stops_at: StopsAt
    execution: str = "real"
    device: str | torch.device | None = None
    kernels: str | torch.device | None = None
    assume: Mapping[str, Any] | None = None
    estimate_cost: CostEstimate | None = None
    measure: Collection[str] = ()
    lines: bool = False
    inputs: Any = ()
    code: Iterable[Any] = ()
    draws: DrawFinder | None = None
    call: ModelCall | None = None
    model_index: ModelIndex | None = None
    rules: ShapeRules | None = None

    def __post_init__(self) -> None:
        self._recorder: Recorder | None = None
        if self.execution not in EXECUTIONS:
            raise ValueError(f"execution must be one of {', '.join(EXECUTIONS)}; got {shown(self.execution)}")
        if self.call is not None:
            self.inputs, self.code = (self.call.args, self.call.kwargs), (self.model, self.call.loss)
        elif isinstance(self.model, nn.Module):
            self.model = unwrap_data_parallel(self.model)
        elif self.model is not None:
            kind = type(self.model).__name__
            raise TypeError(f"record needs a torch.nn.Module, a torch.nn.ModuleList of several, or None; got {kind}")
        if self.measure and self.execution != "real":
            raise ValueError(f"measure={self.measure!r} requires execution='real': shape execution computes nothing")
        if self.execution == "real" and (self.device is not None or self.assume is not None):
            raise ValueError('device= and assume= require execution="shapes"')
        self._op_set = "core" if self.call is None else self.call.op_set
        self._is_training = self.call is None or self.call.loss is not None
        self._mode: weakref.ref[ShapeMode] | None = None
        self._stack = ExitStack()
        self._thread = 0
        self._modes: list[TorchDispatchMode] = []
        self._torch_state: TorchState | None = None
        self._snapshot: Snapshot | None = None
        self._shape_parameters: ShapeParameters | None = None
        self._arguments: tuple[tuple[Any, ...], Mapping[str, Any]] = (), {}  # of the call, as the run needs them
        self._autograd: AutogradUse | None = None
        self._complete = True
        self._metadata: dict[str, str] = {}
        # Kept until the recording ends: a copy's constant, if freed earlier, would look like unseen work's result.
        self._scripts: Mapping[int, ScriptCopy] = {}

    @property
    def modules(self) -> ModuleTree:
        return self._index.tree

    @property
    def _index(self) -> ModelIndex:
        if self.model_index is None:
            self.model_index = ModelIndex(self.model)
        return self.model_index

    @property
    def first_autograd_use(self) -> str:
        """The first call by which the model used autograd, if the call detects that, "" for none."""
        return "" if self._autograd is None else self._autograd.first_use

    def start(self, created: WeakSet[torch.UntypedStorage] | None = None) -> None:
        """Start recording, once; `created` are the storages that earlier steps of the same program created."""
        if self._recorder is not None:
            raise RuntimeError("a recording can be started only once: create another")
        trim_cache()
        index, is_real = self._index, self.execution == "real"
        recorder = self._recorder = Recorder(
            self.stops_at,
            backward=self._op_set == "core",
            estimate_cost=self.estimate_cost,
            limit=_MAX_EVENTS if is_real and not self.measure and self.call is None else None,
            probe=Probe(self.measure, next(iter(index.devices), None)) if self.measure else None,
            lines=self.lines,
        )
        if created is not None:
            recorder.of_earlier_steps = created
        recorder.python_reads.is_program = not self.inputs
        recorder.has_modules = self.call is None and index.owner is not None
        if self._is_training:
            recorder.module_of_tensor = index.module_of_tensor()
        recorder.register_storages(index.inner_storages, index.inner_rows)
        self._thread = threading.get_ident()
        with interrupts.deferred(), ExitStack() as stack:
            self._modes = dispatch_mode_stack()
            if self.call is None:
                stack.callback(recorder.close)
            stack.enter_context(undone_in_child(recorder.pause))
            stack.enter_context(compiler_disabled())
            self._enter(recorder, index, stack)
            if self.draws is not None:
                stack.enter_context(self.draws.locating(recorder.python_reads))
            self._stack = stack.pop_all()

    def _enter(self, recorder: Recorder, index: ModelIndex, stack: ExitStack) -> None:
        """Enter the contexts of the recording; except in real execution of a program, the end undoes changes."""
        by_shapes = self.execution == "shapes"
        undo_log, wrappers = None, list[Wrapper]()
        if by_shapes and self.call is None:  # `record_call` does both for its calls
            stack.enter_context(suspend_outer_recordings())
            self._torch_state = TorchState()
        if by_shapes or self.call is not None:
            undo_log = self._save(recorder, index, stack)
            wrappers += saved_exports(undo_log, recorder.fresh, recorder.is_recording_thread)
            if index.has_scripts and recorder.probe is None:
                self._scripts = copy_scripts(index.names)
        if self.call is not None and self.call.detects_autograd:
            self._autograd = AutogradUse(recorder)
            wrappers += self._autograd.wrappers()
        mode: RecordingMode | ShapeMode
        prepare = None
        if by_shapes:
            assert undo_log is not None
            mode = self._make_shape_mode(recorder, index, stack, undo_log)
            prepare = self._enter_shapes(index, stack, mode, wrappers)
        else:
            mode = RecordingMode(recorder, self._enter_real(recorder, index, stack), undo_log)
        grad_mode = nullcontext if self.call is None else self.call.grad_mode
        stack.enter_context(grad_mode())
        stack.enter_context(
            instrument(
                *(recorder, index, mode, wrappers),
                training=self._is_training,
                prepare=prepare,
                grad_mode=grad_mode,
                scripts=self._scripts,
            )
        )
        if isinstance(mode, ShapeMode):
            kernels = mode.device if self.kernels is None else torch.device(self.kernels)
            emulate_device(mode, kernels, stack, under_autograd=self._op_set == "core")

    def _enter_real(self, recorder: Recorder, index: ModelIndex, stack: ExitStack) -> UnseenWork:
        for columns in self._preexisting(index):
            recorder.register_storages(*columns[2:])
        recorder.unseen = UnseenWork(recorder, has_values=recorder.probe is None, runs_results=not self._is_training)
        recorder.unseen.watch(index.storages)
        if self.call is not None:
            fake_mode = find_fake_mode((*index.tensors, *tensors_of(self.inputs)))
            self.execution = "real" if fake_mode is None else "fake"
            self._arguments = stack.enter_context(fake_execution(fake_mode, self.inputs))
        return recorder.unseen

    def _make_shape_mode(self, recorder: Recorder, index: ModelIndex, stack: ExitStack, undo_log: UndoLog) -> ShapeMode:
        if self.call is None and find_fake_mode(index.tensors) is not None:
            raise ExecutionError(
                "a model of FakeTensors, or in a FakeTensorMode, has no training step in shape execution: build it on "
                'the meta device, with torch.device("meta"), and count that outside the mode'
            )
        inputs = () if self.call is None else tensors_of(self.inputs)
        devices = list(dict.fromkeys([*(tensor.device for tensor in inputs), *index.devices]))
        device = choose_device(self.device, devices)
        if self.rules is None:
            self.rules = ShapeRules(self.assume, exact=False, device=device)
        self._metadata["device"] = str(device)
        mode = ShapeMode(recorder, undo_log, device, devices, self.rules, nested=in_shape_run())
        self._mode = weakref.ref(mode)
        stack.callback(mode.close)
        for columns in self._preexisting(index):
            mode.concrete.register(*columns)
        recorder.unseen = UnseenWork(recorder, is_real=False, has_values=False, runs_results=not self._is_training)
        if self.call is not None:
            recorder.unseen.watch_inputs(self.inputs)
        return mode

    def _enter_shapes(
        self, index: ModelIndex, stack: ExitStack, mode: ShapeMode, wrappers: list[Wrapper]
    ) -> Callable[[Optimizer], None] | None:
        """Give the run shape tensors for tensors on other devices; return a function that prepares an optimizer."""
        under_autograd = self._op_set == "core"
        parameters = self._shape_parameters = ShapeParameters(mode)
        replace = partial(parameters.replace_in, index, self._scripts.values())
        if under_autograd or is_any_autocast_enabled():
            replace()
        elif any(tensor.device != mode.device for tensor in index.tensors):
            wrappers.append(before_autocast(replace))
        if self.call is not None:
            has_meta = any(tensor.is_meta for tensor in self.call.tensors()[0])
            self._arguments = parameters.in_values(self.inputs) if under_autograd or has_meta else self.inputs
        if under_autograd:
            stack.enter_context(reducers_restored())
        if not self._is_training:
            return None
        optimizers = OptimizerSnapshot(mode, parameters)
        stack.enter_context(undone(optimizers.restore))
        return optimizers.prepare

    def _save(self, recorder: Recorder, index: ModelIndex, stack: ExitStack) -> UndoLog:
        """Save the state that the end of the stack restores; return the log of the storages that the run overwrites."""
        if self.call is not None:
            self._metadata["inputs"] = ", ".join(describe_inputs(*self.inputs))
        # A profile reads the version counters after the run, and restores them itself.
        self._snapshot = snapshot = Snapshot(
            index, self.inputs, self.code, program=not self.code, versions=not self.measure
        )
        undo_log = UndoLog()
        # Under a caller's autocast the run cast weights without autograd: the cache must not return these casts.
        stack.callback(torch.clear_autocast_cache)
        stack.callback(snapshot.restore)
        if self.call is not None:  # the call does not free what restoring frees
            stack.callback(recorder.close)
        if self.draws is not None:
            stack.callback(self.draws.compare, snapshot.generators, recorder.python_reads)
        stack.enter_context(undone_in_child(snapshot.restore))
        stack.callback(undo_log.undo)
        if self._is_training:  # the snapshot covers the model's gradients; its code may use others
            stack.enter_context(gradients_restored())
        return undo_log

    def _preexisting(self, index: ModelIndex) -> list[PreexistingTensors]:
        model_tensors = index.tensors, index.metadata, index.storages, index.rows
        return [model_tensors] if self.call is None else [model_tensors, self.call.tensors()]

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record while the context lasts."""
        self.start()
        complete = False
        try:
            yield
            complete = True
        finally:
            self.stop(complete=complete)

    def record(self) -> Trace:
        """Record the call of the model, restore, and return the Trace."""
        with self.recording():
            with model_runs():
                copy_context().run(self._call_model)
            failure = self.recorder.failure
            if failure is not None and self.execution == "shapes":
                raise failure[2]  # caught by the model, which may have taken another branch
        return self.trace()

    def _call_model(self) -> None:
        recorder, (args, kwargs) = self.recorder, self._arguments
        assert self.call is not None and self._snapshot is not None and recorder.unseen is not None
        self.call.run(self.model, recorder, args, kwargs)
        for array in self._snapshot.changed_arrays():  # the work of the module that owns it
            modules = self._index.names.items()
            owners = [name for module, name in modules if any(item is array for item in vars(module).values())]
            recorder.unseen.report_array(array, recorder.stack_at(owners[0] if owners else ""))

    def stop(self, *, complete: bool = True) -> None:
        """Stop recording and restore; not `complete` if an exception ended the program.

        Raises ExecutionError if the program caught an error of shape execution: it may have taken another branch.
        """
        recorder = self.recorder
        if not recorder.recording:
            raise RuntimeError("no recording is running")
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
                self._shape_parameters = self._snapshot = None
                self._arguments, self._scripts = ((), {}), {}
                if self._torch_state is not None and not complete:
                    self._torch_state.restore()
                elif not complete:
                    restore_modes(self._modes)
        if self.rules is not None:
            self._metadata.update(self.rules.about())
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
        """Remove shape tensors from objects that outlive the run; name in one line objects that keep some.

        Only for callers that use none themselves: a program may continue with shape tensors that its run returned.
        Without `describe` it returns "".
        """
        self._stack = ExitStack()
        if self._recorder is not None:
            self._recorder.forget_errors()
        return describe_survivors(release(self._mode, describe=describe)) if self._mode is not None else ""

    def explain(self, error: BaseException) -> None:
        """Add the module and the remedy to the message of an error of shape execution, and to others as a note."""
        failure = None if self._recorder is None else self._recorder.failure
        if failure is None or self.rules is None or not needs_real_execution(failure[2]):
            note_remedy(error)
        elif failure[2] is error and error.args:
            error.args = (self.describe_failure(failure[2], 'use execution="real"'), *error.args[1:])

    def describe_failure(self, error: Exception, remedy: str, *, assumes: str = "output size or value") -> str:
        """Return in one line which op shape execution cannot run, in which module, and the remedy."""
        failure = self.recorder.failure
        if failure is not None and can_be_assumed(failure[0]):
            remedy += f", or assume its {assumes}: {how_to_assume(failure[0])}"
        return f"{self.recorder.describe_failure(error)}: {remedy}"

    def check_thread(self) -> None:
        """Raise RuntimeError outside the thread that started the recording."""
        if threading.get_ident() != self._thread:
            raise RuntimeError("a recording must be stopped in the thread that started it")

    def in_shapes(self, values: Any) -> Any:
        """Return nested values with shape tensors in place of tensors on other devices than the run's."""
        return values if self._shape_parameters is None else self._shape_parameters.in_values(values)

    def trace(self) -> Trace:
        """Return the Trace; during the recording, the Trace so far, marked incomplete."""
        recorder = self.recorder
        metadata = {
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "vocabulary": self._op_set,
            "execution": self.execution,
            **self._metadata,
        }
        if recorder.probe is not None:
            metadata |= recorder.probe.metadata()
        return recorder.trace(self.modules, metadata, complete=self._complete and not recorder.recording)

    @property
    def has_started(self) -> bool:
        """Whether recording has started."""
        return self._recorder is not None

    @property
    def recorder(self) -> Recorder:
        if self._recorder is None:
            raise RuntimeError("nothing has been recorded yet")
        return self._recorder
