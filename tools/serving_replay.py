#!/usr/bin/env python3
"""Replays measured files of requests through the simulated engine, and prints how far the times of requests are off.

    tools/serving_replay.py FILE --max-sequences 128 --cache-tokens 500000
    tools/serving_replay.py FILE --step-times 0.0128,3.85e-5,1.03e-7,1.5e-7,6e-10    these figures, not fitted ones

FILE is a CSV file with input_tokens, output_tokens and, in seconds, queued_s, scheduled_s, first_token_s and
last_token_s, in order of queueing, of vLLM. Five figures of step times (LinearStepTimes) are fitted to the first half
of the requests; the errors of the second half are those of requests that the fit has not seen. Mean is the error of
the mean of all requests, each the mean error of each request, median the median of these. queued_s is when the
engine's loop took a request, so times are from there.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tabulate import tabulate  # noqa: E402

from fvflops.serve.simulation.engine_settings import EngineSettings, engine_settings  # noqa: E402
from fvflops.serve.simulation.request_simulation import simulate  # noqa: E402
from fvflops.serve.simulation.requests import Request  # noqa: E402
from fvflops.serve.simulation.simulation_result import RequestTimes  # noqa: E402
from fvflops.serve.simulation.step_times import LinearStepTimes, StepTimes  # noqa: E402

# Where a fit begins: an 8B model in bf16 on a GPU of 1.5 TB/s.
BEGIN = (0.015, 5e-5, 1e-7, 1.5e-7, 1e-9)


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of one figure of requests."""

    mean: float
    each: float
    median: float


def read_measured(path: Path) -> RequestTimes:
    """Read the measured times of requests."""
    times = RequestTimes()
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            index = times.add(float(row["queued_s"]), int(row["input_tokens"]), int(row["output_tokens"]))
            times.queued[index] = float(row["queued_s"])
            times.scheduled[index] = float(row["scheduled_s"])
            times.first_token[index] = float(row["first_token_s"])
            times.last_token[index] = float(row["last_token_s"])
    return times


def replay(measured: RequestTimes, settings: EngineSettings, step_times: StepTimes) -> RequestTimes:
    """Simulate the measured requests; each arrives when it was queued."""
    columns = zip(measured.queued, measured.input_tokens, measured.output_tokens, strict=True)
    return simulate([Request(*row) for row in columns], settings, step_times).requests


def replay_errors(simulated: RequestTimes, measured: RequestTimes, indices: Iterable[int]) -> dict[str, Errors]:
    """Return the errors of TTFT, TPOT and end-to-end time of some of the requests."""
    chosen = list(indices)
    return {
        name: _errors([value(simulated, index) for index in chosen], [value(measured, index) for index in chosen])
        for name, value in FIGURES.items()
    }


FIGURES: dict[str, Callable[[RequestTimes, int], float]] = {
    "TTFT": lambda times, index: times.first_token[index] - times.queued[index],
    "TPOT": lambda times, index: (
        (times.last_token[index] - times.first_token[index]) / max(1, times.output_tokens[index] - 1)
    ),
    "end to end": lambda times, index: times.last_token[index] - times.queued[index],
}


def _errors(simulated: Sequence[float], measured: Sequence[float]) -> Errors:
    each = [abs(value / real - 1) for value, real in zip(simulated, measured, strict=True)]
    return Errors(sum(simulated) / sum(measured) - 1, sum(each) / len(each), sorted(each)[len(each) // 2])


def fit_step_times(measured: RequestTimes, settings: EngineSettings, indices: Iterable[int]) -> LinearStepTimes:
    """Return the step times with the least errors of some requests, by descent from three starts."""
    chosen = list(indices)

    def loss(figures: Sequence[float]) -> float:
        errors = replay_errors(replay(measured, settings, LinearStepTimes(*figures)), measured, chosen)
        return sum(error.each for error in errors.values())

    starts = [[value * scale for value in BEGIN] for scale in (0.7, 1.0, 1.4)]
    return LinearStepTimes(*min((descend(loss, start) for start in starts), key=loss))


def descend(loss: Callable[[Sequence[float]], float], start: Sequence[float]) -> list[float]:
    """Return figures of a smaller loss, by steps along one of them after the other."""
    best = list(start)
    least = loss(best)
    strides = [0.2] * len(best)
    while max(strides) > 2e-3:
        for place, stride in enumerate(strides):
            for factor in (1 + stride, 1 / (1 + stride)):
                tried = [value * factor if index == place else value for index, value in enumerate(best)]
                found = loss(tried)
                if found < least:
                    best, least = tried, found
                    strides[place] = 1.5 * stride
                    break
            else:
                strides[place] = 0.5 * stride
    return best


def main(argv: Sequence[str] | None = None) -> int:
    """Print the errors; return the exit code."""
    parser = argparse.ArgumentParser(prog="tools/serving_replay.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path, help="CSV file of measured requests")
    parser.add_argument("--max-sequences", type=int, default=256, help="of the engine (256)")
    parser.add_argument("--max-batched-tokens", type=int, default=2048, help="of a step (2048)")
    parser.add_argument("--cache-tokens", type=int, default=500_000, help="tokens that the cache holds (500000)")
    parser.add_argument("--step-times", help="five figures in seconds with commas, instead of a fit")
    arguments = parser.parse_args(argv)
    measured = read_measured(arguments.file)
    settings = engine_settings(
        "vllm",
        arguments.cache_tokens,
        max_sequences=arguments.max_sequences,
        max_batched_tokens=arguments.max_batched_tokens,
    )
    half = len(measured) // 2
    if arguments.step_times:
        step_times = LinearStepTimes(*(float(figure) for figure in arguments.step_times.split(",")))
    else:
        step_times = fit_step_times(measured, settings, range(half))
    print(step_times)
    simulated = replay(measured, settings, step_times)
    rows = []
    for part, indices in (("first half", range(half)), ("second half", range(half, len(measured)))):
        for name, errors in replay_errors(simulated, measured, indices).items():
            rows.append([part, name, f"{errors.mean:+.1%}", f"{errors.each:.1%}", f"{errors.median:.1%}"])
    print(tabulate(rows, headers=["requests", "figure", "mean", "each", "median"], disable_numparse=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
