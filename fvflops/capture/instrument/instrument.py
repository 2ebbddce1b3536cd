"""Instrument a run: modules, functions, control flow, checkpoints, optimizers, threads, and all ops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from fvflops.capture.attention.decomposed import attention_pairs
from fvflops.capture.instrument.autograd_functions import function_regions
from fvflops.capture.instrument.backward import backward_hooks
from fvflops.capture.instrument.control_flow import run_control_flow
from fvflops.capture.instrument.graph_scopes import graph_scopes
from fvflops.capture.instrument.modules import module_scopes
from fvflops.capture.instrument.optimizers import optimizer_phase
from fvflops.capture.instrument.patching import Patch, Wrapper, wrapped
from fvflops.capture.instrument.recompute import recompute_phase
from fvflops.capture.instrument.storages import resized_storages
from fvflops.capture.instrument.threads import model_threads
from fvflops.capture.instrument.triton_launches import triton_launches
from fvflops.capture.model.model_index import ModelIndex
from fvflops.capture.model.script_copy import ScriptCopy
from fvflops.capture.real.real_mode import RecordingMode
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.restore import interrupts
from fvflops.capture.restore.forks import at_fork
from fvflops.capture.restore.torch_state import dispatch_mode_active
from fvflops.capture.shapes.offloading import offloaded_activations
from fvflops.capture.shapes.shape_mode import ShapeMode
from fvflops.capture.unseen.data_exports import data_exports
from fvflops.torch_internals import loaded_compiler


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
        with grad_mode(), mode.for_thread():
            yield

    wrappers = [
        *wrappers,
        *function_regions(recorder),
        *attention_pairs(recorder, mode),
        *run_control_flow(recorder, mode),
        *data_exports(recorder),
        *resized_storages(recorder),
        *model_threads(recorder, enter_thread),
        *triton_launches(recorder, mode),
        *graph_scopes(recorder, model_index),
    ]
    if isinstance(mode, ShapeMode) and mode.device.type != "cpu":
        wrappers += offloaded_activations()
    if training:
        wrappers += [*backward_hooks(recorder), *recompute_phase(recorder)]
    with (
        module_scopes(recorder, model_index, mode, scripts),
        wrapped(wrappers),
        optimizer_phase(recorder, prepare) if training else nullcontext(),
        dispatch_mode_active(mode),
    ):
        yield


@contextmanager
def compiler_disabled() -> Iterator[None]:
    """Run compiled code eagerly while the context lasts, including code compiled meanwhile.

    Otherwise torch.compile would find the dispatch mode, exclude the code from compilation permanently, and raise if a
    full graph is required.
    """
    if is_compiler_loaded():
        with _EAGER.forced_eager():
            yield
        return
    with ExitStack() as stack:

        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def compile_(*args: Any, **kwargs: Any) -> Any:
                was_loaded = is_compiler_loaded()
                compiled = original(*args, **kwargs)
                if not was_loaded and is_compiler_loaded():
                    with interrupts.deferred():
                        stack.enter_context(_EAGER.forced_eager())
                return compiled

            return compile_

        stack.enter_context(_COMPILE.wrapped(around))
        yield


class _Stance:
    """The process-wide stance of torch's compiler, "force_eager" while any of several overlapping users needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: set[object] = set()
        self._stance = ExitStack()

    @contextmanager
    def forced_eager(self) -> Iterator[None]:
        """Force eager mode while the context lasts."""
        user = object()
        try:
            with interrupts.deferred(), self._lock:
                if not self._users:
                    self._stance.enter_context(torch.compiler.set_stance("force_eager"))
                self._users.add(user)
            yield
        finally:
            with interrupts.deferred(), self._lock:
                if user in self._users:  # already removed in a forked child
                    self._users.remove(user)
                    if not self._users:
                        self._stance.close()

    def restore_in_child(self) -> None:
        """In a forked child, restore the stance."""
        self._lock = threading.Lock()
        self._users.clear()
        self._stance.close()


_EAGER = _Stance()
at_fork(_EAGER.restore_in_child)
_COMPILE = Patch(torch, "compile")


def is_compiler_loaded() -> bool:
    """Return whether the program may have compiled code, without loading the compiler, which takes seconds."""
    return loaded_compiler() is not None
