"""The scope stack: a module's name is pushed when it is called, and popped when it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fvflops.capture.instrument.patching import Patch, wrapped
from fvflops.capture.model.model_index import ModelIndex
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.restore.forks import undone_in_child
from fvflops.capture.restore.torch_state import function_mode_goes
from fvflops.torch_internals import function_mode_stack, module_call

# Their forward takes a fused path, in which neither their submodules nor their products show, when no gradient is
# needed and no torch function mode is on. A mode that does nothing therefore keeps them on the path that training
# takes, and, unlike torch.backends.mha's switch, nobody else sees it.
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)

CALLS = Patch(*module_call)
_COMPILES = Patch(nn.Module, "compile")


class _Unfused(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        # A signal may have broken off what torch does with the stack of modes.
        stack = function_mode_stack()
        if stack and stack[-1] is self:
            super().__exit__(*error)


@contextmanager
def module_scopes(recorder: Recorder, reading: ModelIndex) -> Iterator[None]:
    """Push and pop the modules of a model for as long as the context lasts; what is inside a ScriptModule is not seen.

    The one method that every call of a module goes through is wrapped while it lasts: torch's hooks cost three times as
    much a call, do not see keyword arguments before it, and do not run for an exception such as KeyboardInterrupt.
    """
    compiled = [(module, call) for module in reading.modules if (call := module._compiled_call_impl) is not None]
    unfused = _Unfused()
    # What `module.compile()` does is put off until the context ends: it would take hold of the method as it is now.
    waiting: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []

    def put_off(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda module, *args, **kwargs: waiting.append((module, args, kwargs))

    def compile_again() -> None:
        for module, call in compiled:
            module._compiled_call_impl = call

    try:
        with (
            wrapped([(CALLS, partial(_around, recorder, reading, unfused)), (_COMPILES, put_off)]),
            function_mode_goes(unfused),
            undone_in_child(compile_again),
        ):
            try:
                for module, _ in compiled:
                    module._compiled_call_impl = None  # it holds the method as it was
                yield
            finally:
                compile_again()
    finally:
        for module, args, kwargs in waiting:
            module.compile(*args, **kwargs)


def _around(
    recorder: Recorder, reading: ModelIndex, unfused: _Unfused, original: Callable[..., Any]
) -> Callable[..., Any]:
    scripts = {name: module for module, name in reading.names.items() if isinstance(module, torch.jit.ScriptModule)}
    uncounted = {id(module): ops for module in scripts.values() if (ops := _unseen_ops(module))}
    unseen = recorder.unseen if recorder.unseen is not None and recorder.unseen.is_real else None
    fused = {id(module) for module in reading.modules if isinstance(module, _FUSED)}
    thread, enter, leave = recorder.thread, recorder.enter, recorder.leave
    regions = dict(zip(map(id, reading.modules), map(recorder.region, reading.regions), strict=True))
    for name, module in scripts.items():
        if name and name.rpartition(".")[0] in scripts:
            del regions[id(module)]

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        region = regions.get(id(module))
        if region is None or (get_ident() != thread and not recorder.is_recording_thread()):
            return original(module, *args, **kwargs)
        if unseen is not None:
            unseen.enter((args, kwargs))
        token = enter(region, (args, kwargs) if kwargs else args)
        try:
            if id(module) in fused:
                with unfused:
                    result = original(module, *args, **kwargs)
            else:
                result = original(module, *args, **kwargs)
        except BaseException as error:
            leave(token, None, error)
            raise
        if uncounted:
            for op in uncounted.get(id(module), ()):
                recorder.record_opaque_call(op)
        if unseen is not None:
            unseen.leave(result, getattr(module, "forward", None))
        if recorder.has_threads:
            recorder.own_graph(result, (args, kwargs))
        leave(token, result)
        return result

    return call


def _unseen_ops(module: torch.jit.ScriptModule) -> list[str]:
    """Return the ops that `torch.jit.optimize_for_inference` put where dispatch does not see them.

    A loop's body is listed once, since its graph does not say how often it runs.
    """

    def kinds(block: Any) -> Iterator[str]:
        for node in block.nodes():
            if node.kind().startswith("prim::mkldnn_"):
                yield node.kind()
            for inner in node.blocks():
                yield from kinds(inner)

    return list(kinds(module.inlined_graph)) if hasattr(module, "forward") else []
