"""Record the phase "recompute": checkpointed forwards that run again inside the backward pass."""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils import checkpoint

from fvflops.capture.instrument.patching import Patch, Wrapper
from fvflops.capture.recorder.recorder import BEFORE, Recorder
from fvflops.torch_internals import CheckpointFrame, RecomputationHook, current_autograd_node

_MAKE_FRAME = Patch(CheckpointFrame, "__init__")
_MAKE_HOOK = Patch(RecomputationHook, "__init__")
_ENTER_HOOK = Patch(RecomputationHook, "__enter__")
_LEAVE_HOOK = Patch(RecomputationHook, "__exit__")
_RERUN_BACKWARD = Patch(checkpoint.CheckpointFunction, "backward", staticmethod)


def recompute_phase(recorder: Recorder) -> list[Wrapper]:
    """Return the wrappers that record each forward rerun by activation checkpointing.

    A rerun belongs to the stack under which `checkpoint` was called. Non-reentrant checkpoints rerun while a saved
    tensor is unpacked, by a hook, which is wrapped. Re-entrant ones rerun inside the backward of CheckpointFunction:
    ops there are recompute, except those of the nodes that the rerun creates and of gradient accumulation for its node.
    """
    # Frame → stack of the checkpoint call.
    checkpoint_stacks: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
    reruns: weakref.WeakKeyDictionary[Any, tuple[int, Any]] = weakref.WeakKeyDictionary()  # hook → (stack, rerun token)

    def make_frame(original: Any) -> Any:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if recorder.is_recording_thread():
                checkpoint_stacks[self] = recorder.thread_state().stack

        return init

    def make_hook(original: Any) -> Any:
        def init(self: Any, frame: Any, *args: Any, **kwargs: Any) -> None:
            original(self, frame, *args, **kwargs)
            if recorder.is_recording_thread():
                stack = checkpoint_stacks.get(frame())
                reruns[self] = recorder.stack_at(BEFORE) if stack is None else stack, None

        return init

    def enter_hook(original: Any) -> Any:
        def enter(self: Any) -> Any:
            if self in reruns and recorder.is_recording_thread():
                reruns[self] = reruns[self][0], recorder.begin_rerun(reruns[self][0])
                recorder.thread_state().reruns += 1
            return original(self)

        return enter

    def leave_hook(original: Any) -> Any:
        def leave(self: Any, *error: Any) -> Any:
            if self in reruns and recorder.is_recording_thread():
                recorder.thread_state().reruns -= 1
                recorder.end_rerun(reruns[self][1])
            return original(self, *error)

        return leave

    def rerun_backward(original: Any) -> Any:
        def backward(ctx: Any, *gradients: Any) -> Any:
            if not recorder.is_recording_thread():
                return original(ctx, *gradients)
            token = recorder.begin_rerun(recorder.owner_of(current_autograd_node()))
            try:
                return original(ctx, *gradients)
            finally:
                recorder.end_rerun(token)

        return backward

    return [
        (_MAKE_FRAME, make_frame),
        (_MAKE_HOOK, make_hook),
        (_ENTER_HOOK, enter_hook),
        (_LEAVE_HOOK, leave_hook),
        (_RERUN_BACKWARD, rerun_backward),
    ]
