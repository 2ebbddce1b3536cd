"""The estimated time of a training step, and where it goes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fvflops.devices.devices import Device
from fvflops.plan.rank_plan import RankPlan
from fvflops.plan.step_time.calibration import Efficiency, Network
from fvflops.plan.step_time.schedule_simulation import Simulation
from fvflops.reports.display import Displayed
from fvflops.text import record_repr, short_repr
from fvflops.units import format_percent, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StepEstimate(Displayed):
    """The estimated time of one training step of all ranks, in seconds.

    `plans` are the ranks of the pipeline that were simulated, first stage first; all other ranks do the same as one of
    them. `bound` is the time with an efficiency of 1: no kernel is faster than the device's peaks, and no launch takes
    time; the network is the same. `device`, `efficiency` and `network` are what the times rest on, `assumptions` what
    else does.

    In a step all ranks process `samples` samples: the first dimension of the first stage's first input, times the
    microbatches, times the ranks that have data of their own. If an input is a matrix of integers, these are token ids:
    `tokens` is their number, else None. `model_flops` is the mean of a GPU's FLOPs in forward and backward passes, 2
    for a multiply-add, without recomputation; `mfu` and `hfu` are the utilisations as functions of those names define
    them, both the mean over the pipeline's ranks. They count all pairs of masked attention, and the times only those
    that kernels compute: `mfu_of_unmasked` is the MFU of the unmasked pairs, as `mfu(attention="causal")`.

    Time on the compute stream of the slowest rank, the one with the index `slowest` in `plans`, adds up to `seconds`:

        kernels     it runs kernels; `by_phase` and `by_module` divide this time, each module without its submodules
        exposed     by mesh axis, it waits for collectives, at the end of the step too
        launching   it waits for the host to launch a kernel
        sending     it sends hidden states and their gradients to other pipeline stages
        bubble      it waits for other pipeline stages
        between     the time between steps, `efficiency.step`

    `communication` is by mesh axis how long its collectives take, whether anything waits for them or not.

    `unknown` is op → calls of those that take no time in the simulation: neither their bytes nor their multiply-adds
    are known, or they communicate and have no rule. `bytes_only` is op → calls of those without a formula in the
    convention `exact`, which take the time of their bytes. Both are sums over the steps of all `plans`.
    """

    _report = "fvflops.plan.step_time.step_time_report:estimate_report"
    _page = "fvflops.plan.step_time.step_time_report:estimate_page"

    plans: tuple[RankPlan, ...]
    seconds: float
    bound: float
    samples: int
    tokens: int | None
    model_flops: float
    mfu: float
    hfu: float
    slowest: int
    kernels: float
    bubble: float
    exposed: Mapping[str, float]
    communication: Mapping[str, float]
    launching: float
    sending: float
    by_phase: Mapping[str, float]
    by_module: Mapping[str, float]
    device: Device
    efficiency: Efficiency
    network: Network | None
    assumptions: tuple[str, ...] = ()
    time_settings: Mapping[str, Any] = field(default_factory=dict)
    unknown: Mapping[str, int] = field(default_factory=dict)
    bytes_only: Mapping[str, int] = field(default_factory=dict)
    mfu_of_unmasked: float = 0.0
    simulation: Simulation = field(repr=False)

    def __repr__(self) -> str:
        return short_repr(self, format_seconds(self.seconds), f"MFU {format_percent(self.mfu, 1)}", self.device.name)

    @property
    def gpus(self) -> int:
        """The number of devices: one for each rank."""
        return self.plans[0].world

    @property
    def between(self) -> float:
        """The time between steps."""
        return self.efficiency.step

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of all GPUs together, None where the inputs are not token ids."""
        return None if self.tokens is None else self.tokens / self.seconds

    @property
    def samples_per_second(self) -> float:
        """Samples per second of all GPUs together."""
        return self.samples / self.seconds

    @property
    def model_flops_per_second(self) -> float:
        """The mean of a GPU's FLOP/s in forward and backward passes, without recomputation."""
        return self.model_flops / self.seconds

    @property
    def bubble_share(self) -> float:
        """The share of the step in which a pipeline rank does none of its actions, the mean over the pipeline's ranks.

        Sends of hidden states are in this time too, the time between steps is not. With equal stages and no
        communication it is (p - 1)/(m + p - 1) for 1F1B with p stages and m microbatches.
        """
        busy = [sum(span.end - span.start for span in spans) for spans in self.simulation.spans]
        return 1 - sum(busy) / len(busy) / self.simulation.seconds

    @property
    def exposed_share(self) -> float:
        """The share of the step in which the compute stream of the slowest rank waits for collectives."""
        return sum(self.exposed.values()) / self.seconds

    @property
    def host_bound_share(self) -> float:
        """The share of the step in which the compute stream of the slowest rank waits for the host."""
        return self.launching / self.seconds

    @property
    def host_bound(self) -> dict[str, float]:
        """Kind of action → the share of its time in which the compute stream of the slowest rank waits for the host."""
        shares: dict[str, float] = {}
        spans = self.simulation.spans[self.slowest]
        for kind in dict.fromkeys(span.kind for span in spans):
            of_kind = [span for span in spans if span.kind == kind]
            seconds = sum(span.end - span.start for span in of_kind)
            shares[kind] = sum(span.starved for span in of_kind) / seconds if seconds else 0.0
        return shares

    @property
    def settings(self) -> dict[str, Any]:
        """What the estimate assumes, by name: the settings of the plan, and those of the time."""
        first, network = self.plans[0].settings, self.network
        return {
            **first,
            "device": self.device.name,
            **({} if network is None else {"network": network.name}),
            **self.time_settings,
        }

    def cost_to_train(self, tokens: float, *, price: float | None = None, watts: float | None = None) -> TrainingCost:
        """Return what training on a number of tokens takes on these GPUs: time, and cost and energy.

        `price` is that of a GPU hour, `watts` the power of a GPU. Without token ids in the inputs it raises ValueError.
        """
        if self.tokens is None:
            raise ValueError(
                f"the inputs ({self.plans[0].trace.info.inputs}) are not token ids, a matrix of integers, so tokens/s "
                "is not known"
            )
        return TrainingCost(
            tokens=tokens,
            seconds=tokens / self.tokens * self.seconds,
            steps=tokens / self.tokens,
            gpus=self.gpus,
            price=price,
            watts=watts,
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TrainingCost:
    """A training of `steps` steps in `seconds` on `gpus` GPUs, without restarts, evaluation and checkpoints.

    `price` is that of a GPU hour in any currency, `watts` the power of a GPU; both are given, not estimated, and None
    where they are not. `cost` and `energy` follow from them.

    >>> cost = TrainingCost(tokens=1e12, seconds=10 * 86400, steps=250_000, gpus=1000, price=2.5, watts=700)
    >>> cost.days, cost.gpu_hours, cost.cost, cost.energy
    (10.0, 240000.0, 600000.0, 168000.0)
    """

    tokens: float
    seconds: float
    steps: float
    gpus: int
    price: float | None = None
    watts: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("tokens", self.tokens), ("price", self.price), ("watts", self.watts)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be a number above 0; got {value}")

    __repr__ = record_repr

    @property
    def days(self) -> float:
        """The time in days."""
        return self.seconds / 86_400

    @property
    def gpu_hours(self) -> float:
        """The time in hours, times the GPUs."""
        return self.seconds / 3600 * self.gpus

    @property
    def cost(self) -> float | None:
        """GPU hours times their price, None without one."""
        return None if self.price is None else self.gpu_hours * self.price

    @property
    def energy(self) -> float | None:
        """The energy of all GPUs in kWh, None without their power."""
        return None if self.watts is None else self.gpu_hours * self.watts / 1000
