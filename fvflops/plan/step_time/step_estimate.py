"""Estimate the time of a planned training step, and where it goes."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.devices.devices import Device
from fvflops.devices.measured_errors import ErrorEstimate, expect_step_error
from fvflops.devices.utilisation import least_seconds, model_flops
from fvflops.garbage_collector import gc_paused
from fvflops.plan.memory.step_settings import given
from fvflops.plan.parallel_axes import count_shares
from fvflops.plan.rank_plan import RankPlan, StepPlan
from fvflops.plan.rank_step import Action
from fvflops.plan.sharding.replicas import AVERAGING
from fvflops.plan.step_time.buckets import describe_buckets
from fvflops.plan.step_time.calibration import PEAK, Efficiency, KernelTimer, Network, Timing, resolve_timing
from fvflops.plan.step_time.pass_program import Run
from fvflops.plan.step_time.schedule_simulation import Simulation, by_axis
from fvflops.plan.step_time.step_program import StepProgram, read_step
from fvflops.reports.display import Displayed
from fvflops.text import explaining_arguments, record_repr, short_repr
from fvflops.trace import TensorSpec
from fvflops.units import format_percent, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class StepEstimate(Displayed):
    """The estimated time of one training step of all ranks, in seconds.

    `plans` are the ranks of the pipeline that were simulated, first stage first; all other ranks do the same as one of
    them. `bound` is the time with an efficiency of 1: no kernel is faster than the device's peaks, and no launch takes
    time; the network is the same. The times depend on `device`, `efficiency`, `network` and `assumptions`.

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

    `unknown` is op → calls for ops that take no time in the simulation: neither their bytes nor their multiply-adds are
    known, or they communicate and have no rule. `bytes_only` is op → calls for ops without a formula in the convention
    `exact`, which take the time of their bytes. Both are sums over the steps of all `plans`.
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
        return short_repr(self, format_seconds(self.seconds), f"MFU {format_percent(self.mfu)}", self.device.name)

    @property
    def gpus(self) -> int:
        """The number of devices: one for each rank."""
        return self.plans[0].world

    @property
    def between(self) -> float:
        """The time between steps."""
        return self.efficiency.step

    @property
    def error(self) -> ErrorEstimate:
        """The error to expect of the times, from measured runs that are most like these."""
        is_one_node = self.network is None or self.gpus <= self.network.gpus_per_node
        return expect_step_error(self.efficiency.software, self.device, is_one_node=is_one_node)

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
        communication it is (p - 1)/(m + p - 1) for 1F1B with p stages and m microbatches. A rank alone has none.
        """
        busy = [sum(span.end - span.start for span in spans) for spans in self.simulation.spans]
        return 1 - sum(busy) / len(busy) / self.simulation.seconds if len(busy) > 1 else 0.0

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
        """The estimate's assumptions, by name: the settings of the plan, then of the time."""
        network = {} if self.network is None else {"network": self.network.name}
        return {**self.plans[0].settings, "device": self.device.name, **network, **self.time_settings}

    def cost_to_train(self, tokens: float, *, price: float | None = None, watts: float | None = None) -> TrainingCost:
        """Return the time, cost and energy of training on a number of tokens on these GPUs.

        `price` is for a GPU hour, `watts` the power of a GPU. Without token ids in the inputs it raises ValueError.
        """
        if self.tokens is None:
            raise ValueError(
                f"the inputs ({self.plans[0].trace.info.inputs}) are not token ids, a matrix of integers, so tokens/s "
                "is not known"
            )
        steps = tokens / self.tokens
        figures: dict[str, Any] = {"gpus": self.gpus, "price": price, "watts": watts}
        return TrainingCost(tokens=tokens, seconds=steps * self.seconds, steps=steps, **figures)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TrainingCost:
    """A training of `steps` steps in `seconds` on `gpus` GPUs, without restarts, evaluation and checkpoints.

    `price` is for a GPU hour in any currency, `watts` the power of a GPU; both are given, not estimated, and None
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


# The module that is a rank's first stage: a rank with several stages has one for each.
_ROOTS = (("module", ""), ("module", "stage0"))


@gc_paused()
@explaining_arguments
def estimate_step(
    ranks: StepPlan | RankPlan | Sequence[RankPlan],
    *,
    device: str | Device,
    network: str | Network | None = None,
    efficiency: Efficiency | None = None,
    fused: Collection[str] = (),
    host_waits: bool = False,
    bucket_cap_mb: float | None = None,
) -> StepEstimate:
    """Return the estimated time of a training step on one rank, or on a pipeline's ranks, first stage first.

    Each recorded kernel takes the longer of its FLOPs and its bytes on the device at its efficiency, each collective
    the time of its algorithm on the network, which the compute stream waits for where a kernel reads its result. The
    host launches kernels one after the other. `device` is a name, as for `mfu`, or a Device; `network` a name in
    networks.yaml, or a Network: for several ranks by default the network of the device's usual nodes, if known;
    `efficiency` is by default the device's in efficiencies.yaml. `fused` and `host_waits` are as in `read_program` and
    `simulate`.

    Replicas without FSDP2 average their gradients as DistributedDataParallel does: in buckets of `bucket_cap_mb` MiB
    during the last microbatch's backward pass, by default a first one of 1 MiB and others of 25 MiB; with 0 in one
    piece after it. A sharded optimizer has Megatron-Core's buckets, also during the first forward pass (parameters).

    >>> import torch
    >>> from fvflops import plan_step
    >>> from fvflops.zoo import build
    >>> tokens = torch.ones(1, 16, dtype=torch.int64)
    >>> step = plan_step(build("llama_tiny", device="meta"), tokens, mesh={"dp": 4}, microbatches=2)
    >>> estimate = estimate_step(step, device="H100", network="HGX H100 3200G")
    >>> estimate.gpus, estimate.tokens, estimate.seconds > estimate.bound
    (4, 128, True)
    """
    plans = _plans_of(ranks)
    options: dict[str, Any] = {"fused": fused, "host_waits": host_waits, "bucket_cap_mb": bucket_cap_mb}
    timing = resolve_timing(device, network, efficiency, plans[0].world, **options)
    return estimate_program(plans, read_step(plans, fused=fused, bucket_cap_mb=bucket_cap_mb), timing)


def estimate_program(plans: tuple[RankPlan, ...], step: StepProgram, timing: Timing) -> StepEstimate:
    """Return the estimated time of the step of a pipeline's ranks, whose program `read_step` returned."""
    simulation = step.simulate(timing.timer(), timing.network, host_waits=timing.host_waits, log=True)
    seconds = simulation.seconds + timing.efficiency.step
    (samples, tokens), flops = _count_samples(plans), _count_flops(plans)
    least = partial(least_seconds, device=timing.device, float32_matmul=timing.efficiency.float32_matmul)
    busy = [clocks.end() - clocks.idle for clocks in simulation.clocks]
    slowest = busy.index(max(busy))
    return StepEstimate(
        plans=plans,
        seconds=seconds,
        bound=step.simulate(timing.timer(PEAK), timing.network).seconds,
        samples=samples,
        tokens=tokens,
        model_flops=_mean(flops, model_flops),
        mfu=_mean(flops, partial(least, model_only=True)) / seconds,
        hfu=_mean(flops, partial(least, model_only=False)) / seconds,
        mfu_of_unmasked=_mean(flops, partial(least, model_only=True, attention="causal")) / seconds,
        device=timing.device,
        efficiency=timing.efficiency,
        network=timing.network,
        assumptions=tuple(_list_assumptions(plans, timing)),
        time_settings=_list_settings(plans, timing),
        unknown=step.count("unknown"),
        bytes_only=step.count("bytes_only"),
        simulation=simulation,
        slowest=slowest,
        **divide_rank(step, simulation, timing.timer(), slowest),
    )


