"""Instrument a run: modules, functions, control flow, checkpoints, optimizers, threads, and all ops."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch.optim import Optimizer

from fvflops.capture.attention.decomposed import attention_pairs
from fvflops.capture.compiler import fresh_scripts, scripts_unoptimized, unrecorded_constants
from fvflops.capture.instrument.autograd_functions import function_regions
from fvflops.capture.instrument.backward import backward_hooks
from fvflops.capture.instrument.control_flow import run_control_flow
from fvflops.capture.instrument.graph_scopes import graph_scopes
from fvflops.capture.instrument.modules import module_scopes
from fvflops.capture.instrument.optimizers import optimizer_phase
from fvflops.capture.instrument.patching import Wrapper, wrapped
from fvflops.capture.instrument.recompute import recompute_phase
from fvflops.capture.instrument.storages import resized_storages
from fvflops.capture.instrument.threads import model_threads
from fvflops.capture.instrument.triton_launches import triton_launches
from fvflops.capture.model.model_index import ModelIndex
from fvflops.capture.model.script_copy import ScriptCopy
from fvflops.capture.real.real_mode import RecordingMode
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.restore.torch_state import dispatch_mode_active, dispatch_mode_in_thread
from fvflops.capture.shapes.offloading import offloaded_activations
from fvflops.capture.shapes.shape_mode import ShapeMode
from fvflops.capture.unseen.data_exports import data_exports
from fvflops.capture.unseen.other_processes import other_processes


@contextmanager
def instrument(
    recorder: Recorder,
    model_index: ModelIndex,
    mode: RecordingMode | ShapeMode,
    wrappers: Iterable[Wrapper] = (),
    *,
    training: bool = True,
    prepare: Callable[[Optimizer], None] | None = None,
    grad_mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
    scripts: Mapping[int, ScriptCopy] | None = None,
) -> Iterator[None]:
    """Record everything that runs in this thread while the context lasts; `wrappers` are added to the standard ones.

    `training`: record backward passes, including autograd's threads, and optimizer steps as separate phases. `prepare`
    is called with an optimizer before each of its steps. `grad_mode` creates a context with this thread's grad mode for
    threads that the model starts. `scripts` are those of `module_scopes`.
    """

    @contextmanager
    def enter_thread() -> Iterator[None]:
        with (
            grad_mode(),
            scripts_unoptimized() if as_written else nullcontext(),
            dispatch_mode_in_thread(mode.for_thread()),
        ):
            yield

    as_written = recorder.probe is None  # a measured run is the script's own

    wrappers = [
        *wrappers,
        *function_regions(recorder),
        *attention_pairs(recorder, mode),
        *run_control_flow(recorder, mode),
        *data_exports(recorder),
        *other_processes(recorder),
        *resized_storages(recorder),
        *model_threads(recorder, enter_thread),
        *triton_launches(recorder, mode),
        *graph_scopes(recorder, model_index),
        *unrecorded_constants(),
    ]
    if as_written:
        wrappers.append(fresh_scripts(recorder))
    if isinstance(mode, ShapeMode) and mode.device.type != "cpu":
        wrappers += offloaded_activations()
    if training:
        wrappers += [*backward_hooks(recorder), *recompute_phase(recorder)]
    with (
        module_scopes(recorder, model_index, mode, scripts),
        wrapped(wrappers),
        optimizer_phase(recorder, prepare) if training else nullcontext(),
        scripts_unoptimized() if as_written else nullcontext(),
        dispatch_mode_active(mode),
    ):
        yield
