"""Seconds of an engine's steps: what a simulation of requests asks of a model on a device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class StepTimes(Protocol):
    """Seconds that one step of an engine takes.

    With speculative decoding a step includes the draft and the verification of all draft tokens.
    """

    def seconds(self, chunks: Sequence[tuple[int, int]], decoding: int, cached: float) -> float:
        """Return the seconds of a step.

        `chunks` are (new tokens, cached tokens before them) of prompts, `decoding` the sequences that decode, `cached`
        the sum of the tokens in their caches.
        """

    def decode_seconds(self, decoding: int, cached: Tensor) -> Tensor:
        """Return the seconds of steps that only decode, for a float64 tensor of sums of cached tokens."""


@dataclass(frozen=True, slots=True)
class LinearStepTimes:
    """Step times of five figures in seconds: a stand-in for a model, to fit measured steps with.

    A step takes the larger of `weights` (reading the weights) and `token` times its tokens (arithmetic), and in
    addition `host`, `cached_token` for each cached token that decoding reads, and `attention` for each pair of a new
    token of a prompt and a token before it.

    >>> times = LinearStepTimes(weights=0.010, token=1e-4, cached_token=1e-7, attention=1e-9, host=0.001)
    >>> round(times.seconds([(1000, 0)], decoding=2, cached=10_000), 4)
    0.1027
    """

    weights: float
    token: float
    cached_token: float
    attention: float
    host: float

    def seconds(self, chunks: Sequence[tuple[int, int]], decoding: int, cached: float) -> float:
        """Return the seconds of a step, as `StepTimes.seconds`."""
        tokens, pairs = decoding, 0.0
        for new, before in chunks:
            tokens += new
            pairs += new * (before + new / 2)
        read = cached * self.cached_token
        return read + (max(self.weights, self.token * tokens) + self.host + pairs * self.attention)

    def decode_seconds(self, decoding: int, cached: Tensor) -> Tensor:
        """Return the seconds of steps that only decode, as `StepTimes.decode_seconds`."""
        return cached * self.cached_token + (max(self.weights, self.token * decoding) + self.host)
