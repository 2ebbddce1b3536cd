"""Restore torch's thread-local state (modes, grad mode, dispatch keys), and read FSDP2's state of modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, _GeneratorContextManager, contextmanager, nullcontext
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from fvflops import torch_internals as internals
from fvflops.capture.restore import interrupts
from fvflops.capture.restore.forks import undone
from fvflops.capture.restore.global_state import GRAD_MODE, SavedSettings

_IGNORED = "without_ignore_compile_internals"
# torch's global flags about active modes, and the attributes in which modes save their previous values.
_FLAGS = {
    name: attribute
    for name, attribute in (
        ("_is_in_torch_dispatch_mode", "old_dispatch_mode_flags"),
        ("_is_in_non_infra_torch_dispatch_mode", "old_non_infra_dispatch_mode_flags"),
        (f"_is_in_any_mode_{_IGNORED}", f"old_{_IGNORED}_dispatch_mode_flags"),
    )
    if hasattr(internals.python_dispatch, name)
}
# torch.func's own function that undoes all layers fails in torch 2.11 and older.
_UNDO_TRANSFORM = {
    "Vmap": internals.undo_vmap,
    "Grad": internals.undo_grad,
    "Jvp": internals.undo_jvp,
    "Functionalize": internals.undo_functionalize,
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

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self._allowed.__exit__(kind, error, traceback)
        try:
            close_interrupted_contexts(error)
        finally:
            self._state.restore()


class TorchState(SavedSettings):
    """A thread's state in torch: active modes, grad mode, autocast, dispatch keys, hooks and levels."""

    def __init__(self) -> None:
        super().__init__(_THREAD_STATE)
        self._keys = internals.included_keys(), internals.excluded_keys()

    def restore(self) -> None:
        super().restore()
        included, excluded = self._keys
        if (included.raw_repr(), excluded.raw_repr()) != (
            internals.included_keys().raw_repr(),
            internals.excluded_keys().raw_repr(),
        ):
            _enter_forever(internals.ForceDispatchKeys(included, excluded))


def _enter_forever(guard: Any) -> None:
    guard.__enter__()
    _guards.append(guard)


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
    modes = internals.dispatch_mode_stack()
    if not modes and not internals.pre_dispatch_stack_length():
        return nullcontext()
    context: Any = internals.disable_dispatch_modes()
    context.modes = modes  # keeps them alive, as in _set_modes
    return context


@contextmanager
def modes_removed() -> Iterator[None]:
    """Remove all dispatch modes while the context lasts, as `without_modes` does, but import nothing."""
    modes, flags = internals.dispatch_mode_stack(), _get_flags()
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
def dispatch_mode_active(mode: internals.TorchDispatchMode) -> Iterator[None]:
    """Activate a dispatch mode while the context lasts, and remove it whatever happened to the mode stack."""
    mode.__enter__()
    with undone(partial(_remove_mode, mode)):
        yield


@contextmanager
def dispatch_mode_in_thread(mode: internals.TorchDispatchMode) -> Iterator[None]:
    """Activate a dispatch mode in a thread that a run started, and which may outlive it.

    torch's flags are process-wide and set by the run's own mode: the thread changes none.
    """
    internals.push_dispatch_mode(mode)
    try:
        yield
    finally:
        _set_modes([item for item in internals.dispatch_mode_stack() if item is not mode])


def restore_modes(modes: Sequence[internals.TorchDispatchMode]) -> None:
    """Push dispatch modes that an exception removed onto the stack again, below the active ones."""
    stack = internals.dispatch_mode_stack()
    removed = [mode for mode in modes if not any(item is mode for item in stack)]
    if removed:
        _set_modes([*removed, *stack])


def function_mode_removed(mode: TorchFunctionMode) -> AbstractContextManager[None]:
    """Return a context whose end removes a function mode, which code inside may activate, from the stack."""
    return undone(lambda: _set_function_modes([item for item in internals.function_mode_stack() if item is not mode]))


def _remove_mode(mode: internals.TorchDispatchMode) -> None:
    stack = internals.dispatch_mode_stack()
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
    if not internals.dispatch_mode_stack():
        _set_flags([False] * len(_FLAGS))


def _set_modes(modes: Sequence[internals.TorchDispatchMode]) -> None:
    # The list keeps the modes alive: torch 2.10 and older pop a freed object if only the stack refers to it.
    for _ in internals.dispatch_mode_stack():
        internals.pop_dispatch_mode()
    for mode in modes:
        internals.push_dispatch_mode(mode)


def _set_function_modes(modes: Sequence[TorchFunctionMode]) -> None:
    for _ in internals.function_mode_stack():
        internals.pop_function_mode()
    for mode in modes:
        internals.push_function_mode(mode)


