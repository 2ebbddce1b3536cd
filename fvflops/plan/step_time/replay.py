"""Replay programs on a rank's host, compute stream and communication streams."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from fvflops.plan.step_time.efficiency import Efficiency, KernelTimer
from fvflops.plan.step_time.network import Network
from fvflops.plan.step_time.pass_program import Collective, Program, Run, StreamRun

# The host launches their ops in `Efficiency.launch`, others in `launch_backward`.
FORWARD_PHASES = ("forward", "recompute")


@dataclass(slots=True)
class Clocks:
    """When the host, the compute stream and the stream of each process group are free, in seconds.

    `exposed` is by group how long the compute stream has waited for its collectives, `busy` how long these took,
    `starved` how long the compute stream has waited for the host, and `idle` for other pipeline stages. `log`, if it is
    a list, gets the group, the beginning and the end of each collective.
    """

    host: float = 0.0
    compute: float = 0.0
    streams: dict[str, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    starved: float = 0.0
    idle: float = 0.0
    log: list[tuple[str, float, float]] | None = None

    def end(self) -> float:
        """Return when all streams are free."""
        return max(self.compute, *self.streams.values()) if self.streams else self.compute

    def finish_collectives(self) -> None:
        """Let the compute stream wait for all collectives, as before an optimizer's step."""
        for name, end in self.streams.items():
            delay = max(0.0, end - self.compute)
            self.exposed[name] = self.exposed.get(name, 0.0) + delay
            self.compute += delay

    def wait(self, until: float) -> None:
        """Let the compute stream wait for another stage."""
        self.idle += max(0.0, until - self.compute)
        self.compute = max(self.compute, until)


class _TimedRun(NamedTuple):
    """A run of kernels: the time that they take, that from the host's start to their end, and the host's time."""

    device: float
    with_host: float
    host: float


class _TimedCollective(NamedTuple):
    number: int
    stream: str
    seconds: float
    gate: int | None
    after: int | None


class _TimedStreamRun(NamedTuple):
    number: int
    stream: str
    seconds: float
    host: float


class _TimedWait(NamedTuple):
    number: int
    stream: str


_TimedItem = _TimedRun | _TimedCollective | _TimedStreamRun | _TimedWait


@dataclass(frozen=True, slots=True)
class TimedProgram:
    """A program with the times of its kernels and collectives; `launch` is the host's time for a collective."""

    items: tuple[_TimedItem, ...]
    launch: float

    def replay(self, clocks: Clocks) -> None:
        """Advance the clocks by one execution of the program."""
        ends: dict[int, float] = {}
        waited: dict[int, float] = {}
        for item in self.items:
            if isinstance(item, _TimedRun):
                free = clocks.compute + item.device
                launched = clocks.host + item.with_host
                clocks.starved += max(0.0, launched - free)
                clocks.compute = max(free, launched)
                clocks.host += item.host
            elif isinstance(item, _TimedCollective):
                clocks.host += self.launch
                if item.after is not None:
                    ready = ends[item.after]
                else:
                    ready = clocks.compute if item.gate is None else waited.get(item.gate, 0.0)
                begin = max(ready, clocks.host, clocks.streams.get(item.stream, 0.0))
                clocks.streams[item.stream] = ends[item.number] = begin + item.seconds
                clocks.busy[item.stream] = clocks.busy.get(item.stream, 0.0) + item.seconds
                if clocks.log is not None:
                    clocks.log.append((item.stream, begin, begin + item.seconds))
            elif isinstance(item, _TimedStreamRun):
                clocks.host += item.host
                begin = max(ends[item.number], clocks.host, clocks.streams[item.stream])
                clocks.streams[item.stream] = ends[item.number] = begin + item.seconds
            else:
                delay = max(0.0, ends[item.number] - clocks.compute)
                clocks.exposed[item.stream] = clocks.exposed.get(item.stream, 0.0) + delay
                clocks.compute += delay
                waited[item.number] = clocks.compute


def time_program(program: Program, timer: KernelTimer, network: Network | None) -> TimedProgram:
    """Return a program with its times; a collective without a network raises ValueError."""
    efficiency = timer.efficiency
    seconds = [timer.seconds(launch.kernel) for launch in program.launches]
    hosts = [
        efficiency.launch if launch.phase in FORWARD_PHASES else efficiency.launch_backward
        for launch in program.launches
    ]
    runs: dict[tuple[int, ...], _TimedRun] = {}
    streams: dict[int, str] = {}
    items: list[_TimedItem] = []
    for item in program.items:
        if isinstance(item, Run):
            timed = runs.get(item.items)
            if timed is None:
                timed = runs[item.items] = _time_run(item.items, seconds, hosts)
            items.append(timed)
        elif isinstance(item, Collective):
            streams[item.number] = str(item.call.group)
            items.append(
                _TimedCollective(
                    *(item.number, streams[item.number], time_collective(item, efficiency, network)),
                    *(item.gate, item.after),
                )
            )
        elif isinstance(item, StreamRun):
            stream = streams[item.number]
            items.append(_TimedStreamRun(item.number, stream, seconds[item.item], hosts[item.item]))
        else:
            items.append(_TimedWait(item.number, streams[item.number]))
    return TimedProgram(tuple(items), efficiency.launch_collective)


def _time_run(items: tuple[int, ...], seconds: list[float], hosts: list[float]) -> _TimedRun:
    host = device = with_host = 0.0
    for item in items:
        host += hosts[item]
        # The kernel starts when it is launched and the one before it has ended.
        with_host = max(with_host, host) + seconds[item]
        device += seconds[item]
    return _TimedRun(device, with_host, host)


def time_collective(item: Collective, efficiency: Efficiency, network: Network | None) -> float:
    """Return the seconds of a collective; one without a network, or with a group of unknown size, raises ValueError."""
    call = item.call
    if call.group is None:
        raise ValueError(f"{call.collective} of {item.module or 'the model'} has a process group of unknown size")
    if call.group.size < 2:
        return 0.0
    if network is None:
        raise ValueError(f"{call.collective} over {call.group} needs a network: pass network= (--network)")
    return efficiency.kernel + network.seconds(call.collective, call.payload, call.group)
