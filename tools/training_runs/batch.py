"""Simulate many runs at once, at several points of a fit: the package's simulation on arrays.

A program advances the clocks of a rank (host, compute stream, streams of collectives) by sums and maxima. Its effect is
thus a matrix in the max-plus algebra, which is computed once for all actions of all runs that have the program. Source:
Baccelli, Cohen, Olsder and Quadrat, "Synchronization and Linearity" (1992).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from fvflops.devices.devices import Device, find_device
from fvflops.plan.rank_step import Action
from fvflops.plan.sharding.replicas import GATHERING
from fvflops.plan.step_time.pass_program import Collective
from fvflops.plan.step_time.step_program import StepProgram
from training_runs.prepared import PreparedRun
from training_runs.rounds import Rounds
from training_runs.rows import TrainingRun
from training_runs.time_tables import Point, Step, Times, TimeTables

_HOST, _COMPUTE, _FIRST_STREAM = 0, 1, 2


def device_of(run: TrainingRun) -> Device:
    """Return the device of a run, with its own memory bandwidth and clock if the source states others."""
    device = find_device(run.device)
    if run.memory_bandwidth is None:
        return device
    matrix = {dtype: peak * run.clock for dtype, peak in device.matrix.items()}
    return replace(device, bandwidth=run.memory_bandwidth, matrix=matrix, sparse={})


class _Start(NamedTuple):
    """Change of the clocks of a rank before a program: they wait for all collectives, the host for the device."""

    finishes_collectives: bool
    host_waits: bool


@dataclass(slots=True)
class _Equal:
    """Programs that differ in their times only: their indexes, and of each the indexes of its steps' times."""

    programs: list[int] = field(default_factory=list)
    indexes: list[list[int]] = field(default_factory=list)


class Batch:
    """Runs that are simulated together."""

    def __init__(self, runs: Sequence[PreparedRun]) -> None:
        self.runs = tuple(runs)
        self._tables, self._rounds = TimeTables(), Rounds()
        self._programs: dict[tuple[_Start, tuple[Step, ...]], int] = {}
        streams = [_streams_of(item) for item in self.runs]
        self._first_gather = _FIRST_STREAM + max(map(len, streams))
        self._gathers = max(map(_count_gathers, self.runs))
        # A rank gathers the parameters of one stage while another one begins.
        self._clocks = self._first_gather + 2 * self._gathers
        for item, names in zip(self.runs, streams, strict=True):
            self._add(item, {name: _FIRST_STREAM + index for index, name in enumerate(names)})
        self._in_order = self._rounds.in_order()
        self._equal: dict[tuple[_Start, tuple[Step, ...]], _Equal] = {}
        for (start, steps), program in self._programs.items():
            equal = self._equal.setdefault((start, tuple(step._replace(times=0) for step in steps)), _Equal())
            equal.programs.append(program)
            equal.indexes.append([step.times for step in steps])

    def _add(self, item: PreparedRun, streams: Mapping[str, int]) -> None:
        step, site = item.step, self._tables.site(device_of(item.run), item.run.gpus_per_node, item.run.node_gbps)
        place = {stage: index for stages in _stages_of_ranks(step) for index, stage in enumerate(stages)}
        known: dict[tuple[int, int, bool], tuple[Step, ...]] = {}

        def number(action: Action, index: int) -> int:
            start = _Start(action.kind == "optimizer", item.host_waits)
            gathers = self._first_gather + place.get(action.stage, 0) % 2 * self._gathers
            key = index, gathers, action.kind == GATHERING
            if key not in known:
                program = step.programs[index]
                known[key] = self._tables.read(program, site, streams, gathers=gathers, is_gathering=key[2])
            return self._programs.setdefault((start, known[key]), len(self._programs))

        def transfer(sender: int, receiver: int) -> int:
            return self._tables.add_transfer(site, step.messages(sender, receiver))

        ranks = [[(action, number(action, index)) for action, index in actions] for actions in step.ranks]
        self._rounds.add(ranks, transfer, stages=1 + max(step.places))

    def predict(self, points: Sequence[Point]) -> np.ndarray:
        """Return the estimated seconds of a step, by point and run."""
        times = self._tables.at(points)
        matrices = np.empty((len(self._programs), self._clocks, self._clocks, len(points)))
        for (start, steps), equal in self._equal.items():
            matrices[equal.programs] = _effect(start, steps, np.array(equal.indexes), times, self._clocks)
        clocks = np.zeros((self._rounds.ranks, self._clocks, len(points)))
        ends = np.zeros((1 + self._rounds.actions, len(points)))
        for ranks, programs, sources, transfers, numbers in self._in_order:
            state = clocks[ranks]
            state[:, _COMPUTE] = np.maximum(state[:, _COMPUTE], ends[sources])
            state = (matrices[programs] + state[:, None]).max(2)
            state[:, _COMPUTE] += times.transfers[transfers]
            clocks[ranks] = state
            ends[numbers] = state[:, _COMPUTE]
        steps_end = np.maximum.reduceat(clocks[:, _COMPUTE:].max(1), self._rounds.first)
        return (steps_end + [efficiency.step for efficiency, _ in points]).T