def _get_flags() -> list[bool]:
    return [getattr(internals.python_dispatch, name) for name in _FLAGS]


def _set_flags(flags: Sequence[bool]) -> None:
    for name, flag in zip(_FLAGS, flags, strict=True):
        setattr(internals.python_dispatch, name, flag)
    if hasattr(
        internals.python_dispatch, "set_is_in_mode_without_ignore_compile_internals"
    ):  # since torch 2.11: a copy in C++
        internals.python_dispatch.set_is_in_mode_without_ignore_compile_internals(flags[-1])


def _lower(level_of: Callable[[], int], leave: Callable[[], object], level: int) -> None:
    while level_of() > level:
        leave()


def _pop_saved_hooks(hooks: Any) -> None:
    while (top := internals.top_saved_hooks(True)) is not None and top != hooks:
        internals.pop_saved_hooks()


def _read_mode_depths() -> list[tuple[Any, list[int]]]:
    """Return how many previous values of the flags each active mode has saved."""
    return [
        (mode, [len(getattr(mode, attribute)) for attribute in _FLAGS.values()])
        for mode in internals.dispatch_mode_stack()
    ]


def _set_mode_depths(depths: list[tuple[Any, list[int]]]) -> None:
    for mode, lengths in depths:
        for attribute, length in zip(_FLAGS.values(), lengths, strict=True):
            values = getattr(mode, attribute)
            while len(values) > length:
                values.pop()


def _get_nesting() -> int:
    """Return the number of open autocast contexts, plus one."""
    nesting: int = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return nesting


# (getter, setter) of each part of a thread's state, in the order in which they can be restored.
_THREAD_STATE: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (
        internals.transform_depth,
        partial(_lower, internals.transform_depth, lambda: _UNDO_TRANSFORM[internals.peek_interpreter().key().name]()),
    ),
    (internals.forward_ad_level, partial(_lower, internals.forward_ad_level, forward_ad.exit_dual_level)),
    (partial(internals.top_saved_hooks, True), _pop_saved_hooks),
    (internals.function_mode_stack, _set_function_modes),
    (internals.get_function_state, internals.set_function_state),
    (internals.dispatch_mode_stack, _set_modes),
    (_read_mode_depths, _set_mode_depths),
    (_get_flags, _set_flags),
    (_get_nesting, partial(_lower, _get_nesting, torch.autocast_decrement_nesting)),
    (torch.is_inference_mode_enabled, lambda is_enabled: _enter_forever(internals.InferenceMode(is_enabled))),
    GRAD_MODE,
    (internals.is_multithreading_enabled, internals.set_multithreading),
    (internals.is_view_replay_enabled, internals.set_view_replay),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    *((partial(torch.get_autocast_dtype, device), partial(torch.set_autocast_dtype, device)) for device in _DEVICES),
)


def sharding_state(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """Return the attribute dicts of the objects by which FSDP2 shards modules.

    Shape execution stores shape tensors there. Empty if some modules are unsharded: a run reshards them, and only FSDP2
    could unshard them again.
    """
    states = _states(modules)
    groups = [group for state in states for group in _groups(state)]
    if not all(group.is_sharded for group in groups):
        return []
    parameters = [parameter for group in groups for parameter in group.fsdp_params]
    shared = [item for state in states for item in (state._state_ctx, state._comm_ctx)]
    return [vars(item) for item in dict.fromkeys([*states, *groups, *parameters, *shared])]


def restore_versions(versions: Collection[tuple[torch.Tensor, int]]) -> None:
    """Set tensors' version counters, so that the caller's backward passes accept what they have saved."""
    try:
        internals.set_versions((), ())
    except TypeError:  # an older torch sets one at a time, and prints all tensors in its message
        for pair in versions:
            internals.set_versions(*pair)
    else:
        internals.set_versions(tuple(tensor for tensor, _ in versions), tuple(version for _, version in versions))


def parameter_groups(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the groups of parameters that FSDP2 gathers together, of modules to which it was applied."""
    return [group for state in _states(modules) for group in _groups(state)]


def _states(modules: Iterable[nn.Module]) -> list[Any]:
    loaded = internals.loaded_fsdp()
    if loaded is None:
        return []
    # FSDP2 has no state of an unhashable module.
    module_states = (loaded._get_module_fsdp_state(module) for module in modules if _can_be_key(module))
    return list(dict.fromkeys(state for state in module_states if state is not None))


def _can_be_key(module: nn.Module) -> bool:
    try:
        hash(module)
    except Exception:
        return False
    return True


def _groups(state: Any) -> list[Any]:
    """Return a module's parameter groups; older torch has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]
