"""Requests to an engine, the loads that issue them, and their state inside the engine."""

import csv
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Series
from dataclasses import dataclass
from math import log
from pathlib import Path
from random import Random

from fvflops.serve.simulation.engine_settings import Speculation


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
            raise ValueError(f"hit_rate must be from 0 to 1, got {self.hit_rate}")

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
    """Yield requests that arrive at random, `rate` a second on average.

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


@dataclass(slots=True, eq=False)
class Sequence:
    """State of a request in an engine.

    `target` tokens have to be in the cache before the next token comes out: the prompt, or also the generated tokens
    after a preemption. While it decodes, `joined` is the number of the decode step before its first, and it takes
    `steps` steps for `remaining` tokens, spread evenly. After a preemption `kept_pages` full pages are in the prefix
    cache, which others reuse one by one once `kept_until` pages have been allocated in all.
    """

    index: int
    request: Request
    arrival: float
    target: int
    computed: int
    output_tokens: int
    generated: int = 0
    joined: int = -1
    steps: int = 0
    remaining: int = 0
    cached: int = 0
    pages: int = 0
    kept_pages: int = 0
    kept_until: int = 0

    @property
    def final_tokens(self) -> int:
        """Tokens in the cache at the end: the last token is not written to it."""
        return self.request.input_tokens + self.output_tokens - 1

    @property
    def tokens_a_step(self) -> int | float:
        """Tokens that a decode step yields, an integer where it is one."""
        return 1 if self.steps == self.remaining else self.remaining / self.steps

    def tokens_after(self, steps: int) -> int:
        """Return the tokens that a number of decode steps yielded."""
        return steps * self.remaining // self.steps

    def page_steps(self, page_size: int, draft_tokens: int) -> Series[int]:
        """Return the decode steps that take a further page: a step needs room for one token and the draft tokens."""
        if self.steps == self.remaining and not draft_tokens:
            first = self.joined + 1 + self.pages * page_size - self.cached
            return range(first, self.joined + self.steps + 1, page_size)
        first_step = self.joined + 1
        final_pages = -(-(self.cached + self.remaining) // page_size)
        tokens = [page * page_size - self.cached - draft_tokens for page in range(self.pages, final_pages)]
        return [first_step + max(0, -(-count * self.steps // self.remaining)) for count in tokens]

    def begin_decoding(self, joined: int, steps: int) -> None:
        """Set the state of a sequence whose first decode step comes after step `joined`."""
        self.joined = joined
        self.remaining = self.output_tokens - self.generated
        self.steps = steps
        self.cached = self.request.input_tokens + self.generated - 1


def decode_steps(tokens: int, speculation: Speculation | None, seed: str) -> int:
    """Return the steps that generate tokens: as many, or fewer at random with speculative decoding.

    Each step yields one token and those draft tokens that are accepted, of which the first rejected one ends the rest.

    >>> [decode_steps(100, Speculation(3, acceptance), "") for acceptance in (0, 0.5, 1)]
    [100, 56, 25]
    """
    if speculation is None:
        return tokens
    acceptance, draft = speculation.acceptance, speculation.draft_tokens
    if acceptance in (0, 1):
        return -(-tokens // (1 + (draft if acceptance else 0)))
    scale = log(acceptance)
    random = Random(seed)
    steps = 0
    while tokens > 0:
        tokens -= 1 + min(draft, int(log(1 - random.random()) / scale))
        steps += 1
    return steps
