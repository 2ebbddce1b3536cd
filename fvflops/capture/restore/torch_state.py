"""Restore torch's thread-local state (modes, grad mode, dispatch keys) where an exception skipped the cleanup."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, _GeneratorContextManager, contextmanager, nullcontext
from types import CodeType, TracebackType
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from fvflops.capture.restore import interrupts
from fvflops.capture.restore.forks import undone_in_child
from fvflops.torch_internals import (
    ForceDispatchKeys,
    InferenceMode,
    TorchDispatchMode,
    disable_dispatch_modes,
    dispatch_mode_stack,
    excluded_keys,
    forward_ad_level,
    function_mode_stack,
    function_stack_length,
    get_function_state,
    grad_switch,
    included_keys,
    is_multithreading_enabled,
    is_view_replay_enabled,
    peek_interpreter,
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
    undo_functionalize,
    undo_grad,
    undo_jvp,
    undo_vmap,
)

# torch's global flags about active modes, and the attributes in which modes save their previous values.
_FLAGS = {
    name: attribute
    for name, attribute in (
        ("_is_in_torch_dispatch_mode", "old_dispatch_mode_flags"),
        ("_is_in_non_infra_torch_dispatch_mode", "old_non_infra_dispatch_mode_flags"),
        (
            "_is_in_any_mode_without_ignore_compile_internals",
            "old_without_ignore_compile_internals_dispatch_mode_flags",
        ),
    )
    if hasattr(python_dispatch, name)
}
# torch.func's own function that undoes all layers fails in torch 2.11 and older.
_UNDO_TRANSFORM = {
    "Vmap": undo_vmap,
    "Grad": undo_grad,
    "Jvp": undo_jvp,
    "Functionalize": undo_functionalize,
}
_AUTOCAST_DEVICES = ("cpu", "cuda", "mtia", "maia", "xpu", "ipu", "hpu", "xla", "privateuseone", "mps")
_DEVICES = tuple(filter(torch.amp.is_autocast_available, _AUTOCAST_DEVICES))  # of this torch
# Guards that are never freed: their exit would undo the restored state.
_guards: list[Any] = []


class model_runs:
    """A context for the model's run, inside `deferred`, that allows signals and restores the thread's state.

    The state is restored after exceptions too, since a signal may interrupt `__enter__` or `__exit__` in torch.
    """

    def __enter__(self) -> None:
        self._state = TorchState()
        self._allowed = interrupts.allowed()
        self._allowed.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._allowed.__exit__(kind, error, traceback)
        try:
            close_interrupted_contexts(error)
        finally:
            self._state.restore()


class TorchState:
    """A thread's state in torch: active modes, grad mode, autocast, dispatch keys, hooks and levels."""

    def __init__(self) -> None:
        self._before = _read_state()
        self._key_sets = included_keys(), excluded_keys()

    def restore(self) -> None:
        """Restore all state that has changed."""
        if _read_state() == self._before:  # the usual case
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
        while transform_depth() > layers:
            _UNDO_TRANSFORM[peek_interpreter().key().name]()
        while forward_ad_level() > level:
            forward_ad.exit_dual_level()
        while (top := top_saved_hooks(True)) is not None and not _are_identical(top, hooks):
            pop_saved_hooks()
        if not _are_identical(function_mode_stack(), function_modes):
            _set_function_modes(function_modes)
        if get_function_state() != function_state:
            set_function_state(function_state)
        if not _are_identical(dispatch_mode_stack(), modes):
            _set_modes(modes)
        for mode, lengths in zip(modes, depths, strict=True):
            for attribute, length in zip(_FLAGS.values(), lengths, strict=True):
                values = getattr(mode, attribute)
                while len(values) > length:
                    values.pop()
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
            guard = ForceDispatchKeys(*self._key_sets)
            guard.__enter__()
            _guards.append(guard)


