"""Wrap autograd's engine: record which thread calls a backward pass, and restore the gradients it changes."""

from __future__ import annotations

from collections.abc import Iterator
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


def backward_hooks(recorder: Recorder) -> list[Wrapper]:
    """Return the wrappers that record the calling thread of each backward pass."""

    def around(original: Any) -> Any:
        def run_engine(*args: Any, **kwargs: Any) -> Any:
            if not recorder.is_recording_thread():
                return original(*args, **kwargs)
            recorder.thread_state().drop_ended_steps()
            recorder.assign_autograd_nodes()
            recorder.owners.calling_threads.append(get_ident())
            try:
                return original(*args, **kwargs)
            finally:
                recorder.owners.calling_threads.pop()
                recorder.is_after_pass = recorder.has_modules

        return run_engine

    return [(ENGINE_RUNS, around)]


@contextmanager
def gradients_restored() -> Iterator[None]:
    """Restore at the end the gradients of all leaves of the backward passes that this thread calls."""
    thread = get_ident()
    gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def around(original: Any) -> Any:
        def run_engine(roots: Any, *args: Any, **kwargs: Any) -> Any:
            if get_ident() == thread:
                for leaf in [leaf for root in roots if isinstance(root, torch.Tensor) for leaf in leaves_of(root)]:
                    gradients.setdefault(id(leaf), (leaf, leaf.grad))
            return original(roots, *args, **kwargs)

        return run_engine

    with ENGINE_RUNS.wrapped(around):
        try:
            yield
        finally:
            restore_all(((_restore_gradient, gradients.values()),))


def _restore_gradient(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    leaf, gradient = state
    leaf.grad = gradient
