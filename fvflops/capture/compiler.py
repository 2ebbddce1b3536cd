"""Run code as written during a recording: compiled code eagerly, imports unrecorded, TorchScript unoptimised."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from fvflops.capture.instrument.patching import Patch, Shared, Wrapper, calling
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.restore.forks import undone
from fvflops.capture.restore.torch_state import modes_removed
from fvflops.torch_internals import (
    loaded_compiler,
    loaded_sharding_decompositions,
    nested_constant,
    optimizes_scripts,
    set_script_optimization,
)


@contextmanager
def compiler_disabled() -> Iterator[None]:
    """Run compiled code eagerly in the context, including code compiled in it, and leave imports unrecorded.

    Otherwise torch.compile would find the dispatch mode, exclude the code from compilation permanently, and raise if a
    full graph is required. The compiler, whose import takes seconds, is not imported here: if the model imports it, for
    example by its first call of flex_attention, eager mode begins with that import.
    """
    is_forced = False
    with ExitStack() as stack:

        def force_eager() -> None:
            nonlocal is_forced
            if not is_forced and loaded_compiler() is not None:
                is_forced = True
                stack.enter_context(_EAGER.used())

        force_eager()
        stack.enter_context(_IMPORTS.used(force_eager))
        yield


_stance = ExitStack()
# The process-wide stance of torch's compiler.
_EAGER = Shared(lambda: _stance.enter_context(torch.compiler.set_stance("force_eager")), _stance.close)


class _Finder(MetaPathFinder):
    """Find modules as Python does, and run their bodies without dispatch modes.

    A module's body runs once per process, whatever the model computes: its ops would be part of the first recording
    only, and its constants would have no values. Users are called after each outermost import.
    """

    def __init__(self) -> None:
        self._thread = threading.local()

    def install(self) -> None:
        sys.meta_path.insert(0, self)

    def uninstall(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        finders = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in finders)
        spec = next((spec for spec in specs if spec is not None), None)
        loader: Any = None if spec is None else spec.loader
        if hasattr(loader, "exec_module") and not isinstance(loader, type):  # classes load built-in modules

            def execute(module: ModuleType) -> None:
                vars(loader).pop("exec_module", None)
                self._execute(loader.exec_module, module)

            loader.exec_module = execute
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        if getattr(self._thread, "is_importing", False):
            execute(module)
            return
        self._thread.is_importing = True
        try:
            with modes_removed():
                execute(module)
        finally:
            self._thread.is_importing = False
            _IMPORTS.call_users()
            # Exceptions that an import handles leave frames in reference cycles, which keep the model's tensors alive.
            gc.collect(1)


_FINDER = _Finder()
_IMPORTS = Shared(_FINDER.install, _FINDER.uninstall)


_CALL = Patch(torch.jit.ScriptFunction, "__call__")
_UNRECORDED = {} if nested_constant is None else {"nested": Patch(*nested_constant)}


def fresh_scripts(recorder: Recorder) -> Wrapper:
    """Discard TorchScript's optimised versions of a function at its first call in a recording.

    From a function's second or third call on, the executor replaces ops.
    """
    fresh: dict[int, Any] = {}

    def call(original: Callable[..., Any], function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if recorder.is_recording_thread() and id(function) not in fresh:
            fresh[id(function)] = function
            function._debug_flush_compilation_cache()
        return original(function, *args, **kwargs)

    return _CALL, calling(call)


def unrecorded_functions() -> list[Wrapper]:
    """Return the wrappers that leave unrecorded what torch runs once per process, for itself.

    A constant for the first nested tensor, and an op's decomposition, from which DTensor finds how to shard the op.
    """

    def call(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        with modes_removed():
            return original(*args, **kwargs)

    if "sharding" not in _UNRECORDED and (module := loaded_sharding_decompositions()) is not None:
        _UNRECORDED["sharding"] = Patch(module.DecompShardingStrategy, "propagate_strategy")
    return [(patch, calling(call)) for patch in _UNRECORDED.values()]


@contextmanager
def scripts_unoptimized() -> Iterator[None]:
    """Switch off the optimisation of TorchScript in this thread while the context lasts."""
    was_optimized = optimizes_scripts()
    set_script_optimization(False)
    with undone(lambda: set_script_optimization(was_optimized)):
        yield
