"""Record launches of Triton kernels by the model's code or by torch's triton_kernel_wrapper ops, with arguments."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import FrameType
from typing import Any

from fvflops.capture.instrument.patching import Patch, Wrapper, calling
from fvflops.capture.real_mode import RecordingMode
from fvflops.capture.recorder.caller_lines import find_source_line
from fvflops.capture.recorder.recorder import Recorder
from fvflops.capture.recorder.tensor_specs import OpSchema, tensors_of
from fvflops.capture.shapes.shape_mode import ShapeMode

# Modules and classes whose `run` launches a kernel. `Heuristics.run` only adds arguments and calls one of these.
_KERNEL_CLASSES = (
    ("triton.runtime.jit", "JITFunction"),
    ("triton.runtime.interpreter", "InterpretedFunction"),
    ("triton.runtime.autotuner", "Autotuner"),
)
_PATCHES: dict[type, Patch] = {}
# Whether a thread is inside a launch: launches that an autotuner makes within its own launch are not recorded.
_thread_local = threading.local()


Mode = RecordingMode | ShapeMode


def triton_launches(recorder: Recorder, mode: Mode) -> list[Wrapper]:
    """Return the wrappers that record launches by the model's code, `kernel[grid](...)`."""
    if "triton" not in sys.modules:
        return []
    classes = [getattr(sys.modules.get(path), name, None) for path, name in _KERNEL_CLASSES]
    found = [cls for cls in classes if cls is not None]
    launch = calling(partial(_run, mode), recorder.is_active)
    return [(_PATCHES.setdefault(cls, Patch(cls, "run")), launch) for cls in found]


def launch_kernel(
    mode: Mode, kernel: Any, arguments: Mapping[str, Any], call_kernel: Callable[[], Any], frame: FrameType | None
) -> Any:
    """Record one launch as `triton::NAME`, with the kernel's parameter names, and run it in real execution."""
    names = tuple(arguments)
    name = f"triton::{_function_of(kernel).__name__}"
    schema = OpSchema(
        name,
        names,
        (None,) * len(names),
        {argument: index for index, argument in enumerate(names)},
        tuple(index for index, value in enumerate(arguments.values()) if any(True for _ in tensors_of(value))),
        False,
        f"{name}({', '.join(names)})",
    )

    def launch() -> Any:
        _thread_local.is_launching = True
        try:
            return call_kernel()
        finally:
            _thread_local.is_launching = False

    return mode.launch(schema, arguments, launch, find_source_line(frame).line)


def _run(mode: Mode, original: Callable[..., Any], kernel: Any, /, *args: Any, **kwargs: Any) -> Any:
    if getattr(_thread_local, "is_launching", False) or kwargs.get("warmup"):
        return original(kernel, *args, **kwargs)
    signature = inspect.signature(_function_of(kernel))
    named = {name: value for name, value in kwargs.items() if name in signature.parameters}  # no compiler options
    bound = signature.bind_partial(*args, **named)
    bound.apply_defaults()
    return launch_kernel(mode, kernel, bound.arguments, partial(original, kernel, *args, **kwargs), sys._getframe(1))


def _function_of(kernel: Any) -> Any:
    while hasattr(kernel, "fn") and not inspect.isfunction(kernel):
        kernel = kernel.fn
    return kernel
