"""Run a model that names a device which this machine lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fvflops.capture.instrument.backward import ENGINE_RUNS
from fvflops.capture.shapes.cuda_kernels import call_as_on_cuda
from fvflops.capture.shapes.meta_run import substitute


class MissingDeviceMode(TorchFunctionMode):
    """A function mode that redirects requests for a missing device to the CPU.

    Without it torch would raise before dispatching any op. `under_autograd`: autograd decomposes the run's ops (the op
    set "core"), and functions choose kernels by device: as on CUDA, if that is the missing one.
    """

    def __init__(self, device: torch.device, *, under_autograd: bool = True) -> None:
        super().__init__()
        self._device_type = device.type
        self._as_on_cuda = under_autograd and device.type == "cuda"

    @contextmanager
    def kept_in_backward(self) -> Iterator[None]:
        """Keep the mode active in this thread's backward passes, for which torch leaves it.

        Checkpointed modules are called again in them.
        """
        thread = get_ident()

        def around(original: Any) -> Any:
            def run_engine(*args: Any, **kwargs: Any) -> Any:
                if get_ident() != thread:
                    return original(*args, **kwargs)
                with self:
                    return original(*args, **kwargs)

            return run_engine

        with ENGINE_RUNS.wrapped(around):
            yield

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == self._device_type and args:  # Tensor.cuda()
            return args[0]
        cpu = torch.device("cpu")
        args, kwargs = substitute(
            (tuple(map(self._parse, args)), {name: self._parse(value) for name, value in (kwargs or {}).items()}),
            lambda tensor: tensor,
            lambda device: cpu if device.type == self._device_type else device,
        )
        return call_as_on_cuda(func, args, kwargs) if self._as_on_cuda else func(*args, **kwargs)

    def _parse(self, value: Any) -> Any:
        return torch.device(value) if isinstance(value, str) and value.partition(":")[0] == self._device_type else value


@contextmanager
def missing_device_emulated(device: torch.device, *, under_autograd: bool = True) -> Iterator[None]:
    """Activate a MissingDeviceMode, in backward passes too."""
    mode = MissingDeviceMode(device, under_autograd=under_autograd)
    with mode, mode.kept_in_backward():
        yield
