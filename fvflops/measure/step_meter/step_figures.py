"""Figures of a training step: its cost, its time, the rates that follow from both, and a plan's time."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Annotated, NamedTuple, TextIO, TypedDict

from fvflops.plan.parallel_axes import AXES
from fvflops.text import short_repr, shown
from fvflops.trace import Entry
from fvflops.trace.module_tree import innermost
from fvflops.units import format_bytes, format_percent, format_quantity, format_ratio, format_seconds, format_share

if TYPE_CHECKING:
    from fvflops.devices.devices import Device
    from fvflops.formulas import FormulaTable
    from fvflops.plan.step_time.step_estimate import StepEstimate


class MeterOptions(TypedDict, total=False):
    """Options of a meter, as StepMeter describes them."""

    device: Annotated[str | Device | None, None]
    table: Annotated[str | FormulaTable, "default"]
    attention: Annotated[str, "dense"]
    float32_matmul: Annotated[str | None, None]
    strict: Annotated[bool, False]
    live: Annotated[bool | TextIO, False]
    history: Annotated[int, 10_000]
    expected: Annotated[StepEstimate | float | None, None]


class StepCost(NamedTuple):
    """Cost of some work on one device; a multiply-add is 2 FLOPs.

    The model FLOPs include forward and backward passes, not recomputation and optimizers; the hardware FLOPs are all
    executed ones. The seconds are the least times for them at the device's peaks. NaN is unknown.
    """

    macs: float = 0
    model_flops: float = 0
    hardware_flops: float = 0
    model_seconds: float = 0.0
    hardware_seconds: float = 0.0

    def __add__(self, other: StepCost) -> StepCost:  # type: ignore[override]
        return StepCost(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, factor: int) -> StepCost:
        return StepCost(*(value * factor for value in self))


# Hardware FLOPs of some work by module (the owner of each op, "" being the model), operator and phase.
WorkParts = Counter[tuple[str, str, str]]


def divide_flops(entries: Iterable[Entry], prefix: str = "") -> WorkParts:
    """Return the parts of entries of counts, with a prefix to the names of modules."""
    parts: WorkParts = Counter()
    for entry in entries:
        if flops := 2 * entry.macs + entry.flops:
            module = (prefix + innermost(entry.scope)).removesuffix(".")
            parts[module, entry.label, entry.phase] += flops
    return parts


UNKNOWN_COST = StepCost(*[math.nan] * 5)


@dataclass(frozen=True, slots=True, repr=False)
class StepFigures:
    """Figures of one step; NaN is unknown.

    `step` is its number, from 1, and `seconds` its duration. All are per device, unless `devices` says that amounts
    are the sums over several. `macs` and `model_flops` (a multiply-add is 2 FLOPs) are the forward and backward passes
    of the models, without recomputation and optimizers, `hardware_flops` all executed FLOPs. `tflops_per_device` is
    model_flops / devices / seconds / 10^12. `mfu` and `hfu` are shares of the device's peak, 0 to 1. `memory_peak` is
    the most memory allocated on a CUDA device since the process started, in bytes. `expected_seconds` is the time of
    the step as planned, and `unexplained` the share of `seconds` beyond it, negative if the step is faster.

    >>> figures = StepFigures(1, 0.5, macs=1e12, model_flops=2e12, hardware_flops=2e12, mfu=0.25, hfu=0.25, tokens=4096)
    >>> figures.tflops_per_device, figures.tokens_per_second
    (4.0, 8192.0)
    >>> print(figures)
    step 1: 500 ms, 8,192 tokens/s, 4 TFLOP/s, MFU 25.0%, HFU 25.0%
    """

    step: int
    seconds: float
    macs: float = math.nan
    model_flops: float = math.nan
    hardware_flops: float = math.nan
    mfu: float = math.nan
    hfu: float = math.nan
    samples: float = math.nan
    tokens: float = math.nan
    memory_peak: float = math.nan
    devices: int = 1
    expected_seconds: float = math.nan

    @property
    def unexplained(self) -> float:
        """Share of the step's time that the plan does not account for."""
        return 1 - _rate(self.expected_seconds, self.seconds)

    @property
    def tflops_per_device(self) -> float:
        """Model FLOP/s of one device, in 10^12."""
        return _rate(self.model_flops, self.seconds) / 1e12 / self.devices

    @property
    def samples_per_second(self) -> float:
        """Samples per second of all devices."""
        return _rate(self.samples, self.seconds)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all devices."""
        return _rate(self.tokens, self.seconds)

    def as_dict(self) -> dict[str, float]:
        """Return the known figures by name, for a logger; `devices` if there are several."""
        names = ("tflops_per_device", "samples_per_second", "tokens_per_second", "unexplained")
        rates = {name: getattr(self, name) for name in names}
        known = {name: value for name, value in {**asdict(self), **rates}.items() if not math.isnan(value)}
        return {name: value for name, value in known.items() if (name, value) != ("devices", 1)}

    def __str__(self) -> str:
        return f"step {self.step}: {self.rates()}"

    def __repr__(self) -> str:
        return short_repr(self, f"step {self.step}", self.rates())

    def rates(self) -> str:
        """Return the known rates in a line.

        >>> StepFigures(1, 0.5, tokens=4096, mfu=0.25).rates()
        '500 ms, 8,192 tokens/s, MFU 25.0%'
        >>> StepFigures(1, 2.0, samples=1).rates()
        '2 s, 0.5 samples/s'
        """
        texts = [format_seconds(self.seconds)]
        for what, rate in (("tokens", self.tokens_per_second), ("samples", self.samples_per_second)):
            if not math.isnan(rate):
                texts.append(f"{format_ratio(rate)} {what}/s")
        if not math.isnan(self.tflops_per_device):
            texts.append(f"{self.tflops_per_device:.3g} TFLOP/s{' per device' if self.devices > 1 else ''}")
        shares = ("MFU", self.mfu), ("HFU", self.hfu)
        texts += [f"{name} {format_percent(share)}" for name, share in shares if not math.isnan(share)]
        if self.unexplained > 0:
            texts.append(f"{format_share(self.unexplained)} unexplained")
        return ", ".join(texts)


def describe_unexplained(expected: float, measured: float) -> str:
    """Return the share of a step's seconds that a plan accounts for, as text.

    >>> describe_unexplained(0.25, 0.4)
    'the plan accounts for 62.5% of 400 ms a step; 37.5% is unexplained: run `fvflops explain` on a trace of it'
    >>> describe_unexplained(0.5, 0.4)
    'a step takes 400 ms, 80.0% of the planned 500 ms'
    """
    took, share = format_seconds(measured), _rate(expected, measured)
    if share >= 1:
        return f"a step takes {took}, {format_percent(measured, expected)} of the planned {format_seconds(expected)}"
    left = f"{format_share(1 - share)} is unexplained: run `fvflops explain` on a trace of it"
    return f"the plan accounts for {format_share(share)} of {took} a step; {left}"


# Figures of a step that add up over steps and devices.
_AMOUNTS = ("seconds", "macs", "model_flops", "hardware_flops", "samples", "tokens", "expected_seconds")


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else math.nan


def mean_figures(figures: Sequence[StepFigures]) -> StepFigures | None:
    """Return the mean of several steps, numbered as the last; their utilisations are weighted by their seconds."""
    if not figures:
        return None
    means = {name: fmean(getattr(one, name) for one in figures) for name in _AMOUNTS}
    for name in ("mfu", "hfu"):
        weighted = fmean(getattr(one, name) * one.seconds for one in figures)
        means[name] = _rate(weighted, means["seconds"])
    return StepFigures(figures[-1].step, **means, memory_peak=figures[-1].memory_peak, devices=figures[-1].devices)


def sum_ranks(ranks: Sequence[StepFigures]) -> StepFigures:
    """Return the figures of all ranks of a step together: sums, the longest time, the largest peak of memory."""
    seconds, expected = (max(getattr(one, name) for one in ranks) for name in ("seconds", "expected_seconds"))
    devices = sum(one.devices for one in ranks)
    sums = {name: sum(getattr(one, name) for one in ranks) for name in _AMOUNTS}
    for name in ("mfu", "hfu"):
        least = sum(getattr(one, name) * one.seconds * one.devices for one in ranks)
        sums[name] = _rate(least, devices * seconds)
    peak = max((one.memory_peak for one in ranks), key=lambda peak: (math.isnan(peak), peak))
    times = {"seconds": seconds, "expected_seconds": expected}
    return StepFigures(ranks[0].step, **{**sums, **times}, memory_peak=peak, devices=devices)


@dataclass(frozen=True, slots=True, repr=False)
class MeterSummary:
    """Mean step of a loop: `total` of all devices, and `ranks`, each of one device in the order of the ranks.

    `steps` is the number of steps. `memory_predicted` are the bytes at the peak of a training step of this rank's
    largest call, without a loss outside of the model; NaN where they cannot be predicted. `mfu` and `hfu` take it.

    >>> ranks = [StepFigures(8, 1.0, model_flops=3e12, mfu=0.25), StepFigures(8, 1.0, model_flops=3e12, mfu=0.5)]
    >>> print(MeterSummary(8, sum_ranks(ranks), tuple(ranks)))
    8 steps on 2 devices, each 1 s, 3 TFLOP/s per device, MFU 37.5%
    rank 0: 1 s, 3 TFLOP/s, MFU 25.0%
    rank 1: 1 s, 3 TFLOP/s, MFU 50.0%
    """

    steps: int
    total: StepFigures
    ranks: tuple[StepFigures, ...]
    memory_predicted: float = math.nan

    @property
    def seconds(self) -> float:
        """Mean duration of a step."""
        return self.total.seconds

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.total.devices

    @property
    def model_flops(self) -> float:
        """FLOPs of a step's forward and backward passes on all devices, 2 for a multiply-add."""
        return self.total.model_flops

    @property
    def hardware_flops(self) -> float:
        """All executed FLOPs of a step on all devices."""
        return self.total.hardware_flops

    def __repr__(self) -> str:
        return short_repr(self, format_quantity(self.steps, "step"), self.total.rates())

    def __str__(self) -> str:
        devices = f" on {format_quantity(self.devices, 'device')}, each" if self.devices > 1 else ","
        lines = [f"{format_quantity(self.steps, 'step')}{devices} {self.total.rates()}"]
        if self.devices > 1:
            lines += [f"rank {rank}: {figures.rates()}" for rank, figures in enumerate(self.ranks)]
        peaks = [("measured", self.total.memory_peak), ("predicted", self.memory_predicted)]
        known = [f"{format_bytes(round(peak))} {what}" for what, peak in peaks if not math.isnan(peak)]
        lines += [f"peak memory of a device: {', '.join(known)}"] * bool(known)
        if not math.isnan(self.total.unexplained):
            lines.append(describe_unexplained(self.total.expected_seconds, self.seconds))
        return "\n".join(lines)


