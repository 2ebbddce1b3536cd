"""Record calls of autograd.Function as regions: `apply` does not dispatch, so it is wrapped."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fvflops.capture.instrument.patching import Patch, Wrapping
from fvflops.capture.recorder.recorder import Recorder
from fvflops.torch_internals import function_apply
from fvflops.trace import Region

# Patched on the base class that `Function.apply` calls, so that an `apply` bound at import (`swish = Swish.apply`)
# is recorded too.
_APPLY = Patch(*function_apply, as_attribute=classmethod)


def function_regions(recorder: Recorder) -> list[Wrapping]:
    """Return the wrappings that record each `Function.apply` as a region."""
    return [(_APPLY, partial(_around, recorder))]


def _around(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not recorder.is_recording_thread():
            return original(cls, *args, **kwargs)
        recorder.activate()
        unseen = recorder.unseen
        if unseen is not None and not unseen.is_real:
            unseen = None
        if unseen is not None:
            unseen.enter((args, kwargs))
        token = recorder.enter(recorder.region(Region("function", cls.__name__)), (args, kwargs))
        try:
            result = original(cls, *args, **kwargs)
        except BaseException as error:
            recorder.leave(token, None, error)
            raise
        if unseen is not None:
            unseen.leave(result, getattr(cls, "forward", None))
        recorder.leave(token, result)
        return result

    return apply
