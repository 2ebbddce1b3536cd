"""Record calls of autograd.Function and of backward passes, restore gradients, and detect uses of autograd."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from threading import get_ident
from typing import Any, cast

import torch
from torch.autograd import Function
from torch.autograd.function import FunctionMeta

from fvflops.capture.instrument.patching import Patch, Wrapper, calling
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.restore.restore import leaves_of, restore_all
from fvflops.torch_internals import engine_run, function_apply, grad_switch, peek_interpreter
from fvflops.trace import Region

# `Tensor.backward`, `torch.autograd.backward` and `torch.autograd.grad` all call it.
ENGINE_RUNS = Patch(*engine_run)
# Weak, so that a leaf of the run is freed as without a recording.
_Leaf = Callable[[], torch.Tensor | None]


def run_backward(recorder: Recorder, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a backward pass, and record the thread that calls it."""
    recorder.thread_state().drop_ended_steps()
    recorder.stack_and_phase()  # attributes the new autograd nodes
    recorder.calling_threads.append(get_ident())
    try:
        return original(*args, **kwargs)
    finally:
        recorder.calling_threads.pop()
        recorder.is_after_pass = recorder.has_modules


@contextmanager
def gradients_restored() -> Iterator[None]:
    """Restore at the end the gradients of all leaves of the backward passes that this thread calls."""
    thread = get_ident()
    gradients: dict[int, tuple[_Leaf, torch.Tensor | None]] = {}

    def run_engine(original: Callable[..., Any], roots: Any, *args: Any, **kwargs: Any) -> Any:
        if get_ident() == thread:
            for leaf in [leaf for root in roots if isinstance(root, torch.Tensor) for leaf in leaves_of(root)]:
                if id(leaf) not in gradients or gradients[id(leaf)][0]() is not leaf:
                    gradients[id(leaf)] = weakref.ref(leaf), leaf.grad
        return original(roots, *args, **kwargs)

    with ENGINE_RUNS.wrapped(calling(run_engine)):
        try:
            yield
        finally:
            restore_all(((_restore_gradient, gradients.values()),))


def _restore_gradient(state: tuple[_Leaf, torch.Tensor | None]) -> None:
    reference, gradient = state
    if (leaf := reference()) is not None:
        leaf.grad = gradient


# --- the use of autograd in a run without it, where most uses fail silently ---

# torch._C._set_grad_enabled: all switches of grad mode call it, also torch.enable_grad as a context or decorator.
_GRAD_SWITCH = Patch(*grad_switch)
_REQUIRES_GRAD_METHOD = Patch(torch.Tensor, "requires_grad_")
_REQUIRES_GRAD_FLAG = Patch(torch.Tensor, "requires_grad")

# Transforms of torch.func that compute a derivative, which works in a run without autograd too.
_DERIVATIVES = frozenset({"Grad", "Jvp"})


class AutogradUsed(BaseException):
    """The model switched grad mode on in a run without autograd.

    Not an Exception: a model that catches exceptions would continue without gradients, possibly forever.
    """


