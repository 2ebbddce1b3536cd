"""Utilisation of devices in a measured time: MFU, of the model's FLOPs, and HFU, of all executed FLOPs."""

from __future__ import annotations

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from numbers import Integral, Real
from typing import Annotated, NamedTuple, Protocol, TypeAlias, TypedDict

from torch import nn

from fvflops.analysis.model_analysis import analysed_run
from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.capture.errors.model_check import not_analysis, trace_of
from fvflops.counting import TableCostModel, count
from fvflops.counting.uncounted_work import describe_unknown_masks
from fvflops.devices.devices import Device, resolve_device, short_dtype
from fvflops.formulas import FormulaTable, resolve_table
from fvflops.formulas.functions.attention import SKIPS
from fvflops.text import Unpack, explaining_arguments, shown
from fvflops.trace import Counts, Trace
from fvflops.units import format_percent, format_seconds, format_size, format_thousands

ATTENTION = ("dense", "causal")


def with_attention(table: FormulaTable, attention: str) -> FormulaTable:
    """Return a table that counts fused attention by all pairs of query and key ("dense") or the unmasked ("causal")."""
    if attention not in ATTENTION:
        raise ValueError(f"attention must be 'dense' or 'causal'; got {shown(attention)}")
    return replace(table, constants={**table.constants, SKIPS: int(attention == "causal")})


# Phases of the model's work; all others are extra work of the hardware.
MODEL_PHASES = ("forward", "backward")
FLOAT32_MATMUL = ("ieee", "tf32")
# Ops of cuDNN, which torch runs in tf32 by default.
_CUDNN = re.compile(
    r"aten::_?(conv(olution|_transpose|[123]d)|cudnn_(convolution|rnn)|(lstm|gru|rnn_tanh|rnn_relu)\b)"
    r"|torch\.nn\.(Lazy)?(Conv(Transpose)?[123]d|LSTM|GRU|RNN)$"
)
# Larger inputs are rejected; larger utilisations are shown as "over" this one.
_MAX_INPUT = 1e300
_MAX_SHARE = 10**6


class UtilisationError(ValueError):
    """A utilisation above 100 %, where one of the inputs is wrong, or a figure unknown to a strict StepMeter."""


class Counted(Protocol):
    """An object with counts: an analysis of a model or of a run."""

    def counts(self) -> Counts:
        """Return the counts."""


class Metered(Protocol):
    """FLOPs that `devices` executed in `seconds`, 2 for a multiply-add: figures of a StepMeter."""

    @property
    def model_flops(self) -> float:
        """FLOPs of the forward and backward passes, as `mfu` counts them."""

    @property
    def hardware_flops(self) -> float:
        """All executed FLOPs."""

    @property
    def seconds(self) -> float:
        """Duration in seconds."""

    @property
    def devices(self) -> int:
        """Number of devices that the FLOPs are of."""


Work: TypeAlias = "float | Mapping[object, float] | Counts | Counted | Trace | Metered"


class WorkOptions(TypedDict, total=False):
    """Options of a utilisation, as `mfu` describes them."""

    dtype: Annotated[object, None]
    devices: Annotated[int, 1]
    sparse: Annotated[bool, False]
    float32_matmul: Annotated[str | None, None]
    attention: Annotated[str | None, None]


@explaining_arguments
def mfu(counts: Work, seconds: float | None = None, *, device: str | Device, **options: Unpack[WorkOptions]) -> float:
    """Return the model FLOPs utilisation, 0 to 1: the least time for the model's FLOPs at peak, divided by `seconds`.

    `counts` is the work of all `devices` together in `seconds`: a number of FLOPs (a multiply-add is 2) in one `dtype`;
    a mapping of dtypes to FLOPs, whose least times add up; or Counts, or an analysis that has them, whose FLOPs are 2 *
    macs + flops whatever the table's multiply_add, in each entry's dtype or all in `dtype`. Only the forward and
    backward passes count, as the mathematics needs them: recomputation by activation checkpointing or a fused
    attention's backward, and the optimizer's step, are excluded. Exclude them from a number too.

    PaLM counts matrix products only, forward and backward. The table `default` adds norms, pooling and the like, a
    thousandth in a transformer; `{"bf16": 2 * macs}` is exact. Masked attention counts in full, as in PaLM; with
    `attention` "causal", of an analysis or a Trace, only the pairs within its mask count, as in `model_flops`, with
    "dense" all. Unsupported ops are not counted: see `unsupported_ops()`.

    An analysis of a float32 model has float32 ops; if the measured run was in torch.autocast, pass `dtype`, else
    "fp32": without it a warning names both figures.

    `device` is a name, as `torch.cuda.get_device_name()` gives it, a Device, or FILE.yaml or FILE.yaml:NAME, which
    `fvflops peak` writes. Its `unit` says whether one is a GPU, a die or a chip. `sparse` uses the peak for 2:4
    sparsity where a dtype has one; the FLOPs still count the dense product.

    `float32_matmul` is how float32 products ran: "ieee", or "tf32", which applies the peak for tf32 to the products of
    Counts, and to all float32 FLOPs of a number or mapping. None is torch's default on NVIDIA: "ieee", but "tf32" for
    cuDNN's convolutions and RNNs in Counts where the device has it (`torch.backends.cudnn.allow_tf32`).

    More than 100 % raises UtilisationError, which lists what to check. Other bad input raises ValueError.

    Source: Chowdhery et al. 2022, PaLM, appendix B. Its 540B model, 6N + 12LHQT FLOPs a token, 238.3 thousand tokens/s:

    >>> flops = 6 * 540_350_000_000 + 12 * 118 * 48 * 256 * 2048
    >>> round(mfu(flops * 238_300, 1.0, device="TPU v4", dtype="bf16", devices=6144), 3)
    0.462
    """
    return _utilisation("MFU", counts, seconds, device, options)


