"""How a run is executed: device, shape or real execution, enclosing recordings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch

from fvflops.capture.errors.model_errors import find_reason
from fvflops.capture.instrument.patching import Patch, Wrapper, calling
from fvflops.capture.real_mode import SubclassAwareMode
from fvflops.capture.restore.torch_state import function_mode_removed
from fvflops.capture.shapes.cuda_kernels import cuda_choices
from fvflops.capture.shapes.device_emulation import MissingDeviceMode
from fvflops.capture.shapes.metadata import is_available
from fvflops.capture.shapes.shape_mode import ShapeMode
from fvflops.capture.shapes.shape_tensor import DataDependentError
from fvflops.text import shown
from fvflops.torch_internals import dispatch_mode_stack

_AUTOCAST = Patch(torch.autocast, "__enter__")


class ExecutionError(RuntimeError):
    """The model cannot be run in shape execution, and real execution is not allowed or impossible.

    It is not allowed with execution="shapes" or `device`, and impossible with weights on the meta device.
    """


def choose_device(device: str | torch.device | None, devices: Sequence[torch.device]) -> torch.device:
    """Return the device whose ops shape execution records: `device`, else the first except meta, else the CPU."""
    if device is None:
        return next((item for item in devices if item.type != "meta"), torch.device("cpu"))
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise ValueError(f"device={shown(device)} is not a device of torch: pass 'cpu', 'cuda' or 'cuda:1'") from None
    if target.type == "meta":
        raise ValueError("shape execution needs a target device such as 'cpu' or 'cuda', not 'meta'")
    return target if target.type == "cpu" or target.index is not None else torch.device(target.type, 0)


def needs_real_execution(error: Exception) -> bool:
    """Return whether an error is due to shape execution: an op has no shape rule, or needs a tensor's values."""
    return isinstance(error, (DataDependentError, NotImplementedError)) or bool(find_reason(error))


@contextmanager
def suspend_outer_recordings() -> Iterator[None]:
    """Pause the recordings that enclose this one, so that they do not record its run."""
    outer = [mode.recorder for mode in dispatch_mode_stack() if isinstance(mode, SubclassAwareMode)]
    with ExitStack() as stack:
        for recorder in outer:
            stack.callback(recorder.resume)
            recorder.pause()
        yield


def emulate_device(mode: ShapeMode, kernels: torch.device, stack: ExitStack, *, under_autograd: bool) -> None:
    """Let code name the mode's device if this machine lacks it, and call the kernels of a kind of device."""
    device = mode.device
    if not is_available(device):
        missing_device = MissingDeviceMode(device, under_autograd=under_autograd)
        mode.emulate_device = partial(MissingDeviceMode, device, under_autograd=False)
        stack.enter_context(function_mode_removed(missing_device))
        stack.enter_context(missing_device.extended())
        missing_device.__enter__()
    if kernels.type == "cuda" and under_autograd:
        stack.enter_context(cuda_choices(kernels, for_cpu=device.type == "cpu"))


def before_autocast(action: Callable[[], None]) -> Wrapper:
    """Perform an action whenever autocast begins: it casts no tensors on other devices, such as the meta device."""

    def enter(original: Callable[..., Any], *args: Any) -> Any:
        action()
        return original(*args)

    return _AUTOCAST, calling(enter)