def _streams_of(item: PreparedRun) -> list[str]:
    calls = [step.call for program in item.step.programs for step in program.items if isinstance(step, Collective)]
    return sorted({str(call.group) for call in calls})


def _stages_of_ranks(step: StepProgram) -> list[list[int]]:
    """Return the stages of each rank, in the order of their first forward passes."""
    return [list(dict.fromkeys(item.stage for item, _ in actions if item.kind == "forward")) for actions in step.ranks]


def _count_gathers(item: PreparedRun) -> int:
    """Return how many gathers a gathering action of a run has, at most."""
    actions = (action for actions in item.step.ranks for action in actions)
    gathering = {index for action, index in actions if action.kind == GATHERING}
    programs = [item.step.programs[index].items for index in gathering]
    return max((sum(isinstance(step, Collective) for step in items) for items in programs), default=0)


def _effect(start: _Start, steps: Sequence[Step], indexes: np.ndarray, times: Times, clocks: int) -> np.ndarray:
    """Return the matrices of programs with equal steps, by program, clock after and before it, and point.

    `indexes` are of their times, by program and step.
    """
    unit = np.where(np.eye(clocks, dtype=bool), 0.0, -np.inf)[:, None, :, None]
    rows = list(np.broadcast_to(unit, (clocks, len(indexes), clocks, len(times.launch))))
    if start.finishes_collectives:
        rows[_COMPUTE] = np.maximum.reduce(rows[_COMPUTE:])
    if start.host_waits:
        rows[_HOST] = np.maximum(rows[_HOST], rows[_COMPUTE])
    ends: dict[int, np.ndarray] = {}
    waited: dict[int, np.ndarray] = {}
    for step, index in zip(steps, indexes.T, strict=True):
        if step.kind == "run":
            device, with_host, host = (table[index][:, None] for table in (times.device, times.with_host, times.host))
            rows[_COMPUTE] = np.maximum(rows[_COMPUTE] + device, rows[_HOST] + with_host)
            rows[_HOST] = rows[_HOST] + host
        elif step.kind == "collective":
            rows[_HOST] = rows[_HOST] + times.launch
            begin = np.maximum(rows[_HOST], rows[step.stream])
            if step.after is not None:
                begin = np.maximum(begin, ends[step.after])
            elif step.gate is None:
                begin = np.maximum(begin, rows[_COMPUTE])
            elif step.gate in waited:
                begin = np.maximum(begin, waited[step.gate])
            rows[step.stream] = ends[step.number] = begin + times.collectives[index][:, None]
            if step.ahead is not None:
                rows[step.ahead] = rows[step.stream]
        elif step.kind == "stream run":
            rows[_HOST] = rows[_HOST] + times.host[index][:, None]
            begin = np.maximum(np.maximum(rows[_HOST], rows[step.stream]), ends[step.number])
            rows[step.stream] = ends[step.number] = begin + times.device[index][:, None]
        else:
            end = ends[step.number] if step.ahead is None else rows[step.ahead]
            rows[_COMPUTE] = waited[step.number] = np.maximum(rows[_COMPUTE], end)
    return np.stack(rows, 1)
