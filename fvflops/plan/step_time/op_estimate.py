"""Estimate the time of one call of an op on a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fvflops.capture.run import record_call
from fvflops.capture.shapes.cuda_kernels import gpu_emulated
from fvflops.devices.devices import CUDA_VENDORS, Device, resolve_device
from fvflops.devices.kernel_models.figures import find_figures
from fvflops.formulas.schema import overloads_of, suggest_op
from fvflops.plan.step_time.calibration import PEAK, Efficiency, KernelTimer
from fvflops.plan.step_time.kernel_times import Kernel
from fvflops.plan.step_time.pass_program import read_program
from fvflops.text import record_repr


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class OpEstimate:
    """The estimated time of one call of an op, alone on a device and without its launch by the host.

    `bound_seconds` is the longer of its FLOPs at the device's peak and its bytes at its bandwidth. `kind` names the
    kernel, "matmul", "attention", "attention backward" or "memory"; "+" joins those of an op of several. `kernels` are
    their work, `figures` class of kernels → what its times rest on besides the datasheet, `source` who measured.
    """

    op: str
    device: Device
    seconds: float
    bound_seconds: float
    kind: str
    kernels: tuple[Kernel, ...]
    figures: Mapping[str, Any]
    source: str

    __repr__ = record_repr


def estimate_op(
    op: str,
    inputs: Sequence[Any],
    *,
    device: str | Device,
    dtype: str | torch.dtype = "bfloat16",
    **arguments: Any,
) -> OpEstimate:
    """Return the estimated time of one call of an op of torch, by shapes.

    `inputs` are its first arguments: a tuple is the shape of a tensor of `dtype`, a tensor gives its own shape and
    dtype, and other values are passed on; `arguments` are others by name. `device` is a name, as for `mfu`, or a Device.
    An unknown op or device, and a call that torch refuses, raise ValueError.

    Kernels are timed as `plan` times them, alone: in a step they share power, bandwidth and the host. Their figures
    are fitted to measured kernels (configs/kernel_figures.yaml); without any for the device, `seconds` is the bound.

    >>> product = estimate_op("aten::mm", [(8192, 8192), (8192, 8192)], device="H100")
    >>> product.kind, product.seconds > product.bound_seconds
    ('matmul', True)
    """
    device = resolve_device(device)
    packet = _find_packet(op)
    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    values = [torch.empty(value, dtype=kind, device="meta") if isinstance(value, tuple) else value for value in inputs]
    with gpu_emulated(device.capability):
        trace = record_call(
            packet,
            tuple(values),
            arguments,
            execution="shapes",
            device="cuda" if device.vendor in CUDA_VENDORS else None,
            quiet=True,
        )
    kernels = tuple(launch.kernel for launch in read_program(trace).launches)
    if not kernels:
        raise ValueError(f"{op}: this call launches no kernel that is known, such as a view: it has no time")
    figures = find_figures(device)
    timer = KernelTimer(device, Efficiency(kernels=figures))
    return OpEstimate(
        op=op,
        device=device,
        seconds=sum(map(timer.alone, kernels)),
        bound_seconds=sum(map(timer.bound, kernels)),
        kind=" + ".join(dict.fromkeys(kernel.kind for kernel in kernels)),
        kernels=kernels,
        figures={} if figures is None else dict(map(timer.figures_of, kernels)),
        source=PEAK.source if figures is None else figures.source,
    )


def _find_packet(op: str) -> Any:
    """Return an op or overload of torch by its name."""
    namespace, separator, rest = op.partition("::")
    name, _, overload = rest.partition(".")
    if not separator or not overloads_of(op):
        raise ValueError(f"no op {op!r} in torch: did you mean {suggest_op(op)}?")
    packet = getattr(getattr(torch.ops, namespace), name)
    return getattr(packet, overload) if overload else packet
