"""Estimate the time of a planned training step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from fvflops.devices.devices import Device, resolve_device
from fvflops.devices.utilisation import hfu, mfu, model_flops
from fvflops.plan.rank_plan import RankPlan, StepPlan
from fvflops.plan.rank_step import Action
from fvflops.plan.sharding.expert_parallel import dense_axes
from fvflops.plan.step_time.buckets import describe_buckets
from fvflops.plan.step_time.calibration import assume_network, find_efficiency, find_network
from fvflops.plan.step_time.efficiency import PEAK, Efficiency, KernelTimer
from fvflops.plan.step_time.network import Network
from fvflops.plan.step_time.pass_program import Run
from fvflops.plan.step_time.replay import Clocks
from fvflops.plan.step_time.step_estimate import StepEstimate
from fvflops.plan.step_time.step_program import StepProgram, read_step
from fvflops.trace import TensorSpec

# Axes along which ranks process the same samples, and the same tokens.
_SAME_SAMPLES = ("pp", "tp", "cp")
_SAME_TOKENS = ("pp", "tp")
# The module that is a rank's first stage: a rank with several stages has one for each.
_ROOTS = (("module", ""), ("module", "stage0"))


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
    """Return the estimated time of a training step: of a pipeline's ranks, first stage first, or of one rank.

    Each recorded kernel takes the longer of its FLOPs and its bytes on the device at its efficiency, each collective
    the time of its algorithm on the network, which the compute stream waits for where a kernel reads its result. The
    host launches kernels one after the other. `device` is a name, as for `mfu`, or a Device; `network` a name in
    networks.yaml, or a Network: for several ranks by default that of NVIDIA's nodes of an A100, H100 or H200;
    `efficiency` is by default that of the device in efficiencies.yaml. `fused` and `host_waits` are those of
    `read_program` and `simulate`.

    Replicas without FSDP2 average their gradients as DistributedDataParallel does: in buckets of `bucket_cap_mb` MiB
    beside the last microbatch's backward pass, by default a first one of 1 MiB and others of 25 MiB; with 0 in one
    piece after that pass.

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
    device = resolve_device(device)
    network = find_network(network) if isinstance(network, str) else network
    if network is None and plans[0].world > 1:
        network = assume_network(device)
    efficiency = find_efficiency(device.name) if efficiency is None else efficiency
    step = read_step(plans, fused=fused, bucket_cap_mb=bucket_cap_mb)
    timer = KernelTimer(device, efficiency)
    simulation = step.simulate(timer, network, host_waits=host_waits, log=True)
    bound = step.simulate(KernelTimer(device, PEAK), network)
    seconds = simulation.seconds + efficiency.step
    slowest = max(range(len(plans)), key=lambda rank: simulation.clocks[rank].end() - simulation.clocks[rank].idle)
    clocks = simulation.clocks[slowest]
    by_phase, by_module = _divide(step, slowest, timer)
    kernels = sum(by_phase.values())
    exposed = _find_exposed(clocks)
    bubble = clocks.idle + simulation.seconds - clocks.end()
    samples, tokens = _count_samples(plans)
    flops = [plan.flops() for plan in plans]
    return StepEstimate(
        plans=plans,
        seconds=seconds,
        bound=bound.seconds,
        samples=samples,
        tokens=tokens,
        model_flops=_mean(model_flops(item) for item in flops),
        mfu=_mean(mfu(item, seconds, device=device) for item in flops),
        hfu=_mean(hfu(item, seconds, device=device) for item in flops),
        mfu_of_unmasked=_mean(mfu(item, seconds, device=device, attention="causal") for item in flops),
        slowest=slowest,
        kernels=kernels,
        bubble=bubble,
        exposed=exposed,
        communication=_by_axis(clocks.busy),
        launching=clocks.starved,
        # What else the compute stream does is to send.
        sending=max(simulation.seconds - kernels - sum(exposed.values()) - clocks.starved - bubble, 0.0),
        by_phase=by_phase,
        by_module=by_module,
        device=device,
        efficiency=efficiency,
        network=network,
        assumptions=tuple(_list_assumptions(plans, efficiency, network, fused, host_waits, bucket_cap_mb)),
        time_settings=_list_settings(plans, efficiency, fused, host_waits, bucket_cap_mb),
        unknown=step.unknown(),
        bytes_only=step.bytes_only(),
        simulation=simulation,
    )


def _plans_of(ranks: StepPlan | RankPlan | Sequence[RankPlan]) -> tuple[RankPlan, ...]:
    if isinstance(ranks, StepPlan):
        return ranks.ranks
    plans = (ranks,) if isinstance(ranks, RankPlan) else tuple(ranks)
    if not plans:
        raise ValueError("there are no ranks to estimate: pass a StepPlan of plan_step")
    stages = plans[0].mesh.get("pp", 1)
    if len(plans) != stages:
        raise ValueError(
            f"the pipeline has {stages} ranks, and {len(plans)} are given: plan all of them by plan_step, since each "
            "waits for the others"
        )
    return plans


