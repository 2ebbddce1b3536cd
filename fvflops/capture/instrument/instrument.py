"""Instrument a run: modules, functions, control flow, checkpoints, optimizers, threads, and all ops."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils import checkpoint

from fvflops.capture.compiler import fresh_scripts, scripts_unoptimized, unrecorded_functions
from fvflops.capture.decomposed_attention import attention_pairs
from fvflops.capture.instrument.autograd import ENGINE_RUNS, function_regions, run_backward
from fvflops.capture.instrument.control_flow import run_control_flow, triton_launches
from fvflops.capture.instrument.graph_scopes import graph_scopes
from fvflops.capture.instrument.modules import module_scopes
from fvflops.capture.instrument.optimizers import optimizer_phase
from fvflops.capture.instrument.patching import Patch, Wrapper, calling, wrapped
from fvflops.capture.instrument.threads import model_threads
from fvflops.capture.model.model_index import ModelIndex
from fvflops.capture.model.script_copy import ScriptCopy
from fvflops.capture.real_mode import RecordingMode
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.recorder.run_position import BEFORE
from fvflops.capture.restore.torch_state import dispatch_mode_active, dispatch_mode_in_thread
from fvflops.capture.shapes.device_emulation import offloaded_activations, skipped_device_calls
from fvflops.capture.shapes.shape_mode import ShapeMode
from fvflops.capture.unseen.outside_calls import outside_calls
from fvflops.torch_internals import CheckpointFrame, RecomputationHook, current_autograd_node

_RESIZE = Patch(torch.UntypedStorage, "resize_")


def _resize(recorder: Recorder, original: Callable[..., Any], storage: torch.UntypedStorage, nbytes: int) -> Any:
    """Resize a storage of real tensors, and record that; shape tensors record theirs."""
    result = original(storage, nbytes)
    if recorder.recording and not recorder.paused:
        recorder.record_resized(storage)
    return result


_CHECKPOINTS = (
    Patch(CheckpointFrame, "__init__"),
    *(Patch(RecomputationHook, name) for name in ("__init__", "__enter__", "__exit__")),
    Patch(checkpoint.CheckpointFunction, "backward", staticmethod),
)


def recompute_phase(recorder: Recorder) -> list[Wrapper]:
    """Return the wrappers that record each forward rerun by activation checkpointing.

    A rerun belongs to the stack under which `checkpoint` was called. Non-reentrant checkpoints rerun while a saved
    tensor is unpacked, by a hook, which is wrapped. Re-entrant ones rerun inside the backward of CheckpointFunction:
    ops there are recompute, except in the nodes that the rerun creates and in gradient accumulation for its node.
    """
    # Frame → stack of the checkpoint call.
    checkpoint_stacks: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
    reruns: weakref.WeakKeyDictionary[Any, tuple[int, Any]] = weakref.WeakKeyDictionary()  # hook → (stack, rerun token)

    def make_frame(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        checkpoint_stacks[self] = recorder.thread_state().stack

    def make_hook(original: Callable[..., Any], self: Any, frame: Any, *args: Any, **kwargs: Any) -> None:
        original(self, frame, *args, **kwargs)
        stack = checkpoint_stacks.get(frame())
        reruns[self] = (recorder.stack_at(BEFORE) if stack is None else stack, None)

    def enter_hook(original: Callable[..., Any], self: Any) -> Any:
        if self in reruns:
            reruns[self] = reruns[self][0], recorder.begin_rerun(reruns[self][0])
            recorder.thread_state().reruns += 1
        return original(self)

    def leave_hook(original: Callable[..., Any], self: Any, *error: Any) -> Any:
        if self in reruns:
            recorder.thread_state().reruns -= 1
            recorder.end_rerun(reruns[self][1])
        return original(self, *error)

    def rerun_backward(original: Callable[..., Any], ctx: Any, *gradients: Any) -> Any:
        token = recorder.begin_rerun(recorder.owner_of(current_autograd_node()))
        try:
            return original(ctx, *gradients)
        finally:
            recorder.end_rerun(token)

    functions: tuple[Callable[..., Any], ...] = make_frame, make_hook, enter_hook, leave_hook, rerun_backward
    return [
        (patch, calling(function, recorder.is_recording_thread))
        for patch, function in zip(_CHECKPOINTS, functions, strict=True)
    ]


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
    threads that the model starts. `scripts` are as for `module_scopes`.
    """

    @contextmanager
    def enter_thread() -> Iterator[None]:
        with (
            grad_mode(),
            scripts_unoptimized() if as_written else nullcontext(),
            dispatch_mode_in_thread(mode.for_thread()),
        ):
            yield

    as_written = recorder.probe is None  # measured runs keep torch's compiled and optimized code

    wrappers = [
        *wrappers,
        *function_regions(recorder),
        attention_pairs(recorder, mode.has_values),
        *run_control_flow(recorder, mode),
        *outside_calls(recorder),
        (_RESIZE, calling(partial(_resize, recorder))),
        *model_threads(recorder, enter_thread),
        *triton_launches(recorder, mode),
        *graph_scopes(recorder, model_index),
        *unrecorded_functions(),
    ]
    if as_written:
        wrappers += [fresh_scripts(recorder), *skipped_device_calls()]
    if isinstance(mode, ShapeMode) and mode.device.type != "cpu":
        wrappers.append(offloaded_activations())
    if training:
        backward = ENGINE_RUNS, calling(partial(run_backward, recorder), recorder.is_recording_thread)
        wrappers += [backward, *recompute_phase(recorder)]
    with (
        module_scopes(recorder, model_index, mode, scripts),
        wrapped(wrappers),
        optimizer_phase(recorder, prepare) if training else nullcontext(),
        scripts_unoptimized() if as_written else nullcontext(),
        dispatch_mode_active(mode),
    ):
        yield