_LOGGER = logging.getLogger("fvflops")
JUDGED = 20  # steps after which a loop is compared with its plan, by the second half of them: the first ones warm up
_WITHIN = 0.1  # share of a step that the models of kernels miss anyway
_MORE = 0.02  # share of the FLOPs


class PlannedTime(NamedTuple):
    """Seconds of a step as planned, and the model FLOPs of a GPU if each computes the whole model, else NaN."""

    seconds: float = math.nan
    model_flops: float = math.nan

    def compare(self, steps: Sequence[StepFigures]) -> None:
        """Log the share of some steps that is planned, as a warning if the rest is more than the error of a plan."""
        steps = steps[len(steps) // 2 :]
        measured, flops = median(one.seconds for one in steps), fmean(one.model_flops for one in steps)
        text = describe_unexplained(self.seconds, measured)
        more = flops / self.model_flops - 1
        if abs(more) > _MORE:  # False for NaN
            text += f"; a step has {format_share(abs(more))} {'more' if more > 0 else 'fewer'} FLOPs than planned"
        level = logging.WARNING if measured - self.seconds > _WITHIN * measured else logging.INFO
        _LOGGER.log(level, "StepMeter: median of %s: %s", format_quantity(len(steps), "step"), text)


def read_planned(expected: StepEstimate | float | None, *, has_default_counts: bool) -> PlannedTime:
    """Return the planned time of an estimate or of a number of seconds; its FLOPs are by the default convention."""
    if expected is None:
        return PlannedTime()
    if isinstance(expected, (int, float)):
        if not 0 < expected < math.inf:
            raise ValueError(f"expected seconds must be a number above 0, got {expected}")
        return PlannedTime(float(expected))
    if not hasattr(expected, "model_flops"):
        raise TypeError(f"expected is a StepEstimate or seconds, got {shown(expected)}")
    mesh = expected.plans[0].mesh
    is_whole = has_default_counts and all(AXES[axis].samples for axis, size in mesh.items() if size > 1)
    return PlannedTime(expected.seconds, (is_whole and expected.model_flops) or math.nan)
