"""Simulate requests through an engine."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import isnan
from typing import Literal

from fvflops.serve.simulation.engine import Engine, StepTimes
from fvflops.serve.simulation.engine_settings import EngineSettings
from fvflops.serve.simulation.requests import ClosedLoop, Request, Sequence
from fvflops.serve.simulation.scheduler import Plan, Scheduler
from fvflops.serve.simulation.simulation_result import RequestTimes, SimulationResult
from fvflops.text import explaining_arguments


@dataclass(frozen=True, slots=True)
class Disaggregation:
    """Prefill on some engines and decoding on others, with a transfer of the cache in between.

    The settings and step times given to `simulate` are for each prefill engine; `settings` and `step_times` here are
    for each decode engine. A transfer takes `latency` seconds and `seconds_per_token` for each token.
    """

    prefill_engines: int
    decode_engines: int
    settings: EngineSettings
    step_times: StepTimes
    latency: float = 0.0
    seconds_per_token: float = 0.0


def simulate(
    load: Iterable[Request] | ClosedLoop,
    settings: EngineSettings,
    step_times: StepTimes,
    *,
    disaggregation: Disaggregation | None = None,
    seed: int = 0,
    longest_run: int = 1024,
) -> SimulationResult:
    """Simulate a load on an engine and return the times of every request.

    `load` is requests in order of arrival, or a closed loop of clients. `seed` is for the acceptance of speculative
    tokens. Times are in seconds. `longest_run` limits how many decode steps are computed at once, which changes no
    result; with 0 every step is planned by itself. Raises ValueError for a request that is larger than the cache.
    """

    def build(count: int, settings: EngineSettings, step_times: StepTimes) -> list[Engine]:
        stages = settings.stages
        pages, sequences = (max(1, number // stages) for number in (settings.pages, settings.max_sequences))
        part = replace(settings, pages=pages, max_sequences=sequences, stages=1)
        return [Engine(part, step_times, seed=seed, longest_run=longest_run) for _ in range(count * stages)]

    others = disaggregation
    first = build(others.prefill_engines if others else 1, settings, step_times)
    second = build(others.decode_engines, others.settings, others.step_times) if others else []
    return _Simulation(load, [first, second], disaggregation).run()


class _Simulation:
    """Events in order of time: arrivals at engines, and steps that engines plan.

    `stages` are the engines that requests arrive at, and the ones that decode after a transfer.
    """

    def __init__(
        self, load: Iterable[Request] | ClosedLoop, stages: list[list[Engine]], disaggregation: Disaggregation | None
    ) -> None:
        self._stages = stages
        self._all = [*stages[0], *stages[1]]
        self._disaggregation = disaggregation
        self._times = RequestTimes()
        self._clients = load.clients if isinstance(load, ClosedLoop) else 0
        self._requests: Iterator[Request] = iter(load.requests if isinstance(load, ClosedLoop) else load)
        self._done = 0
        # Arrivals: time, order, and a request, or a sequence whose cache was transferred.
        self._events: list[tuple[float, int, Request | Sequence]] = []
        self._order = 0
        self._turns = [0, 0]
        self._begin = 0.0

    def run(self) -> SimulationResult:
        for _ in range(self._clients or 1):
            self._issue(0.0 if self._clients else None)
        if not self._events:
            raise ValueError("a simulation needs a request: the load is empty")
        self._begin = self._events[0][0]
        for engine in self._all:
            engine.free_at = self._begin
        while True:
            engine = min(self._all, key=lambda engine: engine.plan_at) if len(self._all) > 1 else self._all[0]
            if self._events and self._events[0][0] <= engine.plan_at:
                time, _, arrival = heappop(self._events)
                self._arrive(time, arrival)
            elif engine.plan_at < float("inf"):
                self._step(engine)
            else:
                break
        if self._done < len(self._times):
            raise RuntimeError(f"{len(self._times) - self._done} requests are left: no engine can run them")
        return self._result()

    def _issue(self, time: float | None) -> None:
        """Schedule the next request of the load at a time, or at its own arrival."""
        request = next(self._requests, None)
        if request is not None:
            self._schedule(request.arrival if time is None else time, request)

    def _schedule(self, time: float, arrival: Request | Sequence) -> None:
        self._order += 1
        heappush(self._events, (time, self._order, arrival))

    def _arrive(self, time: float, arrival: Request | Sequence) -> None:
        if isinstance(arrival, Sequence):
            self._next_engine(1).enqueue(arrival)
            return
        if not self._clients:
            self._issue(None)
            if self._events and self._events[0][0] < time:
                raise ValueError("requests must be in order of arrival: sort them")
        index = self._times.add(time, arrival.input_tokens, arrival.output_tokens)
        prefix = min(arrival.prefix_tokens, arrival.input_tokens - 1)
        tokens = 1 if self._disaggregation else arrival.output_tokens
        self._next_engine(0).enqueue(Sequence(index, arrival, time, arrival.input_tokens, prefix, tokens))

    def _next_engine(self, stage: int) -> Engine:
        turn, engines = self._turns[stage], self._stages[stage]
        self._turns[stage] += 1
        return engines[turn % len(engines)]

    def _step(self, engine: Engine) -> None:
        now, end, plans = engine.step()
        for scheduler, plan in plans:
            self._record(scheduler, plan, now, end)
        engine.look_ahead(plans)

    def _record(self, scheduler: Scheduler, plan: Plan, now: float, end: float) -> None:
        times = self._times
        for sequence in plan.admitted:
            queued = scheduler.queued.pop(sequence.index, None)
            if queued is not None and isnan(times.scheduled[sequence.index]):
                times.queued[sequence.index] = queued
                times.scheduled[sequence.index] = now
        for sequence in plan.prefilled:
            if isnan(times.first_token[sequence.index]):
                times.first_token[sequence.index] = end
        for sequence in plan.finished:
            self._finish(scheduler, sequence, end)

    def _finish(self, scheduler: Scheduler, sequence: Sequence, end: float) -> None:
        request, transfer = sequence.request, self._disaggregation
        tokens, outputs = request.input_tokens, request.output_tokens
        if transfer and sequence.output_tokens < outputs:
            arrival = end + (transfer.latency + tokens * transfer.seconds_per_token)
            scheduler.leave(sequence, arrival)
            self._schedule(arrival, Sequence(sequence.index, request, arrival, tokens, tokens, outputs, generated=1))
            return
        scheduler.leave(sequence, end)
        self._times.last_token[sequence.index] = end
        self._done += 1
        if self._clients:
            self._issue(end)

    def _result(self) -> SimulationResult:
        schedulers = [scheduler for engine in self._all for scheduler in engine.schedulers]
        peak = max(schedulers, key=lambda scheduler: scheduler.pages.peak)
        end = max(self._times.last_token)
        return SimulationResult(
            requests=self._times,
            engines=len(self._all),
            steps=sum(engine.steps for engine in self._all),
            idle_seconds=sum(engine.idle_seconds + end - engine.free_at for engine in self._all),
            running=sum(engine.running_seconds for engine in self._all) / (end - self._begin),
            preemptions=sum(scheduler.preemptions for scheduler in schedulers),
            peak_pages=peak.pages.peak,
            pages=peak.pages.total,
        )


@explaining_arguments
@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """Limits in seconds of the time to the first token and per output token, at the mean or a percentile."""

    ttft: float = float("inf")
    tpot: float = float("inf")
    at: Literal["mean", "p50", "p90", "p95", "p99"] = "p99"

    def are_met(self, result: SimulationResult) -> bool:
        """Return whether a simulation is within the limits; a figure that it lacks (NaN) does not exceed its limit."""
        return not (getattr(result.ttft, self.at) > self.ttft or getattr(result.tpot, self.at) > self.tpot)
