"""Keep the reducers of DistributedDataParallel, which are C++ and cannot be copied, as they are before a shape run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fvflops.capture.instrument.patching import Patch, wrapped
from fvflops.capture.restore.by_identity import ByIdentity
from fvflops.torch_internals import ddp_agreement, ddp_forward, loaded_contract, loaded_replicate

_FORWARDS = Patch(*ddp_forward)
_AGREEMENTS = Patch(*ddp_agreement)


@contextmanager
def reducers_kept() -> Iterator[None]:
    """Let no reducer make new buckets as long as the context lasts, and put back, when it ends, what it knew before.

    A reducer makes its buckets anew, and agrees on them with the other ranks, once: before the second forward pass
    that synchronises. Those of a shape run would have no memory, and the other ranks may not make this run.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        yield
        return
    thread = get_ident()
    seen: list[tuple[DistributedDataParallel, int]] = []

    def around_forward(original: Callable[..., Any]) -> Callable[..., Any]:
        def pre_forward(wrapper: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
            if get_ident() == thread:
                seen.append((wrapper, _iterations(wrapper)))
            return original(wrapper, *args, **kwargs)

        return pre_forward

    def around_agreement(original: Callable[..., Any]) -> Callable[..., Any]:
        def agree(group: Any, *args: Any, **kwargs: Any) -> Any:
            if get_ident() == thread and group.size() > 1:
                raise ValueError(
                    "a DistributedDataParallel is made by all ranks together, which replicate(model) does in the first "
                    "forward pass: make one before"
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
            for wrapper, iterations in ByIdentity(seen).items():
                _put_back(wrapper, iterations, complete)


def replication_state(modules: Iterable[nn.Module]) -> list[dict[str, Any]]:
    """Return the attributes of the objects by which `replicate` wraps modules, none where it wraps none.

    It makes their DDP in the first forward pass; one made in a shape run has buckets without memory.
    """
    loaded = loaded_replicate()
    contract = loaded_contract()
    if loaded is None or contract is None:
        return []
    # To ask for the state of a module that has none would give it an attribute.
    found = (loaded.replicate.state(module) for module in modules if contract.STATE_KEY in vars(module))
    states = [state for state in found if state is not None]
    wrappers = [state._ddp for state in states if hasattr(state, "_ddp")]
    return [vars(item) for state in states for item in (state, state._param_list)] + list(map(vars, wrappers))


_REBUILDS: list[Patch] = []


def _rebuilds() -> Patch:
    if not _REBUILDS:
        from fvflops.torch_internals import ddp_rebuild  # absent where torch is built without torch.distributed

        _REBUILDS.append(Patch(*ddp_rebuild))
    return _REBUILDS[0]


def _iterations(wrapper: DistributedDataParallel) -> int:
    """Return how many forward passes a reducer has seen; one that cannot be made to forget this raises ValueError."""
    logger: Any = wrapper.logger
    logger.set_runtime_stats_and_log()  # what is told of them is otherwise that of the pass before
    iterations = int(wrapper._get_ddp_logging_data().get("iteration", 0))
    if not iterations and wrapper.static_graph and wrapper.process_group.size() > 1:
        raise ValueError(
            "a DistributedDataParallel with static_graph=True learns from its first step, which is to be one of all "
            "ranks: make one before, or count the model in it (model.module)"
        )
    return iterations


def _put_back(wrapper: DistributedDataParallel, iterations: int, complete: bool) -> None:
    """Let a reducer forget a shape run that began after so many iterations, of which the first two matter."""
    reducer: Any = wrapper.reducer
    if wrapper._has_rebuilt_buckets:
        # Only a run that broke off leaves something, which cannot be undone without making buckets again.
        if not complete and wrapper.process_group.size() == 1:
            reducer._reset_state()
        return
    reducer._reset_state()
    makes_buckets = wrapper.static_graph or not wrapper.find_unused_parameters
    if makes_buckets and iterations > wrapper.static_graph:
        reducer._push_all_rebuilt_params()  # so that the next forward pass makes the buckets, as it would have