def divide_rank(step: StepProgram, simulation: Simulation, timer: KernelTimer, rank: int) -> dict[str, Any]:
    """Return the fields of a StepEstimate that divide the time of a rank, by its index in `plans`."""
    clocks = simulation.clocks[rank]
    by_phase, by_module = defaultdict[str, float](float), defaultdict[str, float](float)
    for index, times in Counter(index for _, index in step.ranks[rank]).items():
        program = step.programs[index]
        calls = Counter(launch for item in program.items if isinstance(item, Run) for launch in item.items)
        for number, count in calls.items():
            launch = program.launches[number]
            seconds = times * count * timer.seconds(launch.kernel)
            by_phase[launch.phase] += seconds
            by_module[launch.module] += seconds
    kernels, exposed = sum(by_phase.values()), clocks.exposed_by_axis()
    bubble = clocks.idle + simulation.seconds - clocks.end()
    return {
        "kernels": kernels,
        "by_phase": dict(by_phase),
        "by_module": dict(by_module),
        "bubble": bubble,
        "exposed": exposed,
        "communication": by_axis(clocks.busy),
        "launching": clocks.starved,
        # The rest of the compute stream is sends.
        "sending": max(simulation.seconds - kernels - sum(exposed.values()) - clocks.starved - bubble, 0.0),
    }


def _plans_of(ranks: StepPlan | RankPlan | Sequence[RankPlan]) -> tuple[RankPlan, ...]:
    if isinstance(ranks, StepPlan):
        return ranks.ranks
    plans = (ranks,) if isinstance(ranks, RankPlan) else tuple(ranks) if isinstance(ranks, Iterable) else ()
    if not plans or not isinstance(plans[0], RankPlan):
        raise ValueError("there are no ranks to estimate: pass a StepPlan of plan_step")
    stages = plans[0].mesh.get("pp", 1)
    if len(plans) != stages:
        raise ValueError(
            f"the pipeline has {stages} ranks, and {len(plans)} are given: plan all of them by plan_step, since each "
            "waits for the others"
        )
    return plans


