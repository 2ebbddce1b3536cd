"""Restore the C++ reducers of DistributedDataParallel, which cannot be copied, after shape execution."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fvflops.capture.instrument.patching import Patch, wrapped
from fvflops.capture.restore.identity_mapping import IdentityMapping
from fvflops.torch_internals import ddp_agreement, ddp_forward, loaded_contract, loaded_replicate

_FORWARDS = Patch(*ddp_forward)
_AGREEMENTS = Patch(*ddp_agreement)


@contextmanager
def reducers_restored() -> Iterator[None]:
    """Keep reducers from rebuilding buckets while the context lasts, and restore their state at its end.

    A reducer rebuilds its buckets once, and agrees on them with the other ranks: before the second synchronised forward
    pass. In shape execution the buckets would have no memory, and the other ranks may not run.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        yield
        return
    thread = get_ident()
    registered: list[tuple[DistributedDataParallel, int]] = []

    def around_forward(original: Callable[..., Any]) -> Callable[..., Any]:
        def pre_forward(wrapper: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
            if get_ident() == thread:
                registered.append((wrapper, _iterations(wrapper)))
            return original(wrapper, *args, **kwargs)

        return pre_forward

    def around_agreement(original: Callable[..., Any]) -> Callable[..., Any]:
        def agree(group: Any, *args: Any, **kwargs: Any) -> Any:
            if get_ident() == thread and group.size() > 1:
                raise ValueError(
                    "all ranks have to create a DistributedDataParallel together, which replicate(model) does in the "
                    "first forward pass: run one before"
                )
            return original(group, *args, **kwargs)

        return agree

    def around_rebuild(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda reducer: False if get_ident() == thread else original(reducer)

    complete = False
    with wrapped([(_FORWARDS, around_forward), (_AGREEMENTS, around_agreement), (_rebuilds(), around_rebuild)]):
        try:
            yield
            complete = True
        finally:
            for wrapper, iterations in IdentityMapping(registered).items():
                _restore_reducer(wrapper, iterations, complete)


def replication_state(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """Return the attributes of the objects by which `replicate` wraps modules.

    `replicate` creates its DDP in the first forward pass; created in shape execution, its buckets would have no memory.
    """
    loaded = loaded_replicate()
    contract = loaded_contract()
    if loaded is None or contract is None:
        return []
    # Asking for the state of a module without one would add an attribute.
    found = (loaded.replicate.state(module) for module in modules if contract.STATE_KEY in vars(module))
    states = [state for state in found if state is not None]
    wrappers = [state._ddp for state in states if hasattr(state, "_ddp")]
    return [vars(item) for state in states for item in (state, state._param_list)] + list(map(vars, wrappers))


_REBUILDS: list[Patch] = []


def _rebuilds() -> Patch:
    if not _REBUILDS:
        from fvflops.torch_internals import ddp_rebuild  # absent if torch is built without torch.distributed

        _REBUILDS.append(Patch(*ddp_rebuild))
    return _REBUILDS[0]


def _iterations(wrapper: DistributedDataParallel) -> int:
    """Return a reducer's number of forward passes; raise ValueError if its state cannot be restored later."""
    logger: Any = wrapper.logger
    logger.set_runtime_stats_and_log()  # else the data are those of the pass before
    iterations = int(wrapper._get_ddp_logging_data().get("iteration", 0))
    if not iterations and wrapper.static_graph and wrapper.process_group.size() > 1:
        raise ValueError(
            "a DistributedDataParallel with static_graph=True records its graph in the first step, which all ranks "
            "have to run: run one before, or count the wrapped model (model.module)"
        )
    return iterations


def _restore_reducer(wrapper: DistributedDataParallel, iterations: int, complete: bool) -> None:
    """Restore a reducer to its state after `iterations` passes, of which only the first two matter."""
    reducer: Any = wrapper.reducer
    if wrapper._has_rebuilt_buckets:
        # Only an interrupted run leaves state; with several ranks it could be reset only by rebuilding buckets.
        if not complete and wrapper.process_group.size() == 1:
            reducer._reset_state()
        return
    reducer._reset_state()
    makes_buckets = wrapper.static_graph or not wrapper.find_unused_parameters
    if makes_buckets and iterations > wrapper.static_graph:
        reducer._push_all_rebuilt_params()  # so that the next forward pass rebuilds the buckets as usual
