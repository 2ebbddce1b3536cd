"""Find the largest rate of requests that an engine sustains within limits of latency."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fvflops.serve.simulation.simulation_result import SimulationResult


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """Limits in seconds of the time to the first token and per output token, at the mean or a percentile."""

    ttft: float = float("inf")
    tpot: float = float("inf")
    at: Literal["mean", "p50", "p90", "p95", "p99"] = "p99"

    def hold(self, result: SimulationResult) -> bool:
        """Return whether a simulation is within the limits; a figure that it lacks (NaN) does not exceed its limit."""
        return not (getattr(result.ttft, self.at) > self.ttft or getattr(result.tpot, self.at) > self.tpot)


def largest_rate(
    simulate_rate: Callable[[float], SimulationResult],
    limits: LatencyLimits,
    *,
    tolerance: float = 0.01,
    most: float = 1e6,
) -> float:
    """Return the largest rate of requests a second at which the limits hold, by bisection; 0.0 if there is none.

    `simulate_rate` simulates a rate, with the same lengths and seed for all. Rates up to `most` are tried. The relative
    error is at most `tolerance`, provided that latencies grow with the rate.
    """
    low, high = 0.0, 1.0
    while high <= most and limits.hold(simulate_rate(high)):
        low, high = high, 2 * high
    if high > most:
        return low
    if not low:
        # At this rate requests hardly overlap: limits that do not hold here hold at no rate.
        low = 1.0 / 1024
        if not limits.hold(simulate_rate(low)):
            return 0.0
    while high - low > tolerance * low:
        middle = (low + high) / 2
        if limits.hold(simulate_rate(middle)):
            low = middle
        else:
            high = middle
    return low