@explaining_arguments
def hfu(counts: Work, seconds: float | None = None, *, device: str | Device, **options: Unpack[WorkOptions]) -> float:
    """Return the hardware FLOPs utilisation, 0 to 1: `mfu` of all executed FLOPs, recomputation and optimizer included.

    Source: Korthikanti et al. 2022, Reducing Activation Recomputation in Large Transformer Models.

    >>> hfu({"bf16": 4 * 10**14}, 1.0, device="H100"), mfu({"bf16": 3 * 10**14}, 1.0, device="H100")
    (0.4042..., 0.3032...)
    """
    return _utilisation("HFU", counts, seconds, device, options)


def least_seconds(
    counts: Work, device: Device, *, model_only: bool, attention: str | None = None, float32_matmul: str | None = None
) -> float:
    """Return the least time for FLOPs at a device's peaks: `mfu`, of the model's alone, or `hfu`, times seconds."""
    work = _read_work(_count_attention(counts, attention), None, device, float32_matmul, model_only=model_only)
    return float(sum(_Machine(device, 1, False).times(work).values()))


def _count_attention(work: Work, attention: str | None) -> Work:
    if attention is None:
        return work
    analysis = FlopCountAnalysis.from_trace(work, warn=False) if isinstance(work, Trace) else work
    if not isinstance(analysis, FlopCountAnalysis):
        raise ValueError(f"attention={attention!r} requires an analysis, a recording or a Trace; got {shown(work)}")
    if len(getattr(analysis, "steps", ())) > 1:
        return work  # an error
    run = analysed_run(analysis)
    if run.table is None or run.handled:
        raise ValueError(
            f"attention={attention!r} counts by the table, but the analysis has handles: clear them, or omit attention"
        )
    return FlopCountAnalysis.from_trace(run.trace, table=with_attention(run.table, attention), warn=False).counts()


def _utilisation(name: str, counts: Work, seconds: float | None, device: str | Device, options: WorkOptions) -> float:
    counts, model_only = _count_attention(counts, options["attention"]), name == "MFU"
    dtype, devices, float32_matmul = options["dtype"], options["devices"], options["float32_matmul"]
    if not isinstance(counts, Mapping) and hasattr(counts, "model_flops"):
        figures: Metered = counts  # type: ignore[assignment]
        counts = figures.model_flops if model_only else figures.hardware_flops
        seconds = figures.seconds if seconds is None else seconds
        devices = figures.devices if devices == 1 else devices
    machine = _Machine(resolve_device(device), devices, options["sparse"])
    work = _read_work(counts, dtype, machine.device, float32_matmul, model_only=model_only)
    share = _utilise(name, work, seconds, machine)
    if dtype is None and float32_matmul is None and not isinstance(counts, (Mapping, Real)):
        _warn_of_float32(name, share, work, machine)
    return share


def _read_work(
    counts: Work, dtype: object, device: Device, float32_matmul: str | None, *, model_only: bool
) -> dict[str, Fraction]:
    """Return dtype → FLOPs, of all executed work or of the model's alone."""
    check_float32_matmul(float32_matmul)
    if isinstance(counts, Trace):
        counts = FlopCountAnalysis.from_trace(counts, warn=False)
    if isinstance(counts, nn.Module):
        raise not_analysis(counts, "FlopCountAnalysis(model, inputs), a Trace or a number of FLOPs with its dtype")
    if not isinstance(counts, Counts) and callable(getattr(counts, "counts", None)):
        steps = len(getattr(counts, "steps", ()))
        if steps > 1:
            raise ValueError(
                f"this recording has {steps} steps, and seconds is one time: pass run.steps[i] with the seconds of one "
                "step, or run.counts() with the seconds of all"
            )
        counts = counts.counts()  # type: ignore[union-attr]
    if isinstance(counts, Counts):
        return _read_entries(counts, dtype, device, float32_matmul, model_only)
    if isinstance(counts, Mapping):
        if dtype is not None:
            raise ValueError("counts is a mapping of dtypes: omit dtype")
    elif dtype is None:
        raise ValueError("counts is a number of FLOPs: pass their dtype, such as dtype='bf16'")
    by_dtype = counts if isinstance(counts, Mapping) else {dtype: counts}
    work: defaultdict[str, Fraction] = defaultdict(Fraction)
    for name, flops in by_dtype.items():
        work[_product_dtype(short_dtype(name), float32_matmul)] += _read_number(flops, "counts")
    return _check_work(work)


