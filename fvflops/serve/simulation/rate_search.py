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
        """Say whether a simulation is within the limits; a figure that it lacks, as no output token, is."""
        return not (getattr(result.ttft, self.at) > self.ttft or getattr(result.tpot, self.at) > self.tpot)


def largest_rate(
    simulate_rate: Callable[[float], SimulationResult],
    limits: LatencyLimits,
    *,
    tolerance: float = 0.01,
    most: float = 1e6,
) -> float:
    """Return the largest rate of requests a second at which the limits hold, by bisection; 0.0 if at none.

    `simulate_rate` simulates a rate, with equal lengths and seed at each. Rates up to `most` are tried. The result is
    exact to the share `tolerance`, as far as latencies grow with the rate.
    """
    low, high = 0.0, 1.0
    while high <= most and limits.hold(simulate_rate(high)):
        low, high = high, 2 * high
    if high > most:
        return low
    if not low:
        # A rate at which requests hardly meet: if the limits do not hold there, they do at none.
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
