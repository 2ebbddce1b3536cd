"""Estimate the time of one call of an op on a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fvflops.analysis.table_examples import NotRunnable, overloads_of
from fvflops.capture.recorder.tensor_specs import describe_call
from fvflops.capture.unseen.fake_tensors import fake_execution
from fvflops.devices.devices import Device, resolve_device, short_dtype
from fvflops.devices.kernel_models.figures import find_figures
from fvflops.devices.measured_errors import ErrorEstimate, expect_kernel_error
from fvflops.formulas.schema import suggest_op
from fvflops.plan.step_time.calibration import PEAK, Efficiency, KernelTimer
from fvflops.plan.step_time.kernel_times import UNKNOWN, Kernel, kernel_of
from fvflops.reports.display import Displayed
from fvflops.reports.document import Document, Items, Table, number_column, text_column
from fvflops.text import explaining_arguments, short_repr, shown, truncate
from fvflops.torch_internals import FakeTensorMode
from fvflops.trace import Signature
from fvflops.units import format_percent, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class OpEstimate(Displayed):
    """The estimated time of one call of an op, alone on a device and without its launch by the host.

    `bound_seconds` is the longer of its FLOPs at the device's peak and its bytes at its bandwidth. `kind` is its
    kernel's: "matmul", "attention", "attention backward" or "memory". `kernel` is its work, `figures` the fitted
    figures of its class, None for the bound, and `source` says who measured the kernels. `error` is the expected error
    of `seconds`.
    """

    _report = "fvflops.plan.step_time.op_estimate:op_report"

    op: str
    device: Device
    seconds: float
    bound_seconds: float
    kind: str
    kernel: Kernel
    figures: Any
    source: str
    error: ErrorEstimate

    def __repr__(self) -> str:
        return short_repr(self, self.op, format_seconds(self.seconds), self.device.name)


@explaining_arguments
def estimate_op(
    op: str, inputs: Sequence[Any], *, device: str | Device, dtype: str | torch.dtype = "bfloat16", **arguments: Any
) -> OpEstimate:
    """Return the estimated time of one call of an op of torch, from its shapes.

    `inputs` are its first arguments: a tuple is the shape of a tensor of `dtype`, a tensor gives its own shape and
    dtype, and other values are passed on; `arguments` are others by name. `device` is a name, as for `mfu`, or a
    Device. An unknown op or device, and a call that torch refuses, raise ValueError.

    Kernels are timed as `plan` times them, alone: in a step they share power, bandwidth and the host. Their figures
    are fitted to measured kernels (configs/kernel_figures.yaml); without any for the device, `seconds` is the bound.

    >>> product = estimate_op("aten::mm", [(8192, 8192), (8192, 8192)], device="H100")
    >>> product.kind, product.seconds > product.bound_seconds
    ('matmul', True)
    """
    device = resolve_device(device)
    kind = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"dtype={shown(dtype)} is not a dtype of torch, such as bfloat16 or float8_e4m3fn")
    values = [torch.empty(value, dtype=kind, device="meta") if isinstance(value, tuple) else value for value in inputs]
    return estimate_signature(_sign(op, values, arguments), device)


def estimate_signature(signature: Signature, device: Device) -> OpEstimate:
    """Return the estimated time of a call on a device; a call of unknown work, and a view, raise ValueError."""
    kernel = kernel_of(signature)
    if kernel is None:
        raise ValueError(f"{signature.op} launches no kernel, as a view or an allocation, so it has no time")
    if kernel is UNKNOWN:
        raise ValueError(f"the work of {signature.op} is not known: the convention exact has no formula for it")
    figures = find_figures(device)
    timer = KernelTimer(device, Efficiency(kernels=figures))
    kind, own = ("", None) if figures is None else timer.figures_of(kernel)
    return OpEstimate(
        op=signature.op,
        device=device,
        seconds=timer.alone(kernel),
        bound_seconds=timer.bound(kernel),
        kind=kernel.kind,
        kernel=kernel,
        figures=own,
        source=PEAK.source if figures is None else figures.source,
        error=expect_kernel_error(kind, short_dtype(kernel.dtype) if kernel.shape else "", device),
    )


def _sign(op: str, values: Sequence[Any], arguments: Mapping[str, Any]) -> Signature:
    """Return the signature of a call by running the first overload that takes it."""
    op = op if "::" in op else f"aten::{op}"
    try:
        overloads = overloads_of(op)
    except NotRunnable:
        raise ValueError(f"no op {op!r} in torch: did you mean {suggest_op(op)}?") from None
    refused = ""
    for overload in overloads:
        try:
            return describe_call(overload, tuple(values), dict(arguments), _run(overload, values, arguments))
        except (RuntimeError, TypeError) as error:
            refused = refused or " ".join(str(error).split())
    raise ValueError(f"{op} refuses these arguments: {truncate(refused, 200)}")


def _run(overload: Any, values: Sequence[Any], arguments: Mapping[str, Any]) -> Any:
    try:
        return overload(*values, **arguments)
    except AttributeError:  # torch's shape rules of some ops read an attribute of FakeTensors
        with fake_execution(FakeTensorMode(), (values, arguments)) as (fake_values, fake_arguments):
            return overload(*fake_values, **fake_arguments)


def op_report(estimate: OpEstimate) -> Document:
    """Return the report of an estimated time: its bound, figures and error."""
    seconds = (number_column("seconds"), number_column("bound_seconds"))
    error = (number_column("error_percent"), text_column("error"))
    columns = (text_column("op"), text_column("kind"), *seconds, text_column("source"), *error)
    names = [column.key for column in columns[:-2]]
    row = (*(getattr(estimate, name) for name in names), estimate.error.mean, estimate.error.text)
    share = format_percent(estimate.bound_seconds / estimate.seconds)
    lines = [
        f"time: {format_seconds(estimate.seconds)}",
        f"bound: {format_seconds(estimate.bound_seconds)}, by the device's peak or bandwidth; the time reaches {share}",
        f"kernel: {estimate.kind}, {estimate.kernel.macs} multiply-adds, {estimate.kernel.nbytes} bytes",
        f"figures: {estimate.source}",
        f"error: {estimate.error.text}",
    ]
    table = Table("times", [replace(column, only_for="data") for column in columns], [row], noun="op")
    return Document("op time", f"{estimate.op} on {estimate.device.name}", [Items("", lines), table])
