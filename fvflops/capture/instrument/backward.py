"""The backward passes: from which thread each is called, and which tensors get a gradient from it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch

from fvflops.capture.instrument.patching import Patch, Wrapping
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.restore.restore import leaves_of, restore_all
from fvflops.torch_internals import engine_run

# `Tensor.backward`, `torch.autograd.backward` and `torch.autograd.grad` all come down to it.
ENGINE_RUNS = Patch(*engine_run)


def backward_hooks(recorder: Recorder) -> list[Wrapping]:
    """Return what is to be wrapped so that a recorder knows each backward pass."""

    def around(original: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not recorder.is_recording_thread():
                return original(*args, **kwargs)
            recorder.thread_state().drop_ended_steps()
            recorder.note_autograd_nodes()
            recorder.owners.callers.append(get_ident())
            try:
                return original(*args, **kwargs)
            finally:
                recorder.owners.callers.pop()

        return run

    return [(ENGINE_RUNS, around)]


@contextmanager
def gradients_restored() -> Iterator[None]:
    """Put back, when the context ends, the gradients of all tensors that a backward pass in this thread reaches."""
    thread = get_ident()
    gradients: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def around(original: Any) -> Any:
        def run(roots: Any, *args: Any, **kwargs: Any) -> Any:
            if get_ident() == thread:
                for leaf in [leaf for root in roots if isinstance(root, torch.Tensor) for leaf in leaves_of(root)]:
                    gradients.setdefault(id(leaf), (leaf, leaf.grad))
            return original(roots, *args, **kwargs)

        return run

    with ENGINE_RUNS.wrapped(around):
        try:
            yield
        finally:
            restore_all(((_put_back, gradients.values()),))


def _put_back(state: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    leaf, gradient = state
    leaf.grad = gradient
