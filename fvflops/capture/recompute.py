"""The recompute: a checkpointed forward that runs again inside the backward pass, told apart from both."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import checkpoint

from fvflops.capture.recorder import Recorder


@contextmanager
def recompute_phase(recorder: Recorder) -> Iterator[None]:
    """Tell a recorder of each forward that activation checkpointing runs again, for as long as the context lasts.

    What runs again belongs to the stack under which `checkpoint` was called. Without reentrancy it runs while a saved
    tensor is unpacked, so the hook for that is watched; with it, inside the backward of CheckpointFunction, of which
    only that node's own ops are the rerun, while the ops of the nodes made by it are a backward pass.
    """
    frame: Any = checkpoint._CheckpointFrame
    hook: Any = checkpoint._recomputation_hook
    function: Any = checkpoint.CheckpointFunction
    stacks: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
    make_frame, make_hook, go_back = frame.__init__, hook.__init__, function.backward

    def note_frame(self: Any, *args: Any, **kwargs: Any) -> None:
        make_frame(self, *args, **kwargs)
        if recorder.own_thread():
            stacks[self] = recorder.stack

    def note_hook(self: Any, frame: Any, *args: Any, **kwargs: Any) -> None:
        make_hook(self, frame, *args, **kwargs)
        self._fvflops_stack = stacks.get(frame())

    def enter(self: Any) -> Any:
        if self._fvflops_stack is not None and recorder.own_thread():
            self._fvflops_before = recorder.begin_rerun(self._fvflops_stack)
        return super(hook, self).__enter__()

    def leave(self: Any, *error: Any) -> Any:
        before = self.__dict__.pop("_fvflops_before", None)
        if before is not None:
            recorder.end_rerun(before)
        return super(hook, self).__exit__(*error)

    def go_back_on_stack(ctx: Any, *gradients: Any) -> Any:
        owner = recorder.owner_of(torch._C._current_autograd_node()) if recorder.own_thread() else None
        if owner is None:
            return go_back(ctx, *gradients)
        before, recorder.stack = recorder.stack, owner
        try:
            return go_back(ctx, *gradients)
        finally:
            recorder.stack = before

    frame.__init__, hook.__init__ = note_frame, note_hook
    hook.__enter__, hook.__exit__ = enter, leave
    function.backward = staticmethod(go_back_on_stack)
    try:
        yield
    finally:
        frame.__init__, hook.__init__ = make_frame, make_hook
        del hook.__enter__, hook.__exit__
        function.backward = staticmethod(go_back)
