"""Wrap autograd's engine: record which thread calls a backward pass, and restore the gradients it changes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch

from fvflops.capture.instrument.patching import Patch, Wrapper
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.restore.restore import leaves_of, restore_all
from fvflops.torch_internals import engine_run

# `Tensor.backward`, `torch.autograd.backward` and `torch.autograd.grad` all call it.
ENGINE_RUNS = Patch(*engine_run)
# Weak, so that a leaf of the run is freed as without a recording.
_Leaf = Callable[[], torch.Tensor | None]


def backward_hooks(recorder: Recorder) -> list[Wrapper]:
    """Return the wrappers that record the calling thread of each backward pass."""

    def around(original: Any) -> Any:
        def run_engine(*args: Any, **kwargs: Any) -> Any:
            if not recorder.is_recording_thread():
                return original(*args, **kwargs)
            recorder.thread_state().drop_ended_steps()
            recorder.stack_and_phase()  # attributes the new autograd nodes
            recorder.calling_threads.append(get_ident())
            try:
                return original(*args, **kwargs)
            finally:
                recorder.calling_threads.pop()
                recorder.is_after_pass = recorder.has_modules

        return run_engine

    return [(ENGINE_RUNS, around)]


@contextmanager
def gradients_restored() -> Iterator[None]:
    """Restore at the end the gradients of all leaves of the backward passes that this thread calls."""
    thread = get_ident()
    gradients: dict[int, tuple[_Leaf, torch.Tensor | None]] = {}

    def around(original: Any) -> Any:
        def run_engine(roots: Any, *args: Any, **kwargs: Any) -> Any:
            if get_ident() == thread:
                for leaf in [leaf for root in roots if isinstance(root, torch.Tensor) for leaf in leaves_of(root)]:
                    if id(leaf) not in gradients or gradients[id(leaf)][0]() is not leaf:
                        gradients[id(leaf)] = weakref.ref(leaf), leaf.grad
            return original(roots, *args, **kwargs)

        return run_engine

    with ENGINE_RUNS.wrapped(around):
        try:
            yield
        finally:
            restore_all(((_restore_gradient, gradients.values()),))


def _restore_gradient(state: tuple[_Leaf, torch.Tensor | None]) -> None:
    reference, gradient = state
    if (leaf := reference()) is not None:
        leaf.grad = gradient
