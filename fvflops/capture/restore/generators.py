"""Random generators: their saved states, and contexts that fix their draws."""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

_WORDS = 624  # of a Mersenne twister's state
_EXTREME_WORDS = 600  # as many of them `extreme_draws` replaces
# A state of torch's CPU generator: seed, words left, whether seeded, next word, the words as 64 bits each, and unused
# normal draws.
_TORCH_STATE = struct.Struct(f"=Qii Q {_WORDS}Q 40x")


class SavedGenerator:
    """A random generator of Python or NumPy with its state before a run; a call restores the state."""

    __slots__ = ("_before", "_read", "_write")

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], Any], before: Any = None) -> None:
        self._read = read
        self._write = write
        self._before = read() if before is None else before

    def __call__(self) -> None:
        self._write(self._before)

    def state(self) -> Any:
        return comparable(self._read())

    @property
    def has_drawn(self) -> bool:
        return bool(self.state() != comparable(self._before))


def comparable(state: Any) -> Any:
    """Return a state with its arrays and tensors converted, so that == returns a bool."""
    if isinstance(state, torch.Tensor):
        return state.tolist()
    if isinstance(state, dict):
        return {key: comparable(value) for key, value in state.items()}
    if type(state) is tuple and isinstance(state[0], str):  # NumPy's, not the 625 integers of Python's
        return tuple(map(comparable, state))
    return state.tobytes() if hasattr(state, "tobytes") else state


def global_generators() -> Iterator[SavedGenerator]:
    """Yield the global generators of Python and, if it is imported, NumPy."""
    yield SavedGenerator(random.getstate, random.setstate)
    numpy_random = _numpy_random()
    if numpy_random is not None:
        yield SavedGenerator(numpy_random.get_state, numpy_random.set_state)


def _numpy_random() -> Any:
    """Return NumPy's module of random numbers, None where NumPy is not imported or cannot be."""
    try:
        return getattr(sys.modules.get("numpy"), "random", None)
    except ImportError:  # NumPy imports it on first use
        return None


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch's CPU while the context lasts.

    >>> with seeded(3):
    ...     first = random.random(), float(torch.rand(()))
    >>> with seeded(3):
    ...     (random.random(), float(torch.rand(()))) == first
    True
    """
    with ExitStack() as stack:
        for saved in global_generators():
            stack.callback(saved)
        stack.enter_context(torch.random.fork_rng(devices=()))
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        numpy_random = _numpy_random()
        if numpy_random is not None:
            numpy_random.seed(seed)
        yield


@contextmanager
def extreme_draws(*, high: bool) -> Iterator[None]:
    """Make the next draws of the global generators nearly the lowest or the highest while the context lasts.

    All three are Mersenne twisters: most words of their states are replaced by one whose output is extreme, which lasts
    for some 300 floats. The other words are drawn, so that later draws, such as in a loop that rejects extremes, vary.

    >>> with extreme_draws(high=True):
    ...     random.random() > 0.999999, bool(torch.rand(()) > 0.999999)
    (True, True)
    >>> with extreme_draws(high=False):
    ...     random.random() < 0.0001, bool(torch.rand(()) < 0.0001)
    (True, True)
    """
    word = _untemper((1 << 32) - 1 if high else 1 << 6)
    with seeded(0):
        words = [word] * _EXTREME_WORDS + [random.getrandbits(32) for _ in range(_WORDS - _EXTREME_WORDS)]
        random.setstate((3, (*words, 0), None))
        numpy_random = _numpy_random()
        if numpy_random is not None:
            numpy_random.set_state(("MT19937", words, 0))
        torch_state = _TORCH_STATE.pack(0, _WORDS, 1, 0, *words)
        torch.set_rng_state(torch.frombuffer(bytearray(torch_state), dtype=torch.uint8))
        yield


def _untemper(output: int) -> int:
    """Return the word of a Mersenne twister's state that produces this output, by inverting the four tempering steps.

    Source: Matsumoto and Nishimura, Mersenne twister (1998), https://doi.org/10.1145/272991.272995, section 2.1.
    """
    word = output ^ output >> 18
    word ^= word << 15 & 0xEFC60000
    value = word
    for _ in range(4):
        value = word ^ (value << 7 & 0x9D2C5680)
    word = value & 0xFFFFFFFF
    for _ in range(2):
        value = word ^ value >> 11
    return value & 0xFFFFFFFF
