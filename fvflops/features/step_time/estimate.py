"""Estimate the time of a planned training step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

from fvflops.features.planning.plan import RankPlan
from fvflops.features.step_time.calibration import find_efficiency, find_network
from fvflops.features.step_time.efficiency import PEAK, Efficiency, KernelTimer
from fvflops.features.step_time.model import StepEstimate
from fvflops.features.step_time.network import Network
from fvflops.features.step_time.program import Run
from fvflops.features.step_time.step_program import StepProgram, read_step
from fvflops.features.utilisation.compute import hfu, mfu
from fvflops.features.utilisation.devices import Device, resolve_device


def estimate_step(
    ranks: RankPlan | Sequence[RankPlan],
    *,
    device: str | Device,
    network: str | Network | None = None,
    efficiency: Efficiency | None = None,
    fused: Collection[str] = (),
    host_waits: bool = False,
) -> StepEstimate:
    """Return the estimated time of a training step: of one rank, or of the ranks of a pipeline, first stage first.

    Each recorded kernel takes the longer of its FLOPs and its bytes on the device at its efficiency, each collective
    the time of its algorithm on the network, which the compute stream waits for where a kernel reads its result. The
    host launches kernels one after the other. `device` is a name, as for `mfu`, or a Device; `network` a name in
    networks.yaml, or a Network, which ranks that communicate need; `efficiency` is by default that of the device in
    efficiencies.yaml. `fused` and `host_waits` are those of `read_program` and `simulate`.
    """
    plans = (ranks,) if isinstance(ranks, RankPlan) else tuple(ranks)
    device = resolve_device(device)
    network = find_network(network) if isinstance(network, str) else network
    efficiency = find_efficiency(device.name) if efficiency is None else efficiency
    step = read_step(plans, fused=fused)
    timer = KernelTimer(device, efficiency)
    simulation = step.simulate(timer, network, host_waits=host_waits)
    bound = step.simulate(KernelTimer(device, PEAK), network)
    slowest = max(range(len(plans)), key=lambda rank: simulation.clocks[rank].end() - simulation.clocks[rank].idle)
    clocks = simulation.clocks[slowest]
    by_phase, by_module = _divide(step, slowest, timer)
    seconds = simulation.seconds + efficiency.step
    flops = [plan.flops() for plan in plans]
    count = len(plans)
    return StepEstimate(
        seconds=seconds,
        bound=bound.seconds,
        gpus=plans[0].world,
        mfu=sum(mfu(item, seconds, device=device) for item in flops) / count,
        hfu=sum(hfu(item, seconds, device=device) for item in flops) / count,
        slowest=slowest,
        kernels=sum(by_phase.values()),
        bubble=clocks.idle + seconds - clocks.end(),
        exposed=clocks.exposed,
        communication=clocks.busy,
        launching=clocks.starved,
        by_phase=by_phase,
        by_module=by_module,
        device=device.name,
        efficiency=efficiency,
        network=network,
        simulation=simulation,
    )


def _divide(step: StepProgram, rank: int, timer: KernelTimer) -> tuple[Counter[str], Counter[str]]:
    """Return the time of a rank's kernels by phase and by module, in seconds."""
    by_phase, by_module = Counter[str](), Counter[str]()
    for index, times in Counter(index for _, index in step.ranks[rank]).items():
        program = step.programs[index]
        calls = Counter(launch for item in program.items if isinstance(item, Run) for launch in item.items)
        for number, count in calls.items():
            launch = program.launches[number]
            seconds = times * count * timer.seconds(launch.kernel)
            by_phase[launch.phase] += seconds
            by_module[launch.module] += seconds
    return by_phase, by_module
