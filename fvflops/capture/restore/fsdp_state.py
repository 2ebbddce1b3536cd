"""Read the state that FSDP2 stores outside the modules it shards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from fvflops.torch_internals import loaded_fsdp


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


def parameter_groups(modules: Iterable[nn.Module]) -> list[Any]:
    """Return the groups of parameters that FSDP2 gathers together, of modules to which it was applied."""
    return [group for state in _states(modules) for group in _groups(state)]


def _states(modules: Iterable[nn.Module]) -> list[Any]:
    loaded = loaded_fsdp()
    if loaded is None:
        return []
    module_states = (loaded._get_module_fsdp_state(module) for module in modules if _can_be_key(module))
    return list(dict.fromkeys(state for state in module_states if state is not None))


def _can_be_key(module: nn.Module) -> bool:
    """Return whether FSDP2 can have a state of a module: the module must be hashable."""
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