def _mean(values: Iterator[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def _divide(step: StepProgram, rank: int, timer: KernelTimer) -> tuple[dict[str, float], dict[str, float]]:
    """Return the time of a rank's kernels by phase and by module, in seconds."""
    by_phase: dict[str, float] = {}
    by_module: dict[str, float] = {}
    for index, times in Counter(index for _, index in step.ranks[rank]).items():
        program = step.programs[index]
        calls = Counter(launch for item in program.items if isinstance(item, Run) for launch in item.items)
        for number, count in calls.items():
            launch = program.launches[number]
            seconds = times * count * timer.seconds(launch.kernel)
            by_phase[launch.phase] = by_phase.get(launch.phase, 0.0) + seconds
            by_module[launch.module] = by_module.get(launch.module, 0.0) + seconds
    return by_phase, by_module


def _find_exposed(clocks: Clocks) -> dict[str, float]:
    """Return by axis how long the compute stream waits for collectives, at the end of the step too."""
    exposed = _by_axis(clocks.exposed)
    if clocks.end() > clocks.compute:
        last = max(clocks.streams, key=lambda stream: clocks.streams[stream])
        axis = axis_of(last)
        exposed[axis] = exposed.get(axis, 0.0) + clocks.end() - clocks.compute
    return exposed


def _by_axis(by_stream: Mapping[str, float]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for stream, seconds in by_stream.items():
        sums[axis_of(stream)] = sums.get(axis_of(stream), 0.0) + seconds
    return sums


def axis_of(stream: str) -> str:
    """Return the mesh axis of a stream of collectives, which has the name of its process group.

    >>> from fvflops.trace.process_group import ProcessGroupSpec
    >>> axis_of(str(ProcessGroupSpec("5", 8, "tp", 0, 1)))
    'tp'
    """
    return stream.rpartition("=")[0] or stream


def _count_samples(plans: Sequence[RankPlan]) -> tuple[int, int | None]:
    """Return the samples and the tokens of a step of all ranks; None where the inputs are not token ids."""
    first = next(plan for plan in plans if 0 in plan.step.stages)
    inputs = _read_inputs(first)
    microbatches = sum(action.kind == "forward" and action.stage == 0 for action in first.step.actions)

    def times(same: Collection[str]) -> int:
        return microbatches * math.prod(size for axis, size in dense_axes(first.mesh).items() if axis not in same)

    ids = next((spec for spec in inputs if spec.dtype in ("int64", "int32") and len(spec.shape) == 2), None)
    samples = next((spec.shape[0] for spec in inputs if spec.shape), 1)
    return samples * times(_SAME_SAMPLES), None if ids is None else ids.numel * times(_SAME_TOKENS)


def _read_inputs(plan: RankPlan) -> list[TensorSpec]:
    """Return the tensors with which the first stage is called."""
    recorded = plan.step.pass_of(Action("forward", 0, 0))
    trace = recorded.trace
    roots = {index for index, region in enumerate(trace.regions) if (region.kind, region.name) in _ROOTS}
    for event in reversed((trace.events or ())[recorded.begin : recorded.end]):
        if event.kind == "exit" and trace.region_signatures[event.item].region in roots:
            return [value for value in trace.region_signatures[event.item].inputs if isinstance(value, TensorSpec)]
    return []


def _list_settings(
    plans: Sequence[RankPlan],
    efficiency: Efficiency,
    fused: Collection[str],
    host_waits: bool,
    bucket_cap_mb: float | None,
) -> dict[str, Any]:
    """Return the settings of the time, without those that do not apply."""
    settings: dict[str, Any] = {"efficiency": efficiency.source.partition(";")[0]}
    if host_waits:
        settings["host_waits"] = True
    if fused:
        settings["fused"] = sorted(name.rpartition(".")[2] for name in fused)
    if any(action.kind == "allreduce" for plan in plans for action in plan.step.actions):
        settings["bucket_cap_mb"] = "1, then 25" if bucket_cap_mb is None else bucket_cap_mb
    return settings


def _list_assumptions(
    plans: Sequence[RankPlan],
    efficiency: Efficiency,
    network: Network | None,
    fused: Collection[str],
    host_waits: bool,
    bucket_cap_mb: float | None,
) -> Iterator[str]:
    """Yield a sentence for each thing that the times rest on besides the efficiency and the network."""
    mesh = plans[0].mesh
    kinds = {action.kind for plan in plans for action in plan.step.actions}
    if plans[0].world > len(plans):
        yield "ranks with other coordinates take as long as those simulated: no straggler, equal shares of the data"
    yield "kernels run one after the other, each as long as the slower of its FLOPs and its bytes, none of them cached"
    yield f"kernels are those of PyTorch on {plans[0].recorded.info.device}, not compiled"
    if efficiency.launch:
        yield "the host runs ahead of the device, except where a kernel is shorter than its launch"
    if "given" in plans[0].trace.about:
        given = plans[0].trace.about["given"]
        yield f"the host does not wait for the values of data-dependent ops, for which are given {given}"
    if network is not None:
        yield (
            "collectives of one process group run one after the other, beside kernels and other groups' collectives, "
            "and slow none of them"
        )
    if "allreduce" in kinds:
        yield describe_buckets(bucket_cap_mb)
    if {"fsdp"} & {axis for axis, size in mesh.items() if size > 1}:
        yield "FSDP2 gathers the next module's parameters beside the current one's kernels, as it issues them"
    if mesh.get("pp", 1) > 1:
        yield "a send of hidden states occupies the sender's compute stream until it has arrived"
    if host_waits:
        yield "the host waits for the device before each action"
    if fused:
        yield f"in one kernel each: calls of {', '.join(sorted(name.rpartition('.')[2] for name in fused))}"
    yield from plans[0].describe_offload()
    if "optimizer" not in kinds:
        yield "the optimizer's step is not included"
    yield "data loading, logging, checkpoints and evaluation are not included"
