"""The watching of a run: modules, functions, control flow, checkpoints and optimizers, and every op."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.optim import Optimizer

from fvflops.capture.instrument.autograd_functions import function_regions
from fvflops.capture.instrument.backward import backward_hooks
from fvflops.capture.instrument.control_flow import open_control_flow
from fvflops.capture.instrument.modules import module_scopes
from fvflops.capture.instrument.optimizers import optimizer_phase
from fvflops.capture.instrument.patching import Patch, Wrapping, wrapped
from fvflops.capture.instrument.recompute import recompute_phase
from fvflops.capture.instrument.threads import model_threads
from fvflops.capture.instrument.triton_launches import triton_launches
from fvflops.capture.model.model_index import ModelIndex
from fvflops.capture.real.real_mode import RecordingMode
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.restore.forks import at_fork
from fvflops.capture.restore.interrupts import deferred
from fvflops.capture.restore.torch_state import mode_is_on
from fvflops.capture.shapes.shape_mode import ShapeMode
from fvflops.capture.unseen.data_exports import data_exports
from fvflops.torch_internals import loaded_compiler


@contextmanager
def instrument(
    recorder: Recorder,
    reading: ModelIndex,
    mode: RecordingMode | ShapeMode,
    wrappings: Iterable[Wrapping] = (),
    *,
    training: bool = True,
    prepare: Callable[[Optimizer], None] | None = None,
    grad_mode: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[None]:
    """Let a recorder see what runs in this thread for as long as the context lasts, some `wrappings` beside its own.

    `training` says that backward passes, of which what runs in autograd's threads is seen too, and optimizers' steps
    are to be told apart; `prepare` is called with an optimizer before each of its steps. `grad_mode` makes the context
    in which a thread that the model starts runs, as this one does.
    """

    @contextmanager
    def enter_thread() -> Iterator[None]:
        with grad_mode(), mode.for_thread():
            yield

    wrappings = [
        *wrappings,
        *function_regions(recorder),
        *open_control_flow(recorder, mode),
        *data_exports(recorder),
        *model_threads(recorder, enter_thread),
        *triton_launches(recorder, mode),
    ]
    if training:
        wrappings += [*backward_hooks(recorder), *recompute_phase(recorder)]
    with (
        module_scopes(recorder, reading),
        wrapped(wrappings),
        optimizer_phase(recorder, prepare) if training else nullcontext(),
        mode_is_on(mode),
    ):
        yield


@contextmanager
def compiler_disabled() -> Iterator[None]:
    """Run compiled code eagerly for as long as the context lasts, what is compiled meanwhile too.

    Otherwise torch.compile meets the dispatch mode, marks the code as not to be compiled ever again, and refuses to run
    where a whole graph was asked for.
    """
    if is_compiler_loaded():
        with _EAGER.kept():
            yield
        return
    with ExitStack() as stack:

        def around(original: Callable[..., Any]) -> Callable[..., Any]:
            def compile_(*args: Any, **kwargs: Any) -> Any:
                loaded = is_compiler_loaded()
                compiled = original(*args, **kwargs)
                if not loaded and is_compiler_loaded():
                    with deferred():
                        stack.enter_context(_EAGER.kept())
                return compiled

            return compile_

        stack.enter_context(_COMPILE.wrapped(around))
        yield


class _Stance:
    """The one stance that torch's compiler has for all threads, kept eager by as many as want that, who may overlap."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keepers: set[object] = set()
        self._before = ExitStack()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep it eager as long as the context lasts."""
        keeper = object()
        try:
            with deferred(), self._lock:
                if not self._keepers:
                    self._before.enter_context(torch.compiler.set_stance("force_eager"))
                self._keepers.add(keeper)
            yield
        finally:
            with deferred(), self._lock:
                if keeper in self._keepers:  # a forked child has left
                    self._keepers.remove(keeper)
                    if not self._keepers:
                        self._before.close()

    def leave(self) -> None:
        """In a forked child, keep it eager for nobody."""
        self._lock = threading.Lock()
        self._keepers.clear()
        self._before.close()


_EAGER = _Stance()
at_fork(_EAGER.leave)
_COMPILE = Patch(torch, "compile")


def is_compiler_loaded() -> bool:
    """Return whether the program may have compiled code; to load the compiler takes seconds."""
    return loaded_compiler() is not None
