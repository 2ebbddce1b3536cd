"""Record launches of Triton kernels, direct ones and those of torch's wrapper, by the kernel's name and arguments."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any, Protocol

from fvflops.capture.instrument.patching import Patch, Wrapping
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.recorder.signature import OpSchema, tensors_of
from fvflops.capture.recorder.source_lines import find_source_line

# The classes whose `run` launches a kernel, by module; that of heuristics only adds arguments, and calls another.
_LAUNCHERS = (
    ("triton.runtime.jit", "JITFunction"),
    ("triton.runtime.interpreter", "InterpretedFunction"),
    ("triton.runtime.autotuner", "Autotuner"),
)
_PATCHES: dict[type, Patch] = {}
# Whether a launch goes on in a thread: an autotuner makes many, of which one counts.
_LAUNCH = threading.local()


class Launcher(Protocol):
    """What a dispatch mode does with a kernel that it cannot see into."""

    def launch(self, schema: OpSchema, kwargs: Mapping[str, Any], run: Callable[[], Any], source: str) -> Any:
        """Record a launch, which may write to all of its tensors, and make it if numbers are computed."""


def triton_launches(recorder: Recorder, mode: Launcher) -> list[Wrapping]:
    """Return what is to be wrapped so that launches which a program makes itself, `kernel[grid](...)`, are seen."""
    if "triton" not in sys.modules:
        return []
    classes = [getattr(sys.modules.get(path), name, None) for path, name in _LAUNCHERS]
    return [
        (_PATCHES.setdefault(cls, Patch(cls, "run")), partial(_around, recorder, mode))
        for cls in classes
        if cls is not None
    ]


def launch_kernel(
    mode: Launcher, kernel: Any, arguments: Mapping[str, Any], run: Callable[[], Any], frame: FrameType | None
) -> Any:
    """Record one launch as `triton::NAME`, whose arguments have the names of the kernel's parameters, and make it."""
    while hasattr(kernel, "fn") and not inspect.isfunction(kernel):  # an autotuner or heuristics around the function
        kernel = kernel.fn
    names = tuple(arguments)
    name = f"triton::{kernel.__name__}"
    schema = OpSchema(
        name,
        names,
        (None,) * len(names),
        {item: index for index, item in enumerate(names)},
        tuple(index for index, value in enumerate(arguments.values()) if any(True for _ in tensors_of(value))),
        False,
        f"{name}({', '.join(names)})",
    )

    def run_once() -> Any:
        _LAUNCH.goes_on = True
        try:
            return run()
        finally:
            _LAUNCH.goes_on = False

    return mode.launch(schema, arguments, run_once, find_source_line(frame).line)


def _around(recorder: Recorder, mode: Launcher, original: Callable[..., Any]) -> Callable[..., Any]:
    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            getattr(_LAUNCH, "goes_on", False)
            or kwargs.get("warmup")
            or recorder.paused
            or not recorder.is_recording_thread()
        ):
            return original(kernel, *args, **kwargs)
        arguments = _name_arguments(kernel, args, kwargs)
        return launch_kernel(mode, kernel, arguments, partial(original, kernel, *args, **kwargs), sys._getframe(1))

    return run


def _name_arguments(kernel: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameter → argument of a launch, defaults filled in, without the options that are the compiler's."""
    while hasattr(kernel, "fn") and not inspect.isfunction(kernel):
        kernel = kernel.fn
    signature = inspect.signature(kernel)
    bound = signature.bind_partial(
        *args, **{name: value for name, value in kwargs.items() if name in signature.parameters}
    )
    bound.apply_defaults()
    return dict(bound.arguments)
