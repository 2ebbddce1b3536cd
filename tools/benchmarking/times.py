"""Times that fvflops measures beside torch.profiler's and a stopwatch's, in the same runs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import nn

from fvflops import KernelProfile, record
from fvflops.capture.instrument.module_clock import time_modules
from fvflops.counting.nested_timeline import read_times
from fvflops.trace.kernel_events import KernelEvent

_LEAST = 100_000  # ns of an op call or a module that is compared
# Of each op call or module the time by another tool and the time by fvflops, in ns.
Pairs = list[tuple[float, float]]
TIMED = {"resnet50": (8, 3, 224, 224), "vit_b_16": (2, 3, 224, 224)}


def compare_ops(model: nn.Module, images: torch.Tensor, rounds: int) -> Pairs:
    """Return the medians of each op call over 100 µs, by torch.profiler and by fvflops, which watch the same runs."""
    runs = [_time_ops(model, images) for _ in range(rounds)]
    calls = [tuple(zip(*pairs, strict=True)) for pairs in zip(*runs, strict=True)]
    return [pair for pair in ((median(theirs), median(ours)) for theirs, ours in calls) if pair[0] > _LEAST]


def _time_ops(model: nn.Module, images: torch.Tensor) -> Pairs:
    with KernelProfile(model) as profile, record(model, measure={"time"}) as run:
        model(images)
    trace = run.trace()
    match = profile.count_with(trace).match()
    events = match.run.events
    inside: dict[int, list[int]] = defaultdict(list)
    for place, event in enumerate(events):
        inside[event.parent].append(place)
    pairs: Pairs = []
    for place, index in sorted(match.call_of_event.items()):
        duration = (trace.events or ())[index].duration_ns
        if events[place].kind == "op" and duration is not None:
            pairs.append((events[_find_kernel(events, inside, place)].duration_ns, duration))
    return pairs


def _find_kernel(events: tuple[KernelEvent, ...], inside: dict[int, list[int]], place: int) -> int:
    """Return the event of the kernel that an op ran: under a dispatch mode the op is called again, from the mode."""
    for mode in inside[place]:
        if events[mode].name == "PythonDispatchMode":
            for again in inside[mode]:
                if events[again].name == events[place].name:
                    return _find_kernel(events, inside, again)
    return place


def compare_modules(model: nn.Module, images: torch.Tensor, rounds: int) -> Pairs:
    """Return the medians of each module over 100 µs, by a stopwatch around its calls and by fvflops."""
    watched: dict[str, list[int]] = defaultdict(list)
    measured: dict[str, list[int]] = defaultdict(list)
    for _ in range(rounds):
        with stopwatch(model, watched):
            trace = time_modules(model, (images,), {}, grad_enabled=False)
        for name, timing in read_times(trace).modules["forward"].items():
            measured[name].append(timing.total)
    medians = {name: (median(times), median(measured[name])) for name, times in watched.items()}
    return [pair for pair in medians.values() if pair[0] > _LEAST]


@contextmanager
def stopwatch(model: nn.Module, times: dict[str, list[int]]) -> Iterator[None]:
    """Add the time of all of each module's calls to its list: by a clock that is read before a call and after it."""
    names = {module: name for name, module in model.named_modules()}
    sums: dict[str, int] = defaultdict(int)
    call = nn.Module._call_impl

    def timed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        begun = time.perf_counter_ns()
        result = call(module, *args, **kwargs)
        sums[names[module]] += time.perf_counter_ns() - begun
        return result

    nn.Module._call_impl = timed  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module._call_impl = call  # type: ignore[method-assign]
    for name, duration in sums.items():
        times[name].append(duration)
