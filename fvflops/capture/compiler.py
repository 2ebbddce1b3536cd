"""Run code as written during a recording: compiled code eagerly, imports unrecorded, TorchScript unoptimised."""

from __future__ import annotations

import gc
import sys
import zipimport
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ExtensionFileLoader, SourceFileLoader, SourcelessFileLoader
from threading import get_ident
from typing import Any

import torch

from fvflops.capture.instrument.patching import Patch, Shared, Wrapper, calling, wrapped
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.restore import interrupts
from fvflops.capture.restore.forks import undone
from fvflops.capture.restore.torch_state import modes_removed
from fvflops.torch_internals import (
    loaded_compiler,
    loaded_sharding_decompositions,
    nested_constant,
    optimizes_scripts,
    set_script_optimization,
)

_stance = ExitStack()
# The process-wide stance of torch's compiler.
_EAGER = Shared(lambda: _stance.enter_context(torch.compiler.set_stance("force_eager")), _stance.close)
# The functions that run the bodies of modules: of imports by any loader, and of Python's loaders, which may be called
# later or by a program.
_BODIES = (
    Patch(sys.modules["_frozen_importlib"], "_load_unlocked"),
    *(
        Patch(loader, "exec_module")
        for loader in (SourceFileLoader, SourcelessFileLoader, ExtensionFileLoader, zipimport.zipimporter)
    ),
)


@contextmanager
def compiler_disabled() -> Iterator[None]:
    """Run compiled code eagerly in the context, including code compiled in it, and leave imports unrecorded.

    Otherwise torch.compile would find the dispatch mode, exclude the code from compilation permanently, and raise if a
    full graph is required. The compiler, whose import takes seconds, is not imported here: if the model imports it, for
    example by its first call of flex_attention, eager mode begins with that import.

    A module's body runs once per process, whatever the model computes: its ops would be part of the first recording
    only, and its constants would have no values.
    """
    is_forced, importing = False, set[int]()  # threads
    with ExitStack() as stack:

        def force_eager() -> None:
            nonlocal is_forced
            if not is_forced and loaded_compiler() is not None:
                is_forced = True
                stack.enter_context(_EAGER.used())

        def run_body(original: Callable[..., Any], *args: Any) -> Any:
            thread = get_ident()
            if thread in importing:
                return original(*args)
            importing.add(thread)
            try:
                with modes_removed():
                    return original(*args)
            finally:
                importing.discard(thread)
                with interrupts.deferred():
                    force_eager()
                # Exceptions that an import handles leave frames in reference cycles, which keep the model's tensors.
                gc.collect(1)

        force_eager()
        stack.enter_context(wrapped([(patch, calling(run_body)) for patch in _BODIES]))
        yield


_CALL = Patch(torch.jit.ScriptFunction, "__call__")
_UNRECORDED = {} if nested_constant is None else {"nested": Patch(*nested_constant)}


def fresh_scripts(recorder: Recorder) -> Wrapper:
    """Discard TorchScript's optimised versions of a function at its first call in a recording.

    From a function's second or third call on, the executor replaces ops.
    """
    fresh: dict[int, Any] = {}

    def call(original: Callable[..., Any], function: Any, /, *args: Any, **kwargs: Any) -> Any:
        if id(function) not in fresh:
            fresh[id(function)] = function
            function._debug_flush_compilation_cache()
        return original(function, *args, **kwargs)

    return _CALL, calling(call, recorder.is_recording_thread)


def unrecorded_functions() -> list[Wrapper]:
    """Return the wrappers that exclude torch's own one-time work from recordings.

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
