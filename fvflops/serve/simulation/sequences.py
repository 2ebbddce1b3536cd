"""A request inside an engine: its tokens in the cache, and the decode steps that it takes."""

from collections.abc import Sequence as Series
from dataclasses import dataclass
from math import log
from random import Random

from fvflops.serve.simulation.engine_settings import Speculation
from fvflops.serve.simulation.requests import Request


@dataclass(slots=True, eq=False)
class Sequence:
    """State of a request in an engine.

    `target` tokens have to be in the cache before the next token comes out: the prompt, or also the generated tokens
    after a preemption. While it decodes, `joined` is the number of the decode step before its first, and it takes
    `steps` steps for `remaining` tokens, spread evenly. After a preemption `kept_pages` full pages are in the prefix
    cache, of which others take one after the other once they have taken `kept_until` pages in all.
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
        """Return the tokens that so many decode steps yielded."""
        return steps * self.remaining // self.steps

    def page_steps(self, page_size: int, draft_tokens: int) -> Series[int]:
        """Return the decode steps that take a further page: a step needs room for one token and the draft tokens."""
        if self.steps == self.remaining and not draft_tokens:
            first = self.joined + 1 + self.pages * page_size - self.cached
            return range(first, self.joined + self.steps + 1, page_size)
        first_step = self.joined + 1
        final_pages = -(-(self.cached + self.remaining) // page_size)
        steps = []
        for page in range(self.pages, final_pages):
            tokens = page * page_size - self.cached - draft_tokens
            steps.append(first_step + max(0, -(-tokens * self.steps // self.remaining)))
        return steps

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
