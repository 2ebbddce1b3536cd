"""Seconds of an engine's steps, for a simulation of requests to a model on a device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class StepTimes(Protocol):
    """Seconds of an engine's steps; with speculative decoding with the draft and verification of all draft tokens."""

    def seconds(self, chunks: Sequence[tuple[int, int]], decoding: int, cached: float, everyone: int | None) -> float:
        """Return the seconds of a step of one replica.

        `chunks` are (new tokens, cached tokens before them) of prompts, `decoding` the sequences that decode, `cached`
        the sum of the tokens in their caches. `everyone` are the new tokens of all replicas, None if they
        have as many each.
        """

    def decode_seconds(self, decoding: int, cached: Sequence[float], everyone: int | None) -> list[float]:
        """Return the seconds of steps that only decode, for each sum of cached tokens, which do not fall."""


@dataclass(frozen=True, slots=True)
class LinearStepTimes:
    """Step times of five figures in seconds: a stand-in for a model, to fit measured steps with.

    A step takes `step` (reading the weights, and the host's overhead), `prompt_token` for each new token of a prompt,
    `attention` for each pair of such a token and one before it, and `cached_token` for each cached token that decoding
    reads, or `mixed_cached_token` where the step has prompts too: one attention kernel for both reads more slowly.

    >>> times = LinearStepTimes(0.010, prompt_token=1e-4, cached_token=1e-7, mixed_cached_token=2e-7, attention=1e-9)
    >>> round(times.seconds([(1000, 0)], decoding=2, cached=10_000), 4)
    0.1125
    """

    step: float
    prompt_token: float
    cached_token: float
    mixed_cached_token: float
    attention: float

    def seconds(
        self, chunks: Sequence[tuple[int, int]], decoding: int, cached: float, everyone: int | None = None
    ) -> float:
        """Return the seconds of a step, as `StepTimes.seconds`; other replicas' tokens cost nothing."""
        if not chunks:
            return self.step + self.cached_token * cached
        tokens = sum(new for new, _ in chunks)
        pairs = sum(new * (before + new / 2) for new, before in chunks)
        read = self.mixed_cached_token * cached
        return self.step + self.prompt_token * tokens + self.attention * pairs + read

    def decode_seconds(self, decoding: int, cached: Sequence[float], everyone: int | None = None) -> list[float]:
        """Return the seconds of steps that only decode, as `StepTimes.decode_seconds`."""
        return [tokens * self.cached_token + self.step for tokens in cached]
