"""Restore the C++ reducers of DistributedDataParallel, which cannot be copied, after shape execution."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fvflops.capture.instrument.patching import Patch, calling, wrapped
from fvflops.capture.restore.containers import IdentityMapping
from fvflops.torch_internals import ddp_agreement, ddp_forward, loaded_contract, loaded_replicate

_FORWARD = Patch(*ddp_forward)
_AGREEMENT = Patch(*ddp_agreement)


@contextmanager
def reducers_restored() -> Iterator[None]:
    """Keep reducers from rebuilding buckets while the context lasts, and restore their state at its end.

    A reducer rebuilds its buckets once, before the second synchronized forward pass, and agrees on them with the other
    ranks. In shape execution the buckets would have no memory, and the other ranks may not run.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        yield
        return
    thread = get_ident()
    iterations_before: list[tuple[DistributedDataParallel, int]] = []

    def pre_forward(original: Callable[..., Any], wrapper: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
        if get_ident() == thread:
            iterations_before.append((wrapper, _iterations(wrapper)))
        return original(wrapper, *args, **kwargs)

    def agree(original: Callable[..., Any], group: Any, *args: Any, **kwargs: Any) -> Any:
        if get_ident() == thread and group.size() > 1:
            raise ValueError(
                "all ranks must create a DistributedDataParallel together, which replicate(model) does in the "
                "first forward pass; run one forward pass before counting"
            )
        return original(group, *args, **kwargs)

    def rebuild(original: Callable[..., Any], reducer: Any) -> Any:
        return False if get_ident() == thread else original(reducer)

    complete = False
    calls = (_FORWARD, pre_forward), (_AGREEMENT, agree), (_rebuild_patch(), rebuild)
    with wrapped([(patch, calling(function)) for patch, function in calls]):
        try:
            yield
            complete = True
        finally:
            for wrapper, iterations in IdentityMapping(iterations_before).items():
                _restore_reducer(wrapper, iterations, complete)


def replication_state(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """Return the attribute dicts of the objects that `replicate` creates for modules, to be restored.

    `replicate` creates its DDP in the first forward pass; in shape execution, the buckets would have no memory.
    """
    replicated, contract = loaded_replicate(), loaded_contract()
    if replicated is None or contract is None:
        return []
    # `state` would add an attribute to a module that has none.
    found = (replicated.replicate.state(module) for module in modules if contract.STATE_KEY in vars(module))
    states = [state for state in found if state is not None]
    wrappers = [state._ddp for state in states if hasattr(state, "_ddp")]
    return [vars(item) for state in states for item in (state, state._param_list)] + list(map(vars, wrappers))


@cache
def _rebuild_patch() -> Patch:
    from fvflops.torch_internals import ddp_rebuild  # absent if torch is built without torch.distributed

    return Patch(*ddp_rebuild)


def _iterations(wrapper: DistributedDataParallel) -> int:
    """Return a reducer's number of forward passes; raise ValueError if its state could not be restored later."""
    logger: Any = wrapper.logger
    logger.set_runtime_stats_and_log()  # else the data are from the previous pass
    iterations = int(wrapper._get_ddp_logging_data().get("iteration", 0))
    if not iterations and wrapper.static_graph and wrapper.process_group.size() > 1:
        raise ValueError(
            "a DistributedDataParallel with static_graph=True records its graph in the first step, which all ranks "
            "must run; run one step before counting, or count the wrapped model (model.module)"
        )
    return iterations


def _restore_reducer(wrapper: DistributedDataParallel, iterations: int, complete: bool) -> None:
    """Restore a reducer to its state after `iterations` passes; it is the same after any number above one."""
    reducer: Any = wrapper.reducer
    if wrapper._has_rebuilt_buckets:
        # Only an interrupted run changes the state; with several ranks only rebuilding buckets would reset it.
        if not complete and wrapper.process_group.size() == 1:
            reducer._reset_state()
        return
    reducer._reset_state()
    rebuilds_buckets = wrapper.static_graph or not wrapper.find_unused_parameters
    if rebuilds_buckets and iterations > wrapper.static_graph:
        reducer._push_all_rebuilt_params()  # so that the next forward pass rebuilds the buckets