def check_float32_matmul(float32_matmul: str | None) -> None:
    """Raise ValueError for an unknown way of running float32 products."""
    if float32_matmul not in (None, *FLOAT32_MATMUL):
        raise ValueError(f"float32_matmul must be 'ieee', 'tf32' or None; got {shown(float32_matmul)}")


def _read_entries(
    counts: Counts, dtype: object, device: Device, float32_matmul: str | None, model_only: bool
) -> dict[str, Fraction]:
    if counts.metric != "flops":
        raise ValueError(f"these are counts of {counts.metric}: pass counts of flops")
    work: defaultdict[str, Fraction] = defaultdict(Fraction)
    for entry in counts.entries:
        if (model_only and entry.phase not in MODEL_PHASES) or not (entry.macs or entry.other_flops):
            continue
        name = entry.dtype if dtype is None else dtype
        if not name:
            flops = format_size(2 * entry.macs + entry.other_flops)
            raise ValueError(f"the counts have no dtype for the {flops} FLOPs of {entry.op}: pass dtype")
        short = short_dtype(name)
        macs = entry.macs - entry.recomputed if model_only else entry.macs
        work[product_dtype(entry.op, short, device, float32_matmul)] += 2 * macs
        work[short] += entry.other_flops
    return _check_work(work)


def product_dtype(op: str, dtype: str, device: Device, float32_matmul: str | None = None) -> str:
    """Return the dtype whose peak bounds an op's products: its own, by the short name, or tf32 where fp32 runs as tf32.

    `float32_matmul` is as in `mfu`.
    """
    default = device.vendor == "NVIDIA" and "tf32" in device.dtypes() and is_of_cudnn(op)
    return _product_dtype(dtype, "tf32" if float32_matmul is None and default else float32_matmul)


def is_of_cudnn(op: str) -> bool:
    """Return whether an op or a class of modules runs in cuDNN."""
    return _CUDNN.match(op) is not None


def _product_dtype(dtype: str, float32_matmul: str | None) -> str:
    return "tf32" if dtype == "fp32" and float32_matmul == "tf32" else dtype


def _check_work(work: Mapping[str, Fraction]) -> dict[str, Fraction]:
    nonzero = {dtype: flops for dtype, flops in work.items() if flops}
    if not nonzero:
        raise ValueError("the counts are zero: there is no work to compute a utilisation of")
    return nonzero


def _read_number(value: object, what: str) -> Fraction:
    """Return a finite number, 0 or more, as an exact fraction."""
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= value < _MAX_INPUT:  # type: ignore[operator]
        raise ValueError(f"{what} must be a finite number of at least 0; got {shown(value)}")
    return Fraction(int(value) if isinstance(value, Integral) else float(value))


class _Machine(NamedTuple):
    device: Device
    devices: int
    sparse: bool

    def peak(self, dtype: str) -> int:
        sparse = self.sparse and dtype in self.device.sparse
        return self.devices * self.device.peak(dtype, sparse=sparse)

    def times(self, work: Mapping[str, Fraction]) -> dict[str, Fraction]:
        """Return dtype → the least seconds for its work."""
        return {dtype: flops / self.peak(dtype) for dtype, flops in work.items()}


def _utilise(name: str, work: Mapping[str, Fraction], seconds: float | None, machine: _Machine) -> float:
    device, devices, sparse = machine
    measured = _read_number(seconds, "seconds")
    if not measured:
        raise ValueError("seconds must be more than 0: pass the measured time")
    if isinstance(devices, bool) or not isinstance(devices, Integral) or devices < 1:
        raise ValueError(f"devices must be the number of devices, at least 1; got {shown(devices)}")
    if sparse and not set(work) & set(device.sparse):
        dtypes = ", ".join(device.dtypes(sparse=True)) or "no dtype"
        raise ValueError(f"sparse: {device.name} has a 2:4 peak for {dtypes}, and the counts are in {', '.join(work)}")
    machine = machine._replace(devices=int(devices))
    share = sum(machine.times(work).values()) / measured
    utilisation = float(min(share, _MAX_SHARE))  # as a float, so that the least time, rounded to a float, gives 1.0
    if utilisation > 1:
        raise UtilisationError(_explain_excess(name, work, measured, machine))
    return utilisation