class AutogradUse:
    """A model's use of autograd; `first_use` names the first call that uses it, "" for none."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.first_use = ""

    def wrappers(self) -> list[Wrapper]:
        """Return the wrappers that detect such calls; the one of grad mode's switch raises AutogradUsed."""
        return [
            (_GRAD_SWITCH, calling(self._switch)),
            (_REQUIRES_GRAD_METHOD, calling(self._require_grad)),
            (_REQUIRES_GRAD_FLAG, self._around_flag),
            (ENGINE_RUNS, calling(self._run_engine)),
        ]

    def _record_use(self, call: str) -> bool:
        """Record a call that uses autograd; False in unrecorded threads, and in derivatives of torch.func."""
        interpreter = peek_interpreter()
        in_derivative = interpreter is not None and interpreter.key().name in _DERIVATIVES
        is_use = self._recorder.is_recording_thread() and not in_derivative
        if is_use and not self.first_use:
            self.first_use = call
        return is_use

    def _switch(self, original: Callable[..., Any], enabled: bool) -> Any:
        # Raising in a thread of the model would end a worker that others wait for.
        if enabled and self._record_use("torch.enable_grad()") and get_ident() == self._recorder.thread:
            raise AutogradUsed
        return original(enabled)

    def _require_grad(self, original: Callable[..., Any], tensor: torch.Tensor, requires_grad: bool = True) -> Any:
        if requires_grad:
            self._record_use("Tensor.requires_grad_()")
        return original(tensor, requires_grad)

    def _around_flag(self, original: Any) -> Any:
        base: Any = cast(Any, torch.Tensor.__base__).requires_grad
        descriptor = original if isinstance(original, property) else base

        def set_flag(tensor: torch.Tensor, requires_grad: bool) -> None:
            if requires_grad:
                self._record_use("Tensor.requires_grad = True")
            descriptor.__set__(tensor, requires_grad)

        return property(descriptor.__get__, set_flag)

    def _run_engine(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except RuntimeError:  # the model may catch it
            self._record_use("a backward pass")
            raise


class _ForwardPatch(Patch):
    """Patch of `forward` as it is looked up on a Function: a property of the metaclass, which precedes the class's."""

    def _inherited(self, receiver: Any, *args: Any, **kwargs: Any) -> Any:
        return next(vars(base)["forward"] for base in receiver.__mro__ if "forward" in vars(base)).__get__(
            None, receiver
        )


# An `apply` bound at import (`swish = Swish.apply`) is recorded too: the patched function is called by every `apply`.
# It is the base class's `apply`; where `apply` itself is torch's C function (torch 2.15), it is the class's `forward`.
_IS_PYTHON = isinstance(vars(Function)["apply"], classmethod)
_APPLY = Patch(*function_apply, as_attribute=classmethod)
_FORWARD = _ForwardPatch(FunctionMeta, "forward", as_attribute=property)


class UnrecordedFunction(Function):
    """Base of Functions that replace an op under autograd: their calls are not regions."""


def function_regions(recorder: Recorder) -> list[Wrapper]:
    """Return the wrappers that record each `Function.apply` as a region."""
    patch, function = (_APPLY, _apply) if _IS_PYTHON else (_FORWARD, _find_forward)
    return [(patch, calling(partial(function, recorder), recorder.is_recording_thread))]


def _apply(recorder: Recorder, original: Callable[..., Any], cls: type, /, *args: Any, **kwargs: Any) -> Any:
    if issubclass(cls, UnrecordedFunction):
        return original(cls, *args, **kwargs)
    recorder.activate()
    unseen_work = recorder.unseen if recorder.unseen is not None and recorder.unseen.is_real else None
    if unseen_work is not None:
        unseen_work.enter((args, kwargs))
    wanted = recorder.stops_at.values_of(f"prim::PythonOp.{cls.__name__}")
    token = recorder.enter(recorder.region(Region("function", cls.__name__)), (args, kwargs), wanted)
    try:
        result = original(cls, *args, **kwargs)
    except BaseException as error:
        recorder.leave(token, None, error)
        raise
    if unseen_work is not None:
        unseen_work.leave(result, getattr(cls, "forward", None))
    recorder.leave(token, result)
    return result


def _find_forward(recorder: Recorder, find: Callable[..., Any], cls: Any) -> Any:
    function = find(cls)
    if issubclass(cls, UnrecordedFunction):
        return function

    def run(_: type, *args: Any, **kwargs: Any) -> Any:
        recorder.own_last_node()  # `apply` has created the function's node already
        return function(*args, **kwargs)

    has_context = cls.setup_context is Function.setup_context  # as the first argument

    @wraps(function)  # torch reads its signature
    def forward(*args: Any, **kwargs: Any) -> Any:
        if has_context and (not args or type(args[0]) is not cls._backward_cls):
            return function(*args, **kwargs)  # called by the model, not by `apply`
        return _apply(recorder, run, cls, *args, **kwargs)

    return forward
