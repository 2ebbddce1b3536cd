"""The scope stack: module hooks that push a module's name when it is called and pop it when it returns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
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
    """Push and pop the modules in `names` for as long as the context lasts; what is inside a ScriptModule is not seen.

    The hooks are torch's global ones: two for the process instead of two for each module. A global hook does not see
    keyword arguments before the call, and it pops before a module's own hooks run; so a module that has hooks of its
    own gets the popping one at their end.
    """
    scopes = _Scopes(recorder, names)
    handles: list[Any] = [
        register_module_forward_pre_hook(scopes.push),
        register_module_forward_hook(scopes.pop_global, with_kwargs=True, always_call=True),
    ]
    try:
        for module in names:
            if module._forward_hooks:
                scopes.late.add(module)
                # On nn.Module itself, because a ScriptModule refuses the method and yet runs the hook.
                handles.append(
                    nn.Module.register_forward_hook(module, scopes.pop, with_kwargs=True, always_call=True)
                )
        yield
    finally:
        for handle in handles:
            handle.remove()
        # torch runs no hook for an exception that is no Exception, such as KeyboardInterrupt.
        while scopes.modes:
            scopes.modes.pop().__exit__(None, None, None)


class _Scopes:
    """The modules that are being called, outermost first, and what to do when one is called or returns."""

    def __init__(self, recorder: Recorder, names: Mapping[nn.Module, str]) -> None:
        self.modes: list[_Unfused] = []
        self.late: set[nn.Module] = set()
        self._recorder = recorder
        self._calls: list[tuple[nn.Module, int, BaseException | None]] = []
        scripts = {name for module, name in names.items() if isinstance(module, torch.jit.ScriptModule)}
        self._unseen = {
            module: _unseen_ops(module) for module, name in names.items() if isinstance(module, torch.jit.ScriptModule)
        }
        self._regions = {
            module: recorder.region("module", name)
            for module, name in names.items()
            if not (scripts and name and name in scripts and name.rpartition(".")[0] in scripts)
        }

    def push(self, module: nn.Module, args: Any) -> None:
        region = self._regions.get(module)
        if region is not None and self._recorder.own_thread():
            self._calls.append((module, self._recorder.enter(region, args), sys.exc_info()[1]))
            if isinstance(module, _FUSED):
                self.modes.append(_Unfused())
                self.modes[-1].__enter__()

    def pop_global(self, module: nn.Module, args: Any, *rest: Any) -> None:
        if module not in self.late:
            self.pop(module, args, *rest)

    def pop(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """Take keyword arguments and result, or the result alone where torch calls the hook for an exception."""
        if not self._recorder.own_thread():
            return
        position = len(self._calls) - 1
        while position >= 0 and self._calls[position][0] is not module:
            position -= 1
        if position < 0:
            return
        _, token, outer_error = self._calls[position]
        del self._calls[position:]
        if isinstance(module, _FUSED):
            self.modes.pop().__exit__(None, None, None)
        if module in self._unseen:
            for op in self._unseen[module]:
                self._recorder.call_unseen(op)
        error = sys.exc_info()[1]
        kwargs = rest[0] if len(rest) == 2 else None
        self._recorder.leave(token, rest[-1], None if error is outer_error else error, kwargs)


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
