"""The regions of autograd.Function: its `apply` is invisible to dispatch, so it is wrapped while a recording lasts."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd import function as autograd_function

from fvflops.capture.recorder import Recorder
from fvflops.trace import Region

_LOCK = threading.RLock()
_RECORDERS: list[Recorder] = []


@contextmanager
def function_regions(recorder: Recorder) -> Iterator[None]:
    """Record each `Function.apply` of this thread as a region for as long as the context lasts.

    The wrapper stands on the base class that `Function.apply` calls, so that an `apply` which a program took hold of
    when it was imported (`swish = Swish.apply`) is seen too.
    """
    base: Any = autograd_function._SingleLevelFunction
    with _LOCK:
        _RECORDERS.append(recorder)
        if len(_RECORDERS) == 1:
            base.apply = classmethod(_apply)
    try:
        yield
    finally:
        with _LOCK:
            _RECORDERS.remove(recorder)
            if not _RECORDERS:
                del base.apply


def _apply(cls: type, *args: Any, **kwargs: Any) -> Any:
    call = super(autograd_function._SingleLevelFunction, cls).apply  # type: ignore[misc]
    recorder = next((item for item in reversed(_RECORDERS) if item.own_thread()), None)
    if recorder is None:
        return call(*args, **kwargs)
    recorder.activate()
    token = recorder.enter(recorder.region(Region("function", cls.__name__)), (args, kwargs))
    try:
        result = call(*args, **kwargs)
    except BaseException as error:
        recorder.leave(token, None, error)
        raise
    recorder.leave(token, result)
    return result
