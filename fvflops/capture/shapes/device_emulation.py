"""Run a model that names a device which this machine lacks, or that offloads activations from it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from threading import get_ident
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from fvflops.capture.instrument.autograd import ENGINE_RUNS
from fvflops.capture.instrument.patching import Patch, Wrapper, calling, wrapped
from fvflops.capture.shapes.cuda_autocast import autocast_emulated
from fvflops.capture.shapes.cuda_kernels import call_as_on_cuda
from fvflops.capture.shapes.metadata import META
from fvflops.capture.shapes.shape_cache import substitute
from fvflops.capture.shapes.shape_mode import in_shape_run
from fvflops.capture.shapes.shape_tensor import ShapeTensor
from fvflops.torch_internals import device_constructors, dispatch_mode_stack

_DEVICE = torch.Tensor.device
# The host. Without an index the CPU may stand for the device, since programs create tensors there by default.
_HOST = torch.device("cpu", 0)
_SAVE_ON_CPU = Patch(save_on_cpu, "__init__")
# What waits for a device, or notes something for its tools: nothing for a model's cost.
_DEVICE_CALLS = [
    *(Patch(torch.cuda, name) for name in ("synchronize", "set_device", "reset_peak_memory_stats")),
    *(Patch(torch.cuda.nvtx, name) for name in ("range_push", "range_pop", "mark")),
    Patch(torch.accelerator, "synchronize"),
]
_FLEX_ATTENTION = "torch.nn.attention.flex_attention"
_NAMES = {getattr(function, "__name__", "") for function in device_constructors()}
_CONSTRUCTORS = [Patch(torch, name) for name in sorted(_NAMES) if getattr(torch, name, None) in device_constructors()]

_CPU = torch.device("cpu")


class MissingDeviceMode(TorchFunctionMode):
    """A function mode that redirects requests for a missing device to the CPU.

    Without it torch would raise before dispatching any op. `under_autograd`: autograd decomposes the run's ops (the op
    set "core"), and functions choose kernels by device: as on CUDA, if that is the missing one.
    """

    def __init__(self, device: torch.device, *, under_autograd: bool = True) -> None:
        super().__init__()
        self._device, self._device_type = device, device.type
        self._as_on_cuda = under_autograd and device.type == "cuda"

    @contextmanager
    def extended(self) -> Iterator[None]:
        """Emulate autocast, and keep the mode active in this thread's backward passes, for which torch leaves it.

        Checkpointed modules are called again in them.
        """
        thread = get_ident()

        def run_engine(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with self if get_ident() == thread else nullcontext():
                return original(*args, **kwargs)

        autocast = autocast_emulated() if self._device_type == "cuda" else nullcontext()
        constructors = [(constructor, calling(self._construct)) for constructor in _CONSTRUCTORS]
        with ENGINE_RUNS.wrapped(calling(run_engine)), wrapped(constructors), autocast:
            yield

    def _construct(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Construct a tensor for Python code that torch runs outside of function modes."""
        device = self._parse(kwargs.get("device"))
        is_missing = isinstance(device, torch.device) and device.type == self._device_type
        if is_missing and in_shape_run():
            kwargs["device"] = _CPU
        return original(*args, **kwargs)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__self__", None) is _DEVICE and _chooses_by_device(sys._getframe(1)):
            return self._device
        if getattr(func, "__name__", "") in (self._device_type, "pin_memory") and args:  # Tensor.cuda()
            return args[0]
        args = tuple(map(self._on_cpu, args))
        kwargs = {name: self._on_cpu(value) for name, value in kwargs.items()} if kwargs else {}
        return call_as_on_cuda(func, args, kwargs) if self._as_on_cuda else func(*args, **kwargs)

    def _on_cpu(self, value: Any) -> Any:
        """Return an argument with the missing device replaced by the CPU."""
        if isinstance(value, torch.Tensor):
            return value
        on_cpu = {self._device_type: _CPU}
        return substitute(self._parse(value), lambda tensor: tensor, lambda device: on_cpu.get(device.type, device))

    def _parse(self, value: Any) -> Any:
        return torch.device(value) if isinstance(value, str) and value.partition(":")[0] == self._device_type else value


def _chooses_by_device(frame: FrameType) -> bool:
    """Return whether torch's code reads the device of a tensor that may have values, as inputs have, to choose by it.

    flex_attention requires equal devices of the query and the block mask; a checkpoint enables the autocast
    of its inputs' device when it recomputes.
    """
    module, function = frame.f_globals.get("__name__"), frame.f_code.co_name
    return module == _FLEX_ATTENTION or (module == "torch.utils.checkpoint" and function == "add_device_types")


def skipped_device_calls() -> Iterator[Wrapper]:
    """Yield wrappers by which recorded code skips `torch.cuda.synchronize` and the like where CUDA is missing."""

    def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return None if dispatch_mode_stack() else original(*args, **kwargs)

    for patch in () if torch.cuda.is_available() else _DEVICE_CALLS:
        yield patch, calling(call)


def offloaded_activations() -> Wrapper:
    """Return the wrapper by which `torch.autograd.graph.save_on_cpu` copies saved shape tensors to the host and back.

    Where this machine lacks the device, its tensors are on the CPU for torch, so that `Tensor.cpu` copies nothing.
    """

    def copy(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not ShapeTensor:
            return tensor  # a small one, whose values are known
        return torch.ops.aten._to_copy.default(tensor, device=device)

    def initialise(original: Callable[..., Any], hooks: saved_tensors_hooks, *args: Any, **kwargs: Any) -> None:
        original(hooks, *args, **kwargs)
        hooks.pack_hook, hooks.unpack_hook = partial(copy, _HOST), partial(copy, META)

    return _SAVE_ON_CPU, calling(initialise)
