"""Simulate the ranks of a pipeline: each runs the programs of its actions in order, when their inputs have arrived."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fvflops.plan.pipeline_schedules import ScheduleError
from fvflops.plan.rank_step import Action
from fvflops.plan.sharding.replicas import GATHERING
from fvflops.plan.step_time.calibration import Efficiency, KernelTimer, Network
from fvflops.plan.step_time.pass_program import Collective, Item, Program, Run, StreamRun, Wait

# Kind of action → the pass whose result it sends, a hidden state or its gradient, and by how many stages.
_SENT = {"forward": ("forward", 1), "backward": ("backward", -1), "input_backward": ("backward", -1)}


class Span(NamedTuple):
    """When an action ran on a rank's compute stream, in seconds from the step's start, and `starved` for the host."""

    kind: str
    stage: int
    microbatch: int
    start: float
    end: float
    starved: float = 0.0


@dataclass(frozen=True, slots=True)
class Simulation:
    """The spans of each pipeline rank, and its clocks at the end of the step."""

    spans: tuple[tuple[Span, ...], ...]
    clocks: tuple[Clocks, ...]

    @property
    def seconds(self) -> float:
        return max(clocks.end() for clocks in self.clocks)


def simulate(
    ranks: Sequence[Sequence[tuple[Action, TimedProgram]]],
    transfer: Callable[[int, int], float],
    *,
    stages: int,
    host_waits: bool = False,
    log: bool = False,
) -> Simulation:
    """Return when each rank runs its actions.

    A forward pass waits for the hidden state of the stage before it, a backward pass for the gradient of the stage
    after it; `transfer` returns the seconds that one of them takes between two stages. Sending occupies the sender's
    compute stream, which waits for the end of a send. With `host_waits` the host waits for the device before each
    action, as Megatron-LM does around its sends and receives; else it runs ahead. With `log` the clocks have the times
    of each collective. An order in which ranks wait for each other raises ScheduleError.
    """
    clocks = [Clocks(log=[] if log else None) for _ in ranks]
    spans: list[list[Span]] = [[] for _ in ranks]
    arrivals: dict[tuple[str, int, int], float] = {}
    progress = True
    while progress:
        progress = False
        for actions, own_spans, own_clocks in zip(ranks, spans, clocks, strict=True):
            while len(own_spans) < len(actions):
                action, program = actions[len(own_spans)]
                what, step = _SENT.get(action.kind, ("", 0))
                source, destination = action.stage - step, action.stage + step
                has_source = bool(what) and 0 <= source < stages
                arrival = arrivals.get((what, source, action.microbatch)) if has_source else 0.0
                if arrival is None:
                    break
                own_spans.append(_run(action, program, own_clocks, arrival, host_waits))
                if what and 0 <= destination < stages:
                    own_clocks.compute += transfer(action.stage, destination)
                    arrivals[what, action.stage, action.microbatch] = own_clocks.compute
                progress = True
    for rank, actions in enumerate(ranks):
        if len(spans[rank]) < len(actions):
            action, _ = actions[len(spans[rank])]
            raise ScheduleError(
                f"pipeline rank {rank} waits forever for the input of {action.kind} of stage {action.stage}, "
                f"microbatch {action.microbatch}: the schedule's orders of the ranks do not fit together"
            )
    return Simulation(tuple(map(tuple, spans)), tuple(clocks))


def _run(action: Action, program: TimedProgram, clocks: Clocks, arrival: float, host_waits: bool) -> Span:
    clocks.wait(arrival)
    if action.kind == "optimizer":
        clocks.finish_collectives()
    if host_waits:
        clocks.host = max(clocks.host, clocks.compute)
    start, starved = clocks.compute, clocks.starved
    begun = program.replay(clocks, clocks.gathered.get(action.stage, {}))
    if action.kind == GATHERING:
        clocks.gathered[action.stage] = begun
    return Span(*action, start, clocks.compute, clocks.starved - starved)


# The host launches their ops in `Efficiency.launch`, others in `launch_backward`.
FORWARD_PHASES = ("forward", "recompute")


@dataclass(slots=True)
class Clocks:
    """When the host, the compute stream and the stream of each process group are free, in seconds.

    `exposed` is by group how long the compute stream has waited for its collectives, `busy` how long these took,
    `starved` how long the compute stream has waited for the host, and `idle` for other pipeline stages. `gathered` is
    by stage the ends of the gathers of its parameters. `log`, if it is a list, gets the group, the beginning and the
    end of each collective.
    """

    host: float = 0.0
    compute: float = 0.0
    streams: dict[str, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)
    busy: dict[str, float] = field(default_factory=dict)
    starved: float = 0.0
    idle: float = 0.0
    gathered: dict[int, Mapping[int, float]] = field(default_factory=dict)
    log: list[tuple[str, float, float]] | None = None

    def end(self) -> float:
        return max(self.compute, *self.streams.values()) if self.streams else self.compute

    def exposed_by_axis(self) -> dict[str, float]:
        """Return axis → how long the compute stream waits for collectives, also at the end of the step."""
        exposed = by_axis(self.exposed)
        if self.end() > self.compute:
            axis = _axis_of(max(self.streams, key=lambda stream: self.streams[stream]))
            exposed[axis] = exposed.get(axis, 0.0) + self.end() - self.compute
        return exposed

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


def by_axis(by_stream: Mapping[str, float]) -> dict[str, float]:
    """Return the seconds of streams of collectives by mesh axis."""
    sums = defaultdict[str, float](float)
    for stream, seconds in by_stream.items():
        sums[_axis_of(stream)] += seconds
    return dict(sums)


def _axis_of(stream: str) -> str:
    """Return the mesh axis of a stream of collectives, which has the name of its process group, such as "tp=8"."""
    return stream.rpartition("=")[0] or stream


@dataclass(frozen=True, slots=True)
class TimedProgram:
    """A program with its times: each item's stream, its seconds, for kernels the seconds with the host, and the host's.

    The seconds with the host are from its start to the end of the kernels.
    """

    items: tuple[tuple[Item, str, float, float, float], ...]

    def replay(self, clocks: Clocks, gathered: Mapping[int, float] | None = None) -> dict[int, float]:
        """Advance the clocks by one execution; return its collectives' ends. `gathered` are the gathering action's."""
        ends: dict[int, float] = {}
        waited: dict[int, float] = {}
        for item, stream, seconds, with_host, host in self.items:
            if isinstance(item, Run):
                free = clocks.compute + seconds
                launched = clocks.host + with_host
                clocks.starved += max(0.0, launched - free)
                clocks.compute = max(free, launched)
                clocks.host += host
                continue
            if isinstance(item, Wait):
                end = ends[item.number] if item.group is None else (gathered or {})[item.number]
                delay = max(0.0, end - clocks.compute)
                clocks.exposed[stream] = clocks.exposed.get(stream, 0.0) + delay
                clocks.compute += delay
                waited[item.number] = clocks.compute
                continue
            clocks.host += host
            if not isinstance(item, Collective):
                ready = ends[item.number]
            elif item.after is not None:
                ready = ends[item.after]
            else:
                ready = clocks.compute if item.gate is None else waited.get(item.gate, 0.0)
            begin = max(ready, clocks.host, clocks.streams.get(stream, 0.0))
            clocks.streams[stream] = ends[item.number] = begin + seconds
            if isinstance(item, Collective):
                clocks.busy[stream] = clocks.busy.get(stream, 0.0) + seconds
                if clocks.log is not None:
                    clocks.log.append((stream, begin, begin + seconds))
        return ends


def time_program(program: Program, timer: KernelTimer, network: Network | None) -> TimedProgram:
    """Return a program with its times; a collective without a network raises ValueError."""
    efficiency = timer.efficiency
    seconds = [timer.seconds(launch.kernel) for launch in program.launches]
    is_forward = (launch.phase in FORWARD_PHASES for launch in program.launches)
    hosts = [efficiency.launch if forward else efficiency.launch_backward for forward in is_forward]
    runs: dict[tuple[int, ...], tuple[float, float, float]] = {}
    streams: dict[int, str] = {}
    items: list[tuple[Item, str, float, float, float]] = []
    for item in program.items:
        if isinstance(item, Run):
            if item.items not in runs:
                runs[item.items] = _time_run(item.items, seconds, hosts)
            items.append((item, "", *runs[item.items]))
        elif isinstance(item, Collective):
            streams[item.number] = str(item.call.group)
            taken = time_collective(item, efficiency, network)
            items.append((item, streams[item.number], taken, 0.0, efficiency.launch_collective))
        elif isinstance(item, StreamRun):
            items.append((item, streams[item.number], seconds[item.item], 0.0, hosts[item.item]))
        else:
            stream = streams[item.number] if item.group is None else str(item.group)
            items.append((item, stream, 0.0, 0.0, 0.0))
    return TimedProgram(tuple(items))


def _time_run(items: tuple[int, ...], seconds: list[float], hosts: list[float]) -> tuple[float, float, float]:
    host = device = with_host = 0.0
    for item in items:
        host += hosts[item]
        # The kernel starts when it is launched and the one before it has ended.
        with_host = max(with_host, host) + seconds[item]
        device += seconds[item]
    return device, with_host, host


def time_collective(item: Collective, efficiency: Efficiency, network: Network | None) -> float:
    """Return the seconds of a collective; one without a network, or with a group of unknown size, raises ValueError."""
    call = item.call
    if call.group is None:
        raise ValueError(f"{call.collective} of {item.module or 'the model'} has a process group of unknown size")
    if call.group.size < 2:
        return 0.0
    if network is None:
        raise ValueError(
            f"{call.collective} over {call.group} needs a network: pass network= (--network), such as 'HGX H100 3200G'"
        )
    return efficiency.kernel + network.seconds(call.collective, call.payload, call.group)
