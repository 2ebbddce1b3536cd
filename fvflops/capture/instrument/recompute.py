"""The recompute: a checkpointed forward that runs again inside the backward pass, told apart from both."""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils import checkpoint

from fvflops.capture.instrument.patching import Patch, Wrapping
from fvflops.capture.recorder.recorder import BEFORE, Recorder
from fvflops.torch_internals import CheckpointFrame, RecomputationHook, current_autograd_node

_MAKE_FRAME = Patch(CheckpointFrame, "__init__")
_MAKE_HOOK = Patch(RecomputationHook, "__init__")
_ENTER_HOOK = Patch(RecomputationHook, "__enter__")
_LEAVE_HOOK = Patch(RecomputationHook, "__exit__")
_GO_BACK = Patch(checkpoint.CheckpointFunction, "backward", staticmethod)


def recompute_phase(recorder: Recorder) -> list[Wrapping]:
    """Return what is to be wrapped so that a recorder knows each forward which activation checkpointing runs again.

    What runs again belongs to the stack under which `checkpoint` was called. Without reentrancy it runs while a saved
    tensor is unpacked, so the hook for that is watched; with it, inside the backward of CheckpointFunction: its own ops
    are the rerun, while those of the nodes made by it are a backward pass, and so is the addition of gradients that
    autograd does for its node.
    """
    called: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # by frame
    runs: weakref.WeakKeyDictionary[Any, tuple[int, Any]] = weakref.WeakKeyDictionary()  # by hook: where, and whence

    def make_frame(original: Any) -> Any:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            if recorder.is_recording_thread():
                called[self] = recorder.thread_state().stack

        return init

    def make_hook(original: Any) -> Any:
        def init(self: Any, frame: Any, *args: Any, **kwargs: Any) -> None:
            original(self, frame, *args, **kwargs)
            if recorder.is_recording_thread():
                stack = called.get(frame())
                runs[self] = recorder.stack_at(BEFORE) if stack is None else stack, None

        return init

    def enter_hook(original: Any) -> Any:
        def enter(self: Any) -> Any:
            if self in runs and recorder.is_recording_thread():
                runs[self] = runs[self][0], recorder.begin_rerun(runs[self][0])
                recorder.thread_state().reruns += 1
            return original(self)

        return enter

    def leave_hook(original: Any) -> Any:
        def leave(self: Any, *error: Any) -> Any:
            if self in runs and recorder.is_recording_thread():
                recorder.thread_state().reruns -= 1
                recorder.end_rerun(runs[self][1])
            return original(self, *error)

        return leave

    def go_back(original: Any) -> Any:
        def backward(ctx: Any, *gradients: Any) -> Any:
            if not recorder.is_recording_thread():
                return original(ctx, *gradients)
            before = recorder.begin_rerun(recorder.owner_of(current_autograd_node()))
            try:
                return original(ctx, *gradients)
            finally:
                recorder.end_rerun(before)

        return backward

    return [
        (_MAKE_FRAME, make_frame),
        (_MAKE_HOOK, make_hook),
        (_ENTER_HOOK, enter_hook),
        (_LEAVE_HOOK, leave_hook),
        (_GO_BACK, go_back),
    ]
