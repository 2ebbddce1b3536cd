"""Schedules: which steps of a long run are recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fvflops.text import require_int

# Step index → action: "none", "warmup", "record", or "record_and_save" for the last step of a cycle.
Schedule = Callable[[int], Any]
# Actions of the recorded steps.
ACTIVE = ("record", "record_and_save")


def schedule(
    *, wait: int = 0, warmup: int = 0, active: int, repeat: int = 0, skip_first: int = 0, skip_first_wait: int = 0
) -> Schedule:
    """Return a schedule that skips steps, then repeats a cycle of waiting, warm-up and recording.

    The arguments are those of `torch.profiler.schedule`, whose result can be used instead: `skip_first` steps are
    skipped once, then each cycle skips `wait` steps, has `warmup` steps and records `active` steps; `repeat` is the
    number of cycles, 0 for no limit; with `skip_first_wait` other than 0 the first cycle does not wait. A count needs
    no warm-up: these steps are skipped too. Numbers below 0, or no active step, raise ValueError.

    >>> [schedule(wait=1, active=2, repeat=1)(step) for step in range(4)]
    ['none', 'record', 'record_and_save', 'none']
    """
    numbers = {"wait": wait, "warmup": warmup, "active": active, "repeat": repeat}
    numbers |= {"skip_first": skip_first, "skip_first_wait": skip_first_wait}
    for name, number in numbers.items():
        require_int(name, number, least=1 if name == "active" else 0)
    cycle = wait + warmup + active

    def act(step: int) -> str:
        step -= skip_first
        if step < 0:
            return "none"
        if skip_first_wait:
            step += wait
        if repeat and step >= repeat * cycle:
            return "none"
        position = step % cycle
        if position < wait:
            return "none"
        if position < wait + warmup:
            return "warmup"
        return "record_and_save" if position == cycle - 1 else "record"

    return act


def action_at(plan: Schedule, step: int) -> str:
    """Return the action of a schedule, fvflops' or torch.profiler's, for a step."""
    action = plan(step)
    name = str(getattr(action, "name", action)).lower()
    if name not in ("none", "warmup", *ACTIVE):
        raise ValueError(
            f"schedule={plan!r} returned {action!r} for step {step}: use fvflops.schedule or torch.profiler's"
        )
    return name
