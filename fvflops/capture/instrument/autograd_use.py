"""Detect that a model's forward uses autograd in a run without autograd, where most uses fail silently."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any, cast

import torch

from fvflops.capture.instrument.backward import ENGINE_RUNS
from fvflops.capture.instrument.patching import Patch, Wrapper
from fvflops.capture.recorder.recorder import Recorder
from fvflops.torch_internals import grad_switch, peek_interpreter

# torch._C._set_grad_enabled: all switches of grad mode call it, also torch.enable_grad as a context or decorator.
_GRAD_SWITCH = Patch(*grad_switch)
_REQUIRES_GRAD_METHOD = Patch(torch.Tensor, "requires_grad_")
_REQUIRES_GRAD_FLAG = Patch(torch.Tensor, "requires_grad")

_DERIVATIVES = frozenset({"Grad", "Jvp"})


class AutogradUsed(BaseException):
    """The model switched grad mode on in a run without autograd.

    Not an Exception: a model that catches those would go on without gradients, possibly forever.
    """


class AutogradUse:
    """A model's use of autograd; `first_use` names the first call that uses it, "" for none."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.first_use = ""

    def wrappers(self) -> list[Wrapper]:
        """Return the wrappers that detect such calls; that of grad mode's switch raises AutogradUsed."""
        return [
            (_GRAD_SWITCH, self._around_switch),
            (_REQUIRES_GRAD_METHOD, self._around_method),
            (_REQUIRES_GRAD_FLAG, self._around_flag),
            (ENGINE_RUNS, self._around_engine),
        ]

    def _record_use(self, call: str) -> bool:
        """Record a call that uses autograd; False in unrecorded threads, and in derivatives of torch.func."""
        is_use = self._recorder.is_recording_thread() and not _in_derivative()
        if is_use and not self.first_use:
            self.first_use = call
        return is_use

    def _around_switch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def switch(enabled: bool) -> Any:
            # Raising in a thread of the model would end a worker that others wait for.
            if enabled and self._record_use("torch.enable_grad()") and get_ident() == self._recorder.thread:
                raise AutogradUsed
            return original(enabled)

        return switch

    def _around_method(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def requires_grad_(tensor: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
            if requires_grad:
                self._record_use("Tensor.requires_grad_()")
            return original(tensor, requires_grad)

        return requires_grad_

    def _around_flag(self, original: Any) -> Any:
        base: Any = cast(Any, torch.Tensor.__base__).requires_grad
        descriptor = original if isinstance(original, property) else base

        def set_flag(tensor: torch.Tensor, requires_grad: bool) -> None:
            if requires_grad:
                self._record_use("Tensor.requires_grad = True")
            descriptor.__set__(tensor, requires_grad)

        return property(descriptor.__get__, set_flag)

    def _around_engine(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run_engine(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except RuntimeError:  # the model may catch it
                self._record_use("a backward pass")
                raise

        return run_engine


def _in_derivative() -> bool:
    """Return whether torch.func is computing a derivative, which works in a run without autograd too."""
    interpreter = peek_interpreter()
    return interpreter is not None and interpreter.key().name in _DERIVATIVES