def _count_flops(plans: Sequence[RankPlan]) -> list[FlopCountAnalysis]:
    """Return the FLOPs of each plan, one analysis for plans whose steps are the same calls."""
    # Traces of ranks with equal stages differ in the names of groups only.
    keys = [(id(plan.recorded.events), frozenset(plan.trace.calls.items())) for plan in plans]
    known = {key: plan.flops() for key, plan in zip(keys, plans, strict=True)}
    return [known[key] for key in keys]


def _mean(flops: Sequence[FlopCountAnalysis], figure: Callable[[FlopCountAnalysis], float]) -> float:
    figures = {id(item): figure(item) for item in dict.fromkeys(flops)}
    return sum(figures[id(item)] for item in flops) / len(flops)


def _count_samples(plans: Sequence[RankPlan]) -> tuple[int, int | None]:
    """Return the samples and the tokens of a step of all ranks; None where the inputs are not token ids."""
    first = next(plan for plan in plans if 0 in plan.step.stages)
    inputs = _read_inputs(first)
    microbatches = sum(action.kind == "forward" and action.stage == 0 for action in first.step.actions)
    ids = next((spec for spec in inputs if spec.dtype in ("int64", "int32") and len(spec.shape) == 2), None)
    samples = next((spec.shape[0] for spec in inputs if spec.shape), 1) * count_shares(first.mesh, "samples")
    tokens = None if ids is None else ids.numel * count_shares(first.mesh, "tokens")
    return microbatches * samples, None if tokens is None else microbatches * tokens


def _read_inputs(plan: RankPlan) -> list[TensorSpec]:
    recorded = plan.step.pass_of(Action("forward", 0, 0))
    trace = recorded.trace
    roots = {index for index, region in enumerate(trace.regions) if (region.kind, region.name) in _ROOTS}
    for event in reversed((trace.events or ())[recorded.begin : recorded.end]):
        if event.kind == "exit" and trace.region_signatures[event.item].region in roots:
            return [value for value in trace.region_signatures[event.item].inputs if isinstance(value, TensorSpec)]
    return []


def _list_settings(plans: Sequence[RankPlan], timing: Timing) -> dict[str, Any]:
    kinds = {action.kind for plan in plans for action in plan.step.actions}
    cap, buckets = timing.bucket_cap_mb, {}
    if "allreduce" in kinds:
        buckets = {"bucket_cap_mb": "1, then 25" if cap is None else cap}
    elif not kinds.isdisjoint(AVERAGING):
        size = "none, without overlap" if cap == 0 else f"{cap} MiB"
        buckets = {"gradient_buckets": "Megatron-Core's sizes" if cap is None else size}
    return given(
        efficiency=timing.efficiency.source.partition(";")[0],
        float32_products=timing.efficiency.float32_matmul,
        host_waits=True if timing.host_waits else None,
        fused=_short_names(timing.fused) if timing.fused else None,
        **buckets,
    )


def _short_names(classes: Iterable[str]) -> list[str]:
    return sorted(name.rpartition(".")[2] for name in classes)


def _list_assumptions(plans: Sequence[RankPlan], timing: Timing) -> Iterator[str]:
    mesh = plans[0].mesh
    kinds = {action.kind for plan in plans for action in plan.step.actions}
    if plans[0].world > len(plans):
        yield "ranks with other coordinates take as long as the simulated ones: no straggler, equal shares of the data"
    yield "kernels run one after the other, each as long as the slower of its FLOPs and its bytes, none of them cached"
    yield f"kernels are PyTorch's on {plans[0].recorded.info.device}, not compiled"
    if timing.efficiency.launch:
        yield "the host runs ahead of the device, except where a kernel is shorter than its launch"
    if "given" in plans[0].trace.about:
        given = plans[0].trace.about["given"]
        yield f"the host does not wait for the values of data-dependent ops, for which are given {given}"
    if timing.network is not None:
        yield (
            "collectives of one process group run in order, in parallel with kernels and other groups' collectives, "
            "and slow none of them"
        )
    if not kinds.isdisjoint(AVERAGING):
        yield describe_buckets(timing.bucket_cap_mb, is_sharded="allreduce" not in kinds)
    if mesh.get("fsdp", 1) > 1:
        yield "FSDP2 gathers the next module's parameters during the current one's kernels, as it issues them"
    if mesh.get("pp", 1) > 1:
        yield "a send of hidden states occupies the sender's compute stream until it has arrived"
    if timing.host_waits:
        yield "the host waits for the device before each action"
    if timing.fused:
        yield f"in one kernel each: calls of {', '.join(_short_names(timing.fused))}"
    yield from plans[0].describe_offload()
    if "optimizer" not in kinds:
        yield "the optimizer's step is not included"
    yield "data loading, logging, checkpoints and evaluation are not included"