def _warn_of_float32(name: str, share: float, work: Mapping[str, Fraction], machine: _Machine) -> None:
    """Warn where float32 ops take most of the time: under torch.autocast the measured run had other dtypes."""
    times = machine.times(work)
    faster = next((dtype for dtype in ("bf16", "fp16") if dtype in machine.device.dtypes()), "")
    slowest = max(times, key=lambda dtype: times[dtype])
    if slowest != "fp32" or not faster or machine.peak(faster) <= machine.peak("fp32"):
        return
    total = sum(times.values())
    other = share * float((total - times["fp32"] + work["fp32"] / machine.peak(faster)) / total)
    warnings.warn(
        f"{name} of {format_percent(share, 1)} has float32 ops at the fp32 peak of {machine.device.name}: if the "
        f"measured run was in torch.autocast, pass dtype={faster!r} ({format_percent(other, 1)}), else dtype='fp32'",
        stacklevel=5,
    )


def _explain_excess(name: str, work: Mapping[str, Fraction], seconds: Fraction, machine: _Machine) -> str:
    """Return the message of a utilisation above 100 %, with the inputs that could explain it."""
    least = sum(machine.times(work).values(), Fraction())
    share = least / seconds
    listed = " + ".join(f"{format_size(round(flops))} FLOPs in {dtype}" for dtype, flops in work.items())
    devices = f"devices (at least {format_thousands(math.ceil(share * machine.devices))})"
    checks = ["seconds", "device", _check_dtype(work, seconds, machine), devices if share < _MAX_SHARE else "devices"]
    if not machine.sparse and set(work) & set(machine.device.sparse):
        time = sum(machine._replace(sparse=True).times(work).values(), Fraction())
        checks.append(f"sparse ({_percent(time / seconds)} at the 2:4 peak)" if time <= seconds else "sparse")
    checks.append("counts (a kernel may skip counted work, such as the masked half of causal attention)")
    return (
        f"{name} would be {_percent(share)}: {listed} take {format_thousands(machine.devices)} × {machine.device.name} "
        f"at least {format_seconds(float(least))}, and seconds is {format_seconds(float(seconds))}; "
        f"check {', '.join(checks)}"
    )


def _check_dtype(work: Mapping[str, Fraction], seconds: Fraction, machine: _Machine) -> str:
    """Return a hint with the utilisation if the slowest part of the work were in a faster dtype."""
    times = machine.times(work)
    slowest = max(times, key=lambda dtype: times[dtype])
    hints = []
    for dtype in sorted(machine.device.dtypes(), key=machine.peak):
        time = sum(times.values()) - times[slowest] + work[slowest] / machine.peak(dtype)
        if times[slowest] > work[slowest] / machine.peak(dtype) and time <= seconds and dtype != "int8":
            hints.append(f"{_percent(time / seconds)} at {dtype}")
    return f"dtype (assumed {slowest}: {', '.join(hints[:3])})" if hints else "dtype"


def _percent(share: Fraction) -> str:
    return format_percent(*share.as_integer_ratio()) if share < _MAX_SHARE else f"over {format_percent(_MAX_SHARE, 1)}"


@explaining_arguments
def model_flops(
    analysis: FlopCountAnalysis,
    *,
    attention: str = "dense",
    matmul_only: bool = False,
    table: str | FormulaTable = "default",
) -> int:
    """Return the FLOPs of a model's forward and backward passes, 2 for a multiply-add.

    Recomputation, by activation checkpointing or inside the backward of flash attention, and optimizers are excluded.
    `attention` is "dense", in which all pairs of query and key count, or "causal", in which only pairs within a causal
    mask, a window or a known mask do. Attention written out as products and a softmax counts all pairs in both.
    `matmul_only` excludes FLOPs that are not multiply-adds, such as in norms. `table` is the convention.

    >>> import torch
    >>> from fvflops import TrainingStepAnalysis
    >>> from fvflops.zoo import build
    >>> step = TrainingStepAnalysis(build("llama_tiny"), torch.zeros(1, 16, dtype=torch.long), loss=torch.sum)
    >>> model_flops(step, matmul_only=True) > model_flops(step, attention="causal", matmul_only=True)
    True
    """
    chosen = with_attention(resolve_table(table), attention)
    trace = trace_of(analysis)
    if masks := describe_unknown_masks(trace, chosen):
        warnings.warn(f"mask unknown, counted as dense: {masks}", stacklevel=2)
    counts = count(trace, TableCostModel(chosen, "flops"), "flops")
    return sum(
        2 * (entry.macs - entry.recomputed) + (0 if matmul_only else entry.other_flops)
        for entry in counts.entries
        if entry.phase in MODEL_PHASES
    )
