"""The scope stack: module hooks that push a module's name when it is called and pop it when it returns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from fvflops.capture.recorder import Recorder

# Their forward takes a fused path, in which neither their submodules nor their products show, when no gradient is
# needed and no torch function mode is on. A mode that does nothing therefore keeps them on the path that training
# takes, and, unlike torch.backends.mha's switch, nobody else sees it.
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


class _Unfused(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def module_scopes(recorder: Recorder, names: Mapping[nn.Module, str]) -> Iterator[None]:
    """Hook each module for as long as the context lasts; a ScriptModule is hooked, what is inside it is not."""
    handles = []
    modes: list[_Unfused] = []
    scripts = {name for module, name in names.items() if isinstance(module, torch.jit.ScriptModule)}
    try:
        for module, name in names.items():
            inside_script = bool(name) and name in scripts and name.rpartition(".")[0] in scripts
            if not inside_script:
                handles.extend(_hook(module, name, recorder, modes))
        yield
    finally:
        for handle in handles:
            handle.remove()
        # torch runs no hook for an exception that is no Exception, such as KeyboardInterrupt.
        while modes:
            modes.pop().__exit__(None, None, None)


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


def _hook(module: nn.Module, name: str, recorder: Recorder, modes: list[_Unfused]) -> list[Any]:
    calls: list[tuple[int, BaseException | None]] = []
    fused = isinstance(module, _FUSED)
    unseen = _unseen_ops(module) if isinstance(module, torch.jit.ScriptModule) else []

    def push(_: nn.Module, args: Any, kwargs: Any) -> None:
        if recorder.own_thread():
            calls.append((recorder.enter("module", name, (args, kwargs)), sys.exc_info()[1]))
            if fused:
                modes.append(_Unfused())
                modes[-1].__enter__()

    def pop(_: nn.Module, args: Any, result: Any) -> None:
        if recorder.own_thread() and calls:
            if fused:
                modes.pop().__exit__(None, None, None)
            for op in unseen:
                recorder.call_unseen(op)
            token, outer_error = calls.pop()
            error = sys.exc_info()[1]
            recorder.leave(token, result, raised=error is not None and error is not outer_error)

    # Called on nn.Module itself, because a ScriptModule refuses the methods and yet runs the hooks.
    return [
        nn.Module.register_forward_pre_hook(module, push, prepend=True, with_kwargs=True),
        nn.Module.register_forward_hook(module, pop, always_call=True),
    ]
