"""Detect that a forward uses autograd, while it runs below autograd, where most such uses fail without an error."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from fvflops.capture.instrument.backward import ENGINE_RUNS
from fvflops.capture.instrument.patching import Patch, Wrapping
from fvflops.capture.recorder.recorder import Recorder
from fvflops.torch_internals import TensorBase, TransformType, grad_switch, peek_interpreter

# Grad mode is switched on by nothing but this, also by torch.enable_grad, as a context and as a decorator.
_SWITCHES = Patch(*grad_switch)
_REQUESTS = Patch(torch.Tensor, "requires_grad_")
_FLAGS = Patch(torch.Tensor, "requires_grad")

_DERIVATIVES = frozenset({TransformType.Grad, TransformType.Jvp})


class AutogradUsed(BaseException):
    """A run below autograd has come to where the model switches grad mode on.

    It is no Exception: a model that catches those would go on without gradients, and might do so for ever.
    """


class AutogradUse:
    """What was seen of a model's use of autograd; `seen` says what was called first, or is empty."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.seen = ""

    def wrappings(self) -> list[Wrapping]:
        """Return what is to be wrapped to detect it; where the model switches grad mode on, AutogradUsed is raised."""
        return [
            (_SWITCHES, self._around_switch),
            (_REQUESTS, self._around_request),
            (_FLAGS, self._around_flag),
            (ENGINE_RUNS, self._around_engine),
        ]

    def _note(self, what: str) -> bool:
        """Return whether a call that switches autograd on is the model's, in this thread, and note the first such."""
        is_use = self._recorder.is_recording_thread() and not _in_derivative()
        if is_use and not self.seen:
            self.seen = what
        return is_use

    def _around_switch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def switch(enabled: bool) -> Any:
            # In a thread of the model's own it would end a worker that others wait for.
            if enabled and self._note("torch.enable_grad()") and get_ident() == self._recorder.thread:
                raise AutogradUsed
            return original(enabled)

        return switch

    def _around_request(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def requires_grad_(tensor: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
            if requires_grad:
                self._note("Tensor.requires_grad_()")
            return original(tensor, requires_grad)

        return requires_grad_

    def _around_flag(self, original: Any) -> Any:
        own: Any = TensorBase.requires_grad
        descriptor = original if isinstance(original, property) else own

        def put(tensor: torch.Tensor, requires_grad: bool) -> None:
            if requires_grad:
                self._note("Tensor.requires_grad = True")
            descriptor.__set__(tensor, requires_grad)

        return property(descriptor.__get__, put)

    def _around_engine(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            except RuntimeError:  # the model may catch it
                self._note("a backward pass")
                raise

        return run


def _in_derivative() -> bool:
    """Return whether torch.func takes a derivative just now: it does so below autograd too."""
    interpreter = peek_interpreter()
    return interpreter is not None and interpreter.key() in _DERIVATIVES
