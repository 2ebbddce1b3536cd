"""An engine that steps: one scheduler, or several in lock-step, and runs of steady decode steps at once."""

from bisect import bisect_left
from collections.abc import Sequence as Series
from itertools import accumulate
from typing import Protocol

from fvflops.serve.simulation.engine_settings import EngineSettings
from fvflops.serve.simulation.requests import Sequence
from fvflops.serve.simulation.scheduler import Plan, Scheduler

# Steps of one run at most: more bring no speed.
_LONGEST_RUN = 1024


class StepTimes(Protocol):
    """Seconds of an engine's steps; with speculative decoding with the draft and verification of all draft tokens."""

    def seconds(self, chunks: Series[tuple[int, int]], decoding: int, cached: float, all_new: int | None) -> float:
        """Return the seconds of a step of one replica.

        `chunks` are (new tokens, cached tokens before them) of prompts, `decoding` the sequences that decode, `cached`
        the sum of the tokens in their caches. `all_new` are the new tokens of all replicas, None if they
        have as many each.
        """

    def decode_seconds(self, decoding: int, cached: Series[float], all_new: int | None) -> list[float]:
        """Return the seconds of steps that only decode, for each sum of cached tokens, which do not fall."""


class Engine:
    """Replicas that step together, and the times of their steps.

    A step is planned when an earlier one ends: the one before it, or with `steps_ahead` the one before that. What
    happens after that moment is seen by a later step. Steps that only decode, in which no sequence ends, are a run:
    their times are computed at once, and a request that arrives cuts the run at the step that can see it.
    """

    def __init__(self, settings: EngineSettings, step_times: StepTimes, *, seed: int, longest_run: int) -> None:
        self.settings = settings
        self.schedulers = [Scheduler(settings, seed) for _ in range(settings.replicas)]
        self.plan_at = float("inf")
        self.free_at = 0.0
        self.steps = 0
        self.idle_seconds = 0.0
        self.running_seconds = 0.0
        self._times = step_times
        self._longest_run = min(longest_run, _LONGEST_RUN)
        self._arrivals = 0
        # When the steps of a run are planned, the one after it, and the ends of its steps, from the step before it.
        self._planned: list[float] = []
        self._ends: list[float] = []

    @property
    def running(self) -> int:
        """Sequences in the replicas' batches."""
        return sum(len(scheduler.running) for scheduler in self.schedulers)

    def enqueue(self, sequence: Sequence) -> None:
        """Receive a sequence at its arrival; replicas take turns."""
        scheduler = self.schedulers[self._arrivals % len(self.schedulers)]
        self._arrivals += 1
        scheduler.enqueue(sequence)
        if self._planned and not scheduler.blocked:
            self._end_run(bisect_left(self._planned, sequence.arrival))
        elif self.plan_at == float("inf"):
            self.plan_at = sequence.arrival

    def step(self) -> tuple[float, float, list[tuple[Scheduler, Plan]]]:
        """Plan the next step; return when it is planned, when it ends, and the replicas' plans."""
        self._end_run(len(self._planned) - 1)
        now = self.plan_at
        plans = [(scheduler, scheduler.plan(now)) for scheduler in self.schedulers]
        if all(plan.empty for _, plan in plans):
            self._wait(now)
            return now, now, plans
        start = max(self.free_at, now)
        end = start + self._seconds([plan for _, plan in plans])
        self.idle_seconds += start - self.free_at
        self.running_seconds += (end - start) * self.running
        self.steps += 1
        self.free_at = end
        self.plan_at = start if self.settings.steps_ahead else end
        return now, end, plans

    def look_ahead(self, plans: list[tuple[Scheduler, Plan]]) -> None:
        """Compute a run of steady steps after a step that only decodes."""
        if not all(plan.is_steady for _, plan in plans) or not any(plan.decoding for _, plan in plans):
            return
        count = self._longest_run
        for scheduler in self.schedulers:
            count = min(count, scheduler.quiet_steps(count))
        if count < 1:
            return
        batches = [(each.decoding, each.cached_tokens(count)) for each in self.schedulers if each.decoding]
        ends = list(accumulate(self._decode_seconds(batches), initial=self.free_at))
        self._ends = ends
        self._planned = [self.plan_at, *ends[:-1]] if self.settings.steps_ahead else ends
        self.plan_at = self._planned[-1]

    def _wait(self, now: float) -> None:
        """Look again when the last step has ended or pages become free; else at the next arrival."""
        release = min(scheduler.next_release for scheduler in self.schedulers)
        self.plan_at = self.free_at if self.free_at > now else release

    def _seconds(self, plans: list[Plan]) -> float:
        """Return the seconds of the slowest replica's step, in which each waits for the tokens of all."""
        busy = [plan for plan in plans if not plan.empty]
        if prompts := sum(new for plan in busy for new, _ in plan.chunks):
            all_new = self._all_new(prompts, sum(plan.decoding for plan in busy))
            return max(self._times.seconds(plan.chunks, plan.decoding, plan.cached, all_new) for plan in busy)
        return self._decode_seconds([(plan.decoding, [plan.cached]) for plan in busy])[0]

    def _decode_seconds(self, batches: list[tuple[int, list[float]]]) -> list[float]:
        all_new = self._all_new(0, sum(decoding for decoding, _ in batches))
        seconds = [self._times.decode_seconds(decoding, cached, all_new) for decoding, cached in batches]
        return seconds[0] if len(seconds) == 1 else list(map(max, *seconds))

    def _all_new(self, prompts: int, decoding: int) -> int | None:
        """Return the new tokens of all replicas; None if one is simulated, whose tokens all others have too."""
        return prompts + self.settings.decode_tokens * decoding if len(self.schedulers) > 1 else None

    def _end_run(self, count: int) -> None:
        """Take the first `count` steps of the run and forget the others."""
        if not self._planned:
            return
        planned, ends = self._planned, self._ends
        self._planned = []
        if count:
            for scheduler in self.schedulers:
                scheduler.advance(planned[:count])
            self.free_at = ends[count]
            self.steps += count
            self.running_seconds += (ends[count] - ends[0]) * self.running
        self.plan_at = planned[count]
