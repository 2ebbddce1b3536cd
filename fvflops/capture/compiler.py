"""Run code as written during a recording: compiled code eagerly, and TorchScript without its optimisations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from fvflops.capture.instrument.patching import Patch, Wrapper
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.restore import interrupts
from fvflops.capture.restore.forks import at_fork, undone_in_child
from fvflops.capture.restore.import_guard import imports_unrecorded
from fvflops.capture.restore.torch_state import modes_removed
from fvflops.torch_internals import loaded_compiler, nested_constant, optimizes_scripts, set_script_optimization


@contextmanager
def compiler_disabled() -> Iterator[None]:
    """Run compiled code eagerly while the context lasts, including code compiled meanwhile, and keep imports out of it.

    Otherwise torch.compile would find the dispatch mode, exclude the code from compilation permanently, and raise if a
    full graph is required. The compiler, whose import takes seconds, is not imported here: where a model does, as the
    first call of flex_attention does too, eager mode begins with that import.
    """
    is_forced = False
    with ExitStack() as stack:

        def force_eager() -> None:
            nonlocal is_forced
            if not is_forced and loaded_compiler() is not None:
                is_forced = True
                stack.enter_context(_EAGER.forced_eager())

        force_eager()
        stack.enter_context(imports_unrecorded(force_eager))
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


_CALL = Patch(torch.jit.ScriptFunction, "__call__")
_NESTED_CONSTANT = None if nested_constant is None else Patch(*nested_constant)


def fresh_scripts(recorder: Recorder) -> Wrapper:
    """Discard what TorchScript's executor made of a function in earlier calls, at its first call in a recording.

    From the second or third call of a function on, the executor replaces ops.
    """
    fresh: dict[int, Any] = {}

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(function: Any, /, *args: Any, **kwargs: Any) -> Any:
            if recorder.is_recording_thread() and id(function) not in fresh:
                fresh[id(function)] = function
                function._debug_flush_compilation_cache()
            return original(function, *args, **kwargs)

        return call

    return _CALL, around


def unrecorded_constants() -> list[Wrapper]:
    """Return the wrapper that keeps a constant out of recordings that torch makes for the first nested tensor."""

    def around(original: Callable[..., Any]) -> Callable[..., Any]:
        def make() -> Any:
            with modes_removed():
                return original()

        return make

    return [] if _NESTED_CONSTANT is None else [(_NESTED_CONSTANT, around)]


@contextmanager
def scripts_unoptimized() -> Iterator[None]:
    """Switch off the optimisation of TorchScript in this thread while the context lasts."""
    was_optimized = optimizes_scripts()
    set_script_optimization(False)
    with undone_in_child(lambda: set_script_optimization(was_optimized)):
        try:
            yield
        finally:
            set_script_optimization(was_optimized)
