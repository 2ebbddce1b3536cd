"""Put back what a thread has in torch, where an exception broke off code that would have: modes, grad mode, keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, _GeneratorContextManager, contextmanager, nullcontext
from types import CodeType, TracebackType
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from fvflops.capture.restore.forks import undone_in_child
from fvflops.capture.restore.interrupts import allowed
from fvflops.torch_internals import (
    DispatchKeySet,
    ForceDispatchKeys,
    InferenceMode,
    TorchDispatchMode,
    autocast_devices,
    disable_dispatch_modes,
    dispatch_mode_stack,
    dispatch_stack_length,
    excluded_keys,
    forward_ad_level,
    function_mode_stack,
    function_stack_length,
    get_function_state,
    grad_switch,
    included_keys,
    is_multithreading_enabled,
    is_view_replay_enabled,
    pop_dispatch_mode,
    pop_function_mode,
    pop_saved_hooks,
    pre_dispatch_stack_length,
    push_dispatch_mode,
    push_function_mode,
    python_dispatch,
    set_function_state,
    set_multithreading,
    set_view_replay,
    top_saved_hooks,
    transform_depth,
    undo_transforms,
)

# What torch notes beside the stack of modes, and keeps in each mode that is on for when that is off again.
_FLAGS = {
    name: kept
    for name, kept in (
        ("_is_in_torch_dispatch_mode", "old_dispatch_mode_flags"),
        ("_is_in_non_infra_torch_dispatch_mode", "old_non_infra_dispatch_mode_flags"),
        (
            "_is_in_any_mode_without_ignore_compile_internals",
            "old_without_ignore_compile_internals_dispatch_mode_flags",
        ),
    )
    if hasattr(python_dispatch, name)
}
_DEVICES = autocast_devices()
# Guards that are never to end: what they guard was put back so.
_guards: list[Any] = []


class model_runs:
    """A context for a model's run, inside of `deferred`: signals come through, and this thread is in the end as it was.

    It is so after any exception, since what a signal breaks off may be torch's own `__enter__` or `__exit__`.
    """

    def __enter__(self) -> None:
        self._state = TorchState()
        self._allowed = allowed()
        self._allowed.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._allowed.__exit__(kind, error, traceback)
        try:
            end_contexts(error)
        finally:
            self._state.restore()


class TorchState:
    """What one thread has in torch: the modes that are on, grad mode, autocast, dispatch keys, hooks and levels."""

    def __init__(self) -> None:
        self._before = _read_state()

    def restore(self) -> None:
        """Put back whatever differs."""
        if _read_state() == self._before:  # as after nearly every run
            return
        (
            modes,
            depths,
            flags,
            function_modes,
            function_state,
            keys,
            inference,
            settings,
            nesting,
            hooks,
            layers,
            level,
        ) = self._before
        if transform_depth() > layers:
            undo_transforms(layers)
        while forward_ad_level() > level:
            forward_ad.exit_dual_level()
        while (top := top_saved_hooks(True)) is not None and not _are_same(top, hooks):
            pop_saved_hooks()
        if not _are_same(function_mode_stack(), function_modes):
            _set_function_modes(function_modes)
        if get_function_state() != function_state:
            set_function_state(function_state)
        if not _are_same(dispatch_mode_stack(), modes):
            _set_modes(modes)
        for mode, lengths in zip(modes, depths, strict=True):
            for kept, length in zip(_FLAGS.values(), lengths, strict=True):
                before = getattr(mode, kept)
                while len(before) > length:
                    before.pop()
        _set_flags(flags)
        while _get_nesting() > nesting:
            torch.autocast_decrement_nesting()
        if torch.is_inference_mode_enabled() != inference:
            guard = InferenceMode(inference)
            guard.__enter__()
            _guards.append(guard)
        if _get_settings() != settings:
            _set_settings(settings)
        if _get_keys() != keys:
            _set_keys(keys)


def _read_state() -> tuple[Any, ...]:
    modes = dispatch_mode_stack()
    return (
        modes,
        [[len(getattr(mode, kept)) for kept in _FLAGS.values()] for mode in modes],
        _get_flags(),
        function_mode_stack(),
        get_function_state(),
        _get_keys(),
        torch.is_inference_mode_enabled(),
        _get_settings(),
        _get_nesting(),
        top_saved_hooks(True),
        transform_depth(),
        forward_ad_level(),
    )


def end_contexts(error: BaseException | None) -> None:
    """End the contexts that an exception left before or behind a with statement, in an `__enter__` or `__exit__`.

    What holds them is the exception: they would end with it, some time later, and put back what there was in the midst
    of the run.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        place = error.__traceback__
        while place is not None:
            end = _ENDS.get(place.tb_frame.f_code)
            if end is not None:
                end(place.tb_frame.f_locals["self"])
            place = place.tb_next
        error = error.__context__


