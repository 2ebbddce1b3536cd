"""Requests to an engine and the loads that issue them: files, Poisson arrivals and closed loops of clients."""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random


@dataclass(frozen=True, slots=True)
class Request:
    """Tokens of a request and its arrival in s; `prefix_tokens` of the input are in the engine's prefix cache."""

    arrival: float
    input_tokens: int
    output_tokens: int
    prefix_tokens: int = 0

    def __post_init__(self) -> None:
        if self.input_tokens < 1 or self.output_tokens < 1:
            raise ValueError(f"{self}: a request has at least one input and one output token")
        if not 0 <= self.prefix_tokens <= self.input_tokens:
            raise ValueError(f"{self}: prefix_tokens are some of the input tokens")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts of requests, uniform between two bounds; `hit_rate` of each input is in the prefix cache."""

    input_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    hit_rate: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.hit_rate <= 1:
            raise ValueError(f"hit_rate is a share between 0 and 1, got {self.hit_rate}")

    def draw(self, random: Random, arrival: float) -> Request:
        tokens = random.randint(*self.input_tokens)
        return Request(arrival, tokens, random.randint(*self.output_tokens), int(tokens * self.hit_rate))


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Clients that issue a request after the last one's last token, from second 0 on whatever the arrival times."""

    clients: int
    requests: Iterable[Request]

    def __post_init__(self) -> None:
        if self.clients < 1:
            raise ValueError(f"a closed loop has at least one client, got {self.clients}")


def poisson_requests(rate: float, count: int, lengths: Lengths, *, seed: int = 0) -> Iterator[Request]:
    """Yield requests that arrive at random, `rate` a second in the mean.

    >>> requests = list(poisson_requests(10, 1000, Lengths((100, 100), (20, 30))))
    >>> 90 < requests[-1].arrival < 110
    True
    """
    if rate <= 0:
        raise ValueError(f"a rate of requests is above 0, got {rate}")
    random = Random(seed)
    arrival = 0.0
    for _ in range(count):
        arrival += random.expovariate(rate)
        yield lengths.draw(random, arrival)


def client_requests(count: int, lengths: Lengths, *, seed: int = 0) -> Iterator[Request]:
    """Yield requests for a closed loop.

    >>> next(client_requests(1, Lengths((8192, 8192), (1024, 1024), hit_rate=0.5)))
    Request(arrival=0.0, input_tokens=8192, output_tokens=1024, prefix_tokens=4096)
    """
    random = Random(seed)
    for _ in range(count):
        yield lengths.draw(random, 0.0)


def read_requests(path: str | Path) -> list[Request]:
    """Read requests in order of arrival from CSV: arrival, input_tokens, output_tokens, optional prefix_tokens."""
    with open(path, newline="") as file:
        reader = csv.DictReader(file)
        missing = {"arrival", "input_tokens", "output_tokens"} - set(reader.fieldnames or ())
        if missing:
            raise ValueError(f"{path}: no column {', '.join(sorted(missing))} in a file of requests")
        requests = [
            Request(
                float(row["arrival"]),
                int(row["input_tokens"]),
                int(row["output_tokens"]),
                int(row.get("prefix_tokens") or 0),
            )
            for row in reader
        ]
    return sorted(requests, key=lambda request: request.arrival)
