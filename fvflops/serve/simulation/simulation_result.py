"""Result of a simulation of requests: times of each request, and their statistics."""

import json
from array import array
from dataclasses import astuple, dataclass, field
from math import nan

from fvflops.text import record_data


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles of seconds.

    >>> Distribution.of([1.0, 2.0, 3.0])
    Distribution(mean=2.0, p50=2.0, p90=2.8, p95=2.9, p99=2.98)
    """

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    def __add__(self, seconds: float) -> "Distribution":
        """Return the distribution of times that are `seconds` longer."""
        return Distribution(*(value + seconds for value in astuple(self)))

    @classmethod
    def of(cls, values: "list[float] | array[float]") -> "Distribution":
        """Return the distribution of some values, all nan where there are none."""
        if not values:
            return cls(nan, nan, nan, nan, nan)
        ordered = sorted(values)
        return cls(sum(ordered) / len(ordered), *(_percentile(ordered, share) for share in (0.5, 0.9, 0.95, 0.99)))


def _percentile(ordered: list[float], share: float) -> float:
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


@dataclass(slots=True)
class RequestTimes:
    """Columns of the requests in order of arrival: token counts, and seconds of their events.

    `queued` is when the scheduler saw a request, `scheduled` when it planned the first step of it, `first_token` and
    `last_token` when the steps that yield these ended.
    """

    input_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    output_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    arrival: "array[float]" = field(default_factory=lambda: array("d"))
    queued: "array[float]" = field(default_factory=lambda: array("d"))
    scheduled: "array[float]" = field(default_factory=lambda: array("d"))
    first_token: "array[float]" = field(default_factory=lambda: array("d"))
    last_token: "array[float]" = field(default_factory=lambda: array("d"))

    def add(self, arrival: float, input_tokens: int, output_tokens: int) -> int:
        """Append a request that has just arrived and return its index."""
        self.input_tokens.append(input_tokens)
        self.output_tokens.append(output_tokens)
        self.arrival.append(arrival)
        for column in (self.queued, self.scheduled, self.first_token, self.last_token):
            column.append(nan)
        return len(self.arrival) - 1

    def __len__(self) -> int:
        return len(self.arrival)

    def time_to_first_token(self) -> list[float]:
        """Return the seconds from each arrival to the first token."""
        return [first - arrival for first, arrival in zip(self.first_token, self.arrival, strict=True)]

    def time_per_output_token(self) -> list[float]:
        """Return (last - first) / (output tokens - 1) of the requests with two tokens or more."""
        columns = zip(self.first_token, self.last_token, self.output_tokens, strict=True)
        return [(last - first) / (tokens - 1) for first, last, tokens in columns if tokens > 1]

    def end_to_end(self) -> list[float]:
        """Return the seconds from each arrival to the last token."""
        return [last - arrival for last, arrival in zip(self.last_token, self.arrival, strict=True)]


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Requests of a simulation, and statistics of the engines.

    `idle_seconds` is the time without a step, and `steps` the number of steps, summed over the engines; `running` is
    the mean number of requests in the batches; `peak_pages` the most pages in use in any replica, of `pages`.
    """

    requests: RequestTimes
    engines: int
    steps: int
    idle_seconds: float
    running: float
    preemptions: int
    peak_pages: int
    pages: int

    @property
    def seconds(self) -> float:
        """Seconds from the first arrival to the last token."""
        return max(self.requests.last_token) - min(self.requests.arrival)

    @property
    def ttft(self) -> Distribution:
        """Seconds to the first token."""
        return Distribution.of(self.requests.time_to_first_token())

    @property
    def tpot(self) -> Distribution:
        """Seconds for each output token after the first."""
        return Distribution.of(self.requests.time_per_output_token())

    @property
    def end_to_end(self) -> Distribution:
        """Seconds from arrival to the last token."""
        return Distribution.of(self.requests.end_to_end())

    @property
    def requests_per_second(self) -> float:
        """Requests a second over the whole run."""
        return len(self.requests) / self.seconds

    @property
    def output_tokens_per_second(self) -> float:
        """Output tokens a second over the whole run."""
        return sum(self.requests.output_tokens) / self.seconds

    @property
    def utilisation(self) -> float:
        """Share of the time in which the engines run a step."""
        return 1 - self.idle_seconds / (self.engines * self.seconds)

    def steady_tokens_per_second(self) -> float:
        """Return the output tokens a second in the steady state.

        It lasts from when a tenth of the requests are done until the last one arrives in the engine's batch; tokens are
        spread evenly between the first and the last of a request. Over the whole run if the two overlap.
        """
        times = self.requests
        begin = sorted(times.last_token)[len(times) // 10]
        end = max(times.scheduled)
        if end <= begin:
            return self.output_tokens_per_second
        total = 0.0
        for first, last, tokens in zip(times.first_token, times.last_token, times.output_tokens, strict=True):
            total += begin <= first < end
            if last > first:
                total += (tokens - 1) * max(0.0, min(last, end) - max(first, begin)) / (last - first)
        return total / (end - begin)

    def steady_requests_per_second(self) -> float:
        """Return the requests a second in the steady state, each with the mean number of output tokens."""
        return self.steady_tokens_per_second() * len(self.requests) / sum(self.requests.output_tokens)

    def to_json(self) -> str:
        """Return the statistics as JSON, without the individual requests."""
        first = ("seconds", "ttft", "tpot", "end_to_end", "requests_per_second", "output_tokens_per_second")
        values = {"requests": len(self.requests), **record_data(self, *first)}
        values["steady_tokens_per_second"] = self.steady_tokens_per_second()
        values |= record_data(self, "utilisation", "running", "steps", "preemptions", "peak_pages", "pages")
        return json.dumps(values, indent=2)
