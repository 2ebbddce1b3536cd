"""Record calls of autograd.Function as regions: `apply` does not dispatch, so it is wrapped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from torch.autograd import Function
from torch.autograd.function import FunctionMeta

from fvflops.capture.instrument.patching import Patch, Wrapper, calling
from fvflops.capture.recorder.recorder import Recorder
from fvflops.torch_internals import function_apply
from fvflops.trace import Region


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
    """Base of Functions that stand in for an op with autograd: their calls are no regions."""


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