def _read_state() -> tuple[Any, ...]:
    modes = dispatch_mode_stack()
    return (
        modes,
        [[len(getattr(mode, attribute)) for attribute in _FLAGS.values()] for mode in modes],
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


def close_interrupted_contexts(error: BaseException | None) -> None:
    """Close contexts whose `__enter__` or `__exit__` an exception interrupted, so that no `with` statement does.

    The exception keeps them alive; freed later, they would restore an outdated state during another run.
    """
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        traceback = error.__traceback__
        while traceback is not None:
            close = _CLOSE_BY_CODE.get(traceback.tb_frame.f_code)
            if close is not None:
                close(traceback.tb_frame.f_locals["self"])
            traceback = traceback.tb_next
        error = error.__context__


def _close_generator(context: Any) -> None:
    if not context.gen.gi_running:
        context.gen.close()


def _close_inference_mode(mode: torch.inference_mode) -> None:
    guard = getattr(mode, "_inference_mode_context", None)
    if guard is not None:
        guard.__exit__(None, None, None)


# Closing functions, by the code of the interrupted frame.
_CLOSE_BY_CODE: dict[CodeType, Callable[[Any], None]] = {
    _GeneratorContextManager.__enter__.__code__: _close_generator,
    _GeneratorContextManager.__exit__.__code__: _close_generator,
    torch.inference_mode.__enter__.__code__: _close_inference_mode,
    torch.inference_mode.__exit__.__code__: _close_inference_mode,
}


def without_modes() -> AbstractContextManager[Any]:
    """Return a context without dispatch modes; an empty one if none is active, since torch's takes 6 µs."""
    modes = dispatch_mode_stack()
    if not modes and not pre_dispatch_stack_length():
        return nullcontext()
    context: Any = disable_dispatch_modes()
    context.modes = modes  # keeps them alive, as in _set_modes
    return context


@contextmanager
def modes_removed() -> Iterator[None]:
    """Remove all dispatch modes while the context lasts, as `without_modes` does, but import nothing."""
    modes, flags = dispatch_mode_stack(), _get_flags()
    if not modes:
        yield
        return
    _set_modes([])
    _set_flags([False] * len(_FLAGS))
    try:
        yield
    finally:
        _set_modes(modes)
        _set_flags(flags)


@contextmanager
def dispatch_mode_active(mode: TorchDispatchMode) -> Iterator[None]:
    """Activate a dispatch mode while the context lasts, and remove it whatever happened to the mode stack."""
    mode.__enter__()
    with undone_in_child(lambda: _remove_mode(mode)):
        try:
            yield
        finally:
            _remove_mode(mode)


@contextmanager
def dispatch_mode_in_thread(mode: TorchDispatchMode) -> Iterator[None]:
    """Activate a dispatch mode in a thread that a run started, and which may outlive it.

    torch's flags are process-wide and set by the run's own mode: the thread changes none.
    """
    push_dispatch_mode(mode)
    try:
        yield
    finally:
        stack = dispatch_mode_stack()
        if any(item is mode for item in stack):
            _set_modes([item for item in stack if item is not mode])


def restore_modes(modes: Sequence[TorchDispatchMode]) -> None:
    """Push dispatch modes that an exception removed onto the stack again, below the active ones."""
    stack = dispatch_mode_stack()
    removed = [mode for mode in modes if not any(item is mode for item in stack)]
    if removed:
        _set_modes([*removed, *stack])


@contextmanager
def function_mode_removed(mode: TorchFunctionMode) -> Iterator[None]:
    """Remove a function mode, which code inside the context may activate, from the stack at the end."""

    def remove() -> None:
        stack = function_mode_stack()
        if any(item is mode for item in stack):
            _set_function_modes([item for item in stack if item is not mode])

    with undone_in_child(remove):
        try:
            yield
        finally:
            remove()


def _remove_mode(mode: TorchDispatchMode) -> None:
    stack = dispatch_mode_stack()
    positions = [position for position, item in enumerate(stack) if item is mode]
    if positions == [len(stack) - 1] and len(mode.old_dispatch_mode_flags) == 1:
        mode.__exit__(None, None, None)
        return
    if positions:
        _set_modes([item for item in stack if item is not mode])
    saved_flags = [getattr(mode, attribute) for attribute in _FLAGS.values()]
    if all(saved_flags) and positions:
        _set_flags([flags[0] for flags in saved_flags] if positions[0] == len(stack) - len(positions) else _get_flags())
    for flags in saved_flags:
        flags.clear()
    if not dispatch_mode_stack():
        _set_flags([False] * len(_FLAGS))


def _are_identical(left: Sequence[Any] | None, right: Sequence[Any] | None) -> bool:
    if left is None or right is None:
        return left is right
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


def _set_modes(modes: Sequence[TorchDispatchMode]) -> None:
    # The list keeps the modes alive: torch 2.10 and older pop a freed object if only the stack refers to it.
    for _ in dispatch_mode_stack():
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
    if hasattr(python_dispatch, "set_is_in_mode_without_ignore_compile_internals"):  # since torch 2.11: a copy in C++
        python_dispatch.set_is_in_mode_without_ignore_compile_internals(flags[-1])


def _get_keys() -> tuple[int, int]:
    return included_keys().raw_repr(), excluded_keys().raw_repr()


def _get_nesting() -> int:
    """Return the number of open autocast contexts, plus one."""
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
