"""Random generators and settings of torch, NumPy and Python: saved states, and contexts that fix draws."""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.backends import cuda, cudnn, mha, mkldnn, opt_einsum, quantized

from fvflops.torch_internals import (
    MissingInternal,
    get_precision,
    global_device_context,
    grad_switch,
    message_of_missing,
    print_options,
    set_precision,
)

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


Undo = Callable[[], None]
_Get = Callable[[], Any]
_Set = Callable[[Any], Any]

_ABSENT = object()  # the value of a setting that this version of torch lacks
_NOT_ASSIGNED = object()
_FLOAT32_MATH = (("generic", "all"), *((name, op) for name in ("cuda", "mkldnn") for op in ("matmul", "conv")))
_AUTOCAST = ("cpu", "cuda")


def _attribute(owner: Any, name: str) -> tuple[_Get, _Set]:
    return partial(getattr, owner, name), partial(setattr, owner, name)


def _opt_einsum(name: str) -> tuple[tuple[_Get, _Set], ...]:
    """Return accessors of a setting of torch.backends.opt_einsum, and of the attribute that shadows it if assigned."""
    own = vars(opt_einsum)

    def restore(value: Any) -> None:
        if value is _NOT_ASSIGNED:
            own.pop(name, None)
        else:
            own[name] = value

    return _attribute(own["m"], name), (lambda: own.get(name, _NOT_ASSIGNED), restore)


def _set_default_device(context: Any) -> None:
    torch.set_default_device(None if context is None else context.device)
    if context is None:  # torch.get_default_device of torch 2.9 and older fails on None
        vars(global_device_context()).pop("device_context", None)


# Precision of float32 arithmetic, by backend and op; before torch 2.9, whether TF32 is allowed.
_PRECISIONS: tuple[tuple[_Get, _Set], ...] = (
    tuple(_attribute(backend, "allow_tf32") for backend in (cudnn, mkldnn))
    if get_precision is None or set_precision is None
    else tuple((partial(get_precision, *names), partial(set_precision, *names)) for names in _FLOAT32_MATH)
)

GRAD_MODE: tuple[_Get, _Set] = (
    torch.is_grad_enabled,
    torch.set_grad_enabled if message_of_missing(grad_switch[0]) else getattr(*grad_switch),
)
# (getter, setter) of each setting. A getter raises if this version of torch lacks the setting.
SETTINGS: tuple[tuple[_Get, _Set], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (lambda: getattr(global_device_context(), "device_context", None), _set_default_device),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _attribute(torch.utils.deterministic, "fill_uninitialized_memory"),
    GRAD_MODE,
    (
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda value: torch.autograd.set_detect_anomaly(*value),
    ),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_warn_always_enabled, torch.set_warn_always),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    *_PRECISIONS,
    *(_attribute(cudnn, name) for name in ("enabled", "benchmark", "benchmark_limit", "deterministic")),
    *(_attribute(mkldnn, name) for name in ("enabled", "deterministic")),
    *(_attribute(cuda.matmul, f"allow_{dtype}_reduced_precision_reduction") for dtype in ("fp16", "bf16")),
    (cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    (cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
    (cuda.math_sdp_enabled, cuda.enable_math_sdp),
    (cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp),
    (mha.get_fastpath_enabled, mha.set_fastpath_enabled),
    *(pair for name in ("enabled", "strategy") for pair in _opt_einsum(name)),
    _attribute(quantized, "engine"),
    *((partial(torch.is_autocast_enabled, name), partial(torch.set_autocast_enabled, name)) for name in _AUTOCAST),
    *((partial(torch.get_autocast_dtype, name), partial(torch.set_autocast_dtype, name)) for name in _AUTOCAST),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (lambda: dict(vars(print_options())), lambda options: vars(print_options()).update(options)),
    (sys.getrecursionlimit, sys.setrecursionlimit),
)


class SavedSettings:
    """Settings with their values before a run."""

    def __init__(self, settings: Sequence[tuple[_Get, _Set]]) -> None:
        self._settings = settings
        self._before = read_settings(settings)

    def restore(self) -> None:
        """Restore the settings that changed, in order."""
        if read_settings(self._settings) == self._before:  # the usual case
            return
        for (get, set_value), value in zip(self._settings, self._before, strict=True):
            if value is not _ABSENT and _read(get) != value:
                set_value(value)


def read_settings(settings: Sequence[tuple[_Get, _Set]]) -> list[Any]:
    """Return the values of settings, `_ABSENT` for settings that this version of torch lacks."""
    return [_read(get) for get, _ in settings]


def _read(get: _Get) -> Any:
    try:
        return get()
    except (RuntimeError, AttributeError, MissingInternal):
        return _ABSENT


def save_settings() -> Iterator[Undo]:
    """Yield functions that restore the random generators and the settings."""
    yield SavedSettings(SETTINGS).restore
    yield from global_generators()
    torch_state = torch.get_rng_state()
    yield lambda: torch.set_rng_state(torch_state)
    if torch.cuda.is_initialized():
        cuda_states = torch.cuda.get_rng_state_all()
        yield lambda: torch.cuda.set_rng_state_all(cuda_states)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy_errors = numpy.geterr()
        yield lambda: None if numpy.geterr() == numpy_errors else numpy.seterr(**numpy_errors)
