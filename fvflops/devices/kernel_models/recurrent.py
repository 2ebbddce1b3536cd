"""Time of gated linear attention and state-space layers on a GPU: scans in chunks, and steps of one token."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from fvflops.devices.kernel_models.memory_bound import MemoryFigures, memory_seconds, moving_seconds
from fvflops.devices.kernel_models.products import Processor, combine

# Tokens of a chunk; one thread block takes the chunks of a head one after the other.
_CHUNK = 64
# Elements of the state that figures are of.
_STATE = 128 * 128
_STATE_BYTES, _GATE_BYTES = 4, 4
# Norm of computing and moving.
_OVERLAP = 2.0


class Recurrence(NamedTuple):
    """`batch` sequences of `tokens`, each head with a state of `key_size` by `size` elements, of fp32.

    `key_heads` of queries and keys are shared by `heads` of values, as the groups of Mamba-2's B and C are.
    """

    batch: int
    tokens: int
    key_heads: int
    heads: int
    key_size: int = 128
    size: int = 128
    element_bytes: float = 2.0

    @property
    def state_bytes(self) -> float:
        """Bytes of reading and writing all states once."""
        return 2 * _STATE_BYTES * self.batch * self.heads * self.key_size * self.size

    @property
    def token_bytes(self) -> float:
        """Bytes of all queries, keys, values, two gates and results."""
        elements = 2 * (self.key_heads * self.key_size + self.heads * self.size)
        return self.batch * self.tokens * (elements * self.element_bytes + 2 * self.heads * _GATE_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentFigures(MemoryFigures):
    """Parameters of the time of a scan besides the GPU's bandwidth; times are in seconds.

    `step` is the time of one chunk of one head with a state of 128 x 128, `state` how often states are read and
    written. Tokens are moved once at `bandwidth`, which is little for kernels that move them often.
    """

    step: float
    state: float


def recurrent_seconds(shape: Recurrence, gpu: Processor, figures: RecurrentFigures) -> float:
    """Return the seconds of a scan: chunks of a head follow each other, heads share the multiprocessors.

    >>> hopper = RecurrentFigures(start=8e-6, step=3e-6, state=1.7, bandwidth=0.84, cached=1.8, cache=45e6)
    >>> gpu = Processor(132, 989e12, 3.35e12)
    >>> [round(recurrent_seconds(Recurrence(1, 65536, 16, heads), gpu, hopper) * 1e3, 2) for heads in (16, 132, 133)]
    [3.1, 3.57, 6.41]
    """
    waves = ceil(shape.batch * shape.heads / gpu.multiprocessors)
    computing = waves * ceil(shape.tokens / _CHUNK) * figures.step * shape.key_size * shape.size / _STATE
    moved = shape.token_bytes + figures.state * shape.state_bytes
    moving = moving_seconds(moved, gpu.bandwidth * figures.bandwidth, figures.cached, figures.cache)
    return figures.start + combine(computing, moving, _OVERLAP)


def recurrent_step_seconds(shape: Recurrence, gpu: Processor, figures: MemoryFigures) -> float:
    """Return the seconds of one token of each sequence: a kernel that is bound by the bytes of the states."""
    return memory_seconds(shape.token_bytes + shape.state_bytes, gpu.bandwidth, figures)