def _end_generator(context: Any) -> None:
    if not context.gen.gi_running:
        context.gen.close()


def _end_inference_mode(mode: torch.inference_mode) -> None:
    guard = getattr(mode, "_inference_mode_context", None)
    if guard is not None:
        guard.__exit__(None, None, None)


# By the code in which an exception finds such a context.
_ENDS: dict[CodeType, Callable[[Any], None]] = {
    _GeneratorContextManager.__enter__.__code__: _end_generator,
    _GeneratorContextManager.__exit__.__code__: _end_generator,
    torch.inference_mode.__enter__.__code__: _end_inference_mode,
    torch.inference_mode.__exit__.__code__: _end_inference_mode,
}


def without_modes() -> AbstractContextManager[Any]:
    """Return a context in which no dispatch mode is on: torch's own, which takes 6 µs, where one is on now."""
    is_any_on = dispatch_stack_length() or pre_dispatch_stack_length()
    return disable_dispatch_modes() if is_any_on else nullcontext()


@contextmanager
def mode_is_on(mode: TorchDispatchMode) -> Iterator[None]:
    """Keep a dispatch mode on for as long as the context lasts, whatever was done to the stack of modes meanwhile."""
    mode.__enter__()
    with undone_in_child(lambda: _take_off(mode)):
        try:
            yield
        finally:
            _take_off(mode)


def put_back_modes(modes: Sequence[TorchDispatchMode]) -> None:
    """Put on again, below those that are on, the dispatch modes among some that an exception has left off."""
    stack = dispatch_mode_stack()
    lost = [mode for mode in modes if not any(item is mode for item in stack)]
    if lost:
        _set_modes([*lost, *stack])


@contextmanager
def function_mode_goes(mode: TorchFunctionMode) -> Iterator[None]:
    """Leave none of a function mode on when the context ends, which is off and on in it."""

    def take_off() -> None:
        stack = function_mode_stack()
        if any(item is mode for item in stack):
            _set_function_modes([item for item in stack if item is not mode])

    with undone_in_child(take_off):
        try:
            yield
        finally:
            take_off()


def _take_off(mode: TorchDispatchMode) -> None:
    stack = dispatch_mode_stack()
    places = [place for place, item in enumerate(stack) if item is mode]
    if places == [len(stack) - 1] and len(mode.old_dispatch_mode_flags) == 1:
        mode.__exit__(None, None, None)
        return
    if places:
        _set_modes([item for item in stack if item is not mode])
    before = [getattr(mode, kept) for kept in _FLAGS.values()]
    if all(before) and places:
        _set_flags([flags[0] for flags in before] if places[0] == len(stack) - len(places) else _get_flags())
    for flags in before:
        flags.clear()
    if not dispatch_mode_stack():
        _set_flags([False] * len(_FLAGS))


def _are_same(some: Sequence[Any] | None, others: Sequence[Any] | None) -> bool:
    if some is None or others is None:
        return some is others
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _set_modes(modes: Sequence[TorchDispatchMode]) -> None:
    while dispatch_mode_stack():
        pop_dispatch_mode()
    for mode in modes:
        push_dispatch_mode(mode)


def _set_function_modes(modes: Sequence[TorchFunctionMode]) -> None:
    while function_stack_length():
        pop_function_mode()
    for mode in modes:
        push_function_mode(mode)


def _get_flags() -> list[bool]:
    return [getattr(python_dispatch, name) for name in _FLAGS]


def _set_flags(flags: Sequence[bool]) -> None:
    for name, flag in zip(_FLAGS, flags, strict=True):
        setattr(python_dispatch, name, flag)
    if "_is_in_any_mode_without_ignore_compile_internals" in _FLAGS:
        python_dispatch.set_is_in_mode_without_ignore_compile_internals(flags[-1])


def _get_keys() -> tuple[int, int]:
    get = included_keys, excluded_keys
    return get[0]().raw_repr(), get[1]().raw_repr()


def _set_keys(keys: tuple[int, int]) -> None:
    guard = ForceDispatchKeys(*map(DispatchKeySet.from_raw_repr, keys))
    guard.__enter__()
    _guards.append(guard)


def _get_nesting() -> int:
    """Return how many autocast contexts are open, plus one."""
    nesting: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return nesting


def _get_settings() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        is_multithreading_enabled(),
        is_view_replay_enabled(),
        torch.is_autocast_cache_enabled(),
        *[torch.get_autocast_dtype(device) for device in _DEVICES],
    )


def _set_settings(settings: tuple[Any, ...]) -> None:
    grad, threads, replay, cache, *dtypes = settings
    getattr(*grad_switch)(grad)
    set_multithreading(threads)
    set_view_replay(replay)
    torch.set_autocast_cache_enabled(cache)
    for device, dtype in zip(_DEVICES, dtypes, strict=True):
        torch.set_autocast_dtype(device, dtype)
