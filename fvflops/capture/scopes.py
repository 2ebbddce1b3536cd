"""The scope stack: module hooks that push a module's name when it is called and pop it when it returns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
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
        register_module_forward_hook(scopes.pop, with_kwargs=True, always_call=True),
    ]
    try:
        for module in names:
            if module._forward_hooks:
                # On nn.Module itself, because a ScriptModule refuses the method and yet runs the hook.
                late = scopes.pop_late(module)
                handles.append(nn.Module.register_forward_hook(module, late, with_kwargs=True, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
            # torch's own removal leaves this entry behind.
            torch_module._global_forward_hooks_with_kwargs.pop(handle.id, None)
        # torch runs no hook for an exception that is no Exception, such as KeyboardInterrupt.
        while scopes.modes:
            scopes.modes.pop().__exit__(None, None, None)


class _Scopes:
    """What to do when a module is called and when it returns."""

    def __init__(self, recorder: Recorder, names: Mapping[nn.Module, str]) -> None:
        self.modes: list[_Unfused] = []
        self._recorder = recorder
        self._thread = recorder.thread
        self._late: set[nn.Module] = set()
        scripts = {name: module for module, name in names.items() if isinstance(module, torch.jit.ScriptModule)}
        self._unseen: dict[nn.Module, list[str]] = {module: _unseen_ops(module) for module in scripts.values()}
        self._regions = {
            module: recorder.region("module", name)
            for module, name in names.items()
            if not (scripts and name and name in scripts and name.rpartition(".")[0] in scripts)
        }

    def push(self, module: nn.Module, args: Any) -> None:
        """Take what torch gives a global hook before a call."""
        region = self._regions.get(module)
        if region is not None and get_ident() == self._thread:
            self._recorder.enter(region, args, module)
            if isinstance(module, _FUSED):
                self.modes.append(_Unfused())
                self.modes[-1].__enter__()

    def pop(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """Take what torch gives a global hook: keyword arguments and result, or for an exception the result alone."""
        if get_ident() == self._thread and (not self._late or module not in self._late):
            kwargs, result = rest if len(rest) == 2 else (None, None)
            self._pop(module, kwargs, result, sys.exc_info()[1] if len(rest) == 1 else None)

    def pop_late(self, module: nn.Module) -> Callable[..., None]:
        """Return the hook that pops a module after its own hooks have run."""
        self._late.add(module)
        outer_error = sys.exc_info()[1]

        def pop(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            if get_ident() == self._thread:
                error = sys.exc_info()[1]
                self._pop(module, kwargs, result, None if error is outer_error else error)

        return pop

    def _pop(self, module: nn.Module, kwargs: Any, result: Any, error: BaseException | None) -> None:
        token = self._recorder.token_of(module)
        if token < 0:
            return
        if self.modes and isinstance(module, _FUSED):
            self.modes.pop().__exit__(None, None, None)
        if self._unseen:
            for op in self._unseen.get(module, ()):
                self._recorder.call_unseen(op)
        self._recorder.leave(token, result, error, kwargs)


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
