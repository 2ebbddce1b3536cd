#!/usr/bin/env python3
"""Lays what fvflops measures beside torch.profiler and a stopwatch: tools/timing.py [--rounds N] [--threads N].

Ops: the same runs are watched by both, and each op call over 100 µs is compared with torch.profiler's event of the
kernel that it ran, in each run by itself and by the medians over all. Modules: in runs as `ProfileAnalysis` makes them
to clock modules a stopwatch is read around each call too, and the medians are compared. Prints how many are within 5 %
of each other, and the median difference.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch import nn  # noqa: E402

from fvflops import KernelProfile, record  # noqa: E402
from fvflops.capture.instrument.module_clock import time_modules  # noqa: E402
from fvflops.counting.timing import read_times  # noqa: E402
from fvflops.trace.kernel_events import KernelEvent  # noqa: E402
from fvflops.zoo import build  # noqa: E402

LEAST, WITHIN = 100_000, 0.05
# Of each op call or module what another says that it took, and what fvflops says, in ns.
Pairs = list[tuple[float, float]]
MODELS = {"resnet50": (8, 3, 224, 224), "vit_b_16": (2, 3, 224, 224)}


def compare_ops(model: nn.Module, images: torch.Tensor, rounds: int) -> list[Pairs]:
    """Return of each op call over 100 µs what torch.profiler and what fvflops says, in ns: of each run, and medians.

    Both watch the same runs.
    """
    runs = [_time_ops(model, images) for _ in range(rounds)]
    calls = [tuple(zip(*pairs, strict=True)) for pairs in zip(*runs, strict=True)]
    medians = [(median(theirs), median(ours)) for theirs, ours in calls]
    return [[pair for pair in pairs if pair[0] > LEAST] for pairs in ([pair for run in runs for pair in run], medians)]


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
    """Return of each module over 100 µs the medians of a stopwatch around its calls and of fvflops, in ns."""
    watched: dict[str, list[int]] = defaultdict(list)
    measured: dict[str, list[int]] = defaultdict(list)
    for _ in range(rounds):
        with stopwatch(model, watched):
            trace = time_modules(model, (images,), {}, grad_enabled=False)
        for name, timing in read_times(trace).modules["forward"].items():
            measured[name].append(timing.total)
    medians = {name: (median(times), median(measured[name])) for name, times in watched.items()}
    return [pair for pair in medians.values() if pair[0] > LEAST]


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


def describe(name: str, what: str, pairs: Pairs) -> str:
    """Return one line that says how far apart two figures of the same are."""
    apart = sorted((ours - theirs) / theirs for theirs, ours in pairs)
    near = sum(abs(difference) <= WITHIN for difference in apart)
    added = median(ours - theirs for theirs, ours in pairs) / 1000
    whole = sum(ours for _, ours in pairs) / sum(theirs for theirs, _ in pairs) - 1
    return (
        f"{name:10} {what:9} {len(pairs):4} over 100 µs, {near:4} within 5 %; difference: median {median(apart):+.1%}"
        f" ({added:+.1f} µs), least {apart[0]:+.1%}, most {apart[-1]:+.1%}; of all together {whole:+.2%}"
    )


def main() -> int:
    """Compare ops and modules of each model."""
    parser = argparse.ArgumentParser(description=__doc__.partition(":")[0] + ".")
    parser.add_argument("--rounds", type=int, default=15, help="how often each run is made; default: 15")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: all cores")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(arguments.threads)
    for name, shape in MODELS.items():
        model, images = build(name).eval(), torch.randn(shape)
        with torch.no_grad():
            model(images)
            single, medians = compare_ops(model, images, arguments.rounds)
            print(describe(name, "ops, each", single))
            print(describe(name, "ops", medians))
            print(describe(name, "modules", compare_modules(model, images, arguments.rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
