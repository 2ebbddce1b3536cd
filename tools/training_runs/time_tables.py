"""Times of the distinct kernels, collectives and transfers of many programs, as arrays over points of a fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from fvflops.devices.devices import Device
from fvflops.devices.kernel_models.figures import find_figures
from fvflops.plan.step_time.calibration import FRACTIONS, Efficiency, KernelTimer, Network
from fvflops.plan.step_time.kernel_times import Kernel
from fvflops.plan.step_time.pass_program import Collective, Program, Run, StreamRun
from fvflops.plan.step_time.schedule_simulation import FORWARD_PHASES, time_collective
from fvflops.plan.step_time.step_program import Message
from fvflops.trace.process_group import ProcessGroupSpec

# The index of a device, the number of GPUs of a node, and the Gbit/s between nodes for each.
Site = tuple[int, int, float]
# Figures to simulate with: an efficiency, of kernels measured alone, and the network of nodes of a device.
Point = tuple[Efficiency, Callable[[Device, int, float], Network]]


class Step(NamedTuple):
    """An item of a program: the index of its times in their table, and its part of a collective.

    `ahead` is the clock with the end of a gather for which another program waits.
    """

    kind: str
    times: int = 0
    number: int = 0
    stream: int = 0
    gate: int | None = None
    after: int | None = None
    ahead: int | None = None


class Times(NamedTuple):
    """Times by index and point: of runs of kernels as in TimedProgram, of collectives and of transfers."""

    device: np.ndarray
    with_host: np.ndarray
    host: np.ndarray
    collectives: np.ndarray
    launch: np.ndarray
    transfers: np.ndarray


class TimeTables:
    """The distinct kernels, runs of kernels, collectives, and transfers between stages, of which 0 takes no time."""

    def __init__(self) -> None:
        self._devices: list[Device] = []
        self._kernels: dict[tuple[int, Kernel], int] = {}
        self._runs: dict[tuple[tuple[int, bool], ...], int] = {}
        self._collectives: dict[tuple[Site, str, int, ProcessGroupSpec | None], tuple[int, Collective]] = {}
        self._transfers: dict[tuple[Site, tuple[Message, ...]], int] = {}

    def site(self, device: Device, gpus_per_node: int, node_gbps: float) -> Site:
        """Return the place of a run, with its device by index."""
        if device not in self._devices:
            self._devices.append(device)
        return self._devices.index(device), gpus_per_node, node_gbps

    def read(
        self, program: Program, site: Site, streams: Mapping[str, int], *, gathers: int, is_gathering: bool
    ) -> tuple[Step, ...]:
        """Return the steps of a program; `streams` is name → index of a stream of collectives.

        `gathers` is the clock of the first of its stage's gathers, which a gathering program begins.
        """
        chip = site[0]
        kernels = [
            (self._kernels.setdefault((chip, launch.kernel), len(self._kernels)), launch.phase in FORWARD_PHASES)
            for launch in program.launches
        ]
        steps: list[Step] = []
        by_number: dict[int, int] = {}  # collective → stream
        for item in program.items:
            if isinstance(item, Run):
                launches = tuple([kernels[index] for index in item.items])
                steps.append(Step("run", self._runs.setdefault(launches, len(self._runs))))
            elif isinstance(item, StreamRun):
                index = self._runs.setdefault((kernels[item.item],), len(self._runs))
                steps.append(Step("stream run", index, item.number, by_number[item.number]))
            elif isinstance(item, Collective):
                call = item.call
                key = site, call.collective, call.payload, call.group
                index, _ = self._collectives.setdefault(key, (len(self._collectives), item))
                stream = by_number[item.number] = streams[str(call.group)]
                ahead = gathers + item.number if is_gathering else None
                steps.append(Step("collective", index, item.number, stream, item.gate, item.after, ahead))
            else:
                ahead = None if item.group is None else gathers + item.number
                steps.append(Step("wait", number=item.number, ahead=ahead))
        return tuple(steps)

    def add_transfer(self, site: Site, messages: tuple[Message, ...]) -> int:
        """Return the index of a transfer of hidden states."""
        return self._transfers.setdefault((site, messages), 1 + len(self._transfers)) if messages else 0

    def at(self, points: Sequence[Point]) -> Times:
        device, with_host, host = self._time_runs(points)
        networks = {
            site: [network(self._devices[site[0]], *site[1:]) for _, network in points]
            for site in {*(key[0] for key in self._collectives), *(key[0] for key in self._transfers)}
        }
        collectives = [
            [
                time_collective(item, efficiency, network)
                for (efficiency, _), network in zip(points, networks[site], strict=True)
            ]
            for (site, *_), (_, item) in self._collectives.items()
        ]
        transfers = [
            [sum(network.seconds(*message) for message in messages) for network in networks[site]]
            for site, messages in self._transfers
        ]
        return Times(
            device,
            with_host,
            host,
            np.array(collectives).reshape(-1, len(points)),
            np.array([efficiency.launch_collective for efficiency, _ in points]),
            np.array([[0.0] * len(points), *transfers]),
        )

    def _time_runs(self, points: Sequence[Point]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the times of runs: of their kernels, from the host's start to their end, and of the host."""
        lengths = [len(launches) for launches in self._runs]
        first = np.cumsum([0, *lengths[:-1]])
        last = np.cumsum(lengths) - 1
        kernels = np.array([kernel for launches in self._runs for kernel, _ in launches])
        forward = np.array([is_forward for launches in self._runs for _, is_forward in launches])
        table = np.empty((3, len(self._runs), len(points)))
        timers = [KernelTimer(device, Efficiency(kernels=find_figures(device))) for device in self._devices]
        alone = np.array([timers[chip].alone(kernel) for chip, kernel in self._kernels])
        kinds = [FRACTIONS[kernel.kind] for _, kernel in self._kernels]
        for point, (efficiency, _) in enumerate(points):
            fractions = np.array([getattr(efficiency, kind) for kind in kinds])
            seconds = (efficiency.kernel + alone / fractions)[kernels]
            launching = np.where(forward, efficiency.launch, efficiency.launch_backward)
            ends, launched = np.cumsum(seconds), np.cumsum(launching)
            before, before_launched = (ends - seconds)[first], (launched - launching)[first]
            # A kernel starts when it is launched and the one before it has ended: the latest chain decides.
            chains = np.maximum.reduceat(launched - (ends - seconds), first)
            table[:, :, point] = (
                ends[last] - before,
                chains + ends[last] - before_launched,
                launched[last] - before_launched,
            )
        return table[0], table[1], table[2]
