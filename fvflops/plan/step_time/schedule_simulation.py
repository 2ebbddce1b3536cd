"""Simulate the ranks of a pipeline: each runs its actions in order, when what they need has arrived."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fvflops.plan.step_time.replay import Clocks, TimedProgram

FORWARD = ("forward",)
BACKWARD = ("backward", "input_backward")


class TimedAction(NamedTuple):
    """An action of a rank, with its program; `stage` and `microbatch` are those of planning's Action."""

    kind: str
    stage: int
    microbatch: int
    program: TimedProgram


class Span(NamedTuple):
    """When an action ran on a rank's compute stream, in seconds from the start of the step.

    `starved` is how long it waited for the host in it.
    """

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
        """The time of the step: when the last rank has finished."""
        return max(clocks.end() for clocks in self.clocks)


class ScheduleError(ValueError):
    """An order of actions in which ranks wait for each other."""


def simulate(
    ranks: Sequence[Sequence[TimedAction]],
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
    done = [0] * len(ranks)
    progress = True
    while progress:
        progress = False
        for rank, actions in enumerate(ranks):
            while done[rank] < len(actions):
                action = actions[done[rank]]
                arrival = _arrival_of(action, arrivals, stages)
                if arrival is None:
                    break
                spans[rank].append(_run(action, clocks[rank], arrival, host_waits))
                _send(action, clocks[rank], arrivals, transfer, stages)
                done[rank] += 1
                progress = True
    for rank, actions in enumerate(ranks):
        if done[rank] < len(actions):
            action = actions[done[rank]]
            raise ScheduleError(
                f"pipeline rank {rank} waits forever for the input of {action.kind} of stage {action.stage}, "
                f"microbatch {action.microbatch}: the schedule's orders of the ranks do not fit together"
            )
    return Simulation(tuple(map(tuple, spans)), tuple(clocks))


def _arrival_of(action: TimedAction, arrivals: dict[tuple[str, int, int], float], stages: int) -> float | None:
    """Return when the input of an action is there, None if it is not known yet."""
    if action.kind in FORWARD and action.stage > 0:
        return arrivals.get(("forward", action.stage - 1, action.microbatch))
    if action.kind in BACKWARD and action.stage < stages - 1:
        return arrivals.get(("backward", action.stage + 1, action.microbatch))
    return 0.0


def _run(action: TimedAction, clocks: Clocks, arrival: float, host_waits: bool) -> Span:
    clocks.wait(arrival)
    if action.kind == "optimizer":
        clocks.finish_collectives()
    if host_waits:
        clocks.host = max(clocks.host, clocks.compute)
    start, starved = clocks.compute, clocks.starved
    action.program.replay(clocks)
    return Span(action.kind, action.stage, action.microbatch, start, clocks.compute, clocks.starved - starved)


def _send(
    action: TimedAction,
    clocks: Clocks,
    arrivals: dict[tuple[str, int, int], float],
    transfer: Callable[[int, int], float],
    stages: int,
) -> None:
    if action.kind in FORWARD and action.stage < stages - 1:
        clocks.compute += transfer(action.stage, action.stage + 1)
        arrivals["forward", action.stage, action.microbatch] = clocks.compute
    elif action.kind in BACKWARD and action.stage > 0:
        clocks.compute += transfer(action.stage, action.stage - 1)
        arrivals["backward", action.stage, action.microbatch] = clocks.compute
