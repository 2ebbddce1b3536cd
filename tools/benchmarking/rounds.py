"""The rounds: every contender runs once in each, in a shuffled order, so that all meet the same noise."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

# Collecting takes some 0.1 s: before every run of a few milliseconds it would leave time for few rounds.
_COLLECT_AFTER = 1.0


def do_nothing() -> None:
    """Do nothing, before or after a run that needs no preparation."""


@dataclass(frozen=True, slots=True)
class Run:
    """A timed call; `before` and `after` are called outside the clock. `run` may return its count."""

    run: Callable[[], int | None]
    before: Callable[[], object] = do_nothing
    after: Callable[[], object] = do_nothing


@dataclass(frozen=True, slots=True)
class Limits:
    """How many rounds: `rounds`, or fewer once `seconds` have passed, but `least` in any case."""

    rounds: int = 15
    seconds: float = 10.0
    least: int = 3


@dataclass(frozen=True, slots=True)
class Rounds:
    """Results of some rounds: seconds by contender, one for each round; counts; and errors."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    counted: dict[str, int] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def run_rounds(contenders: Mapping[str, Callable[[], Run | None]], limits: Limits) -> Rounds:
    """Time the contenders in rounds, after one warm-up of each.

    One that gives None does not take part, and one that raises when it is made or warmed up is left out.
    Garbage is collected before each round, and in a round of large models before a contender too, lest it pays for what
    others left; the collector stays on, as it is for a user.
    """
    rounds = Rounds()
    runs: dict[str, Run] = {}
    for name, make in contenders.items():
        try:
            run = make()
            if run is None:
                continue
            _, counted = _time(run)
        except Exception as error:  # a peer that cannot count this model must not hide the others
            lines = str(error).splitlines() or [""]
            rounds.failures[name] = f"{type(error).__name__}: {lines[0][:120]}"
            continue
        runs[name], rounds.seconds[name] = run, []
        if counted is not None:
            rounds.counted[name] = counted
    order = list(runs)
    generator = random.Random(0)
    begun = time.perf_counter()
    for index in range(limits.rounds):
        if index >= limits.least and time.perf_counter() - begun > limits.seconds:
            break
        generator.shuffle(order)
        collected = float("-inf")
        for name in order:
            if time.perf_counter() - collected >= _COLLECT_AFTER:
                gc.collect()
                collected = time.perf_counter()
            rounds.seconds[name].append(_time(runs[name])[0])
    return rounds


def _time(run: Run) -> tuple[float, int | None]:
    run.before()
    begun = time.perf_counter()
    counted = run.run()
    seconds = time.perf_counter() - begun
    run.after()
    return seconds, counted
