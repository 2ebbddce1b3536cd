"""Work handles of collectives in shape execution, which sends nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fvflops.torch_internals import work_from_future

_WORK = "__torch__.torch.classes.c10d.Work"


def is_work(value: Any) -> bool:
    """Return whether a value is the work handle of a collective."""
    return type(value) is torch.ScriptObject and value._type().qualified_name() == _WORK


def completed_work(results: Sequence[torch.Tensor]) -> Any:
    """Return a completed work handle whose future has the results, as DDP's reducer expects."""
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(list(results))
    return work_from_future(future).boxed()


def written_and_work(*args: Any) -> tuple[Any, Any]:
    """Return the argument that a collective writes, and its work handle."""
    return args[0], completed_work([])


# torch 2.10 and older have no meta kernels of these; those of newer versions draw a random number for each call.
RULES: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(
        (
            *("c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::allgather_", "c10d::allreduce_"),
            *("c10d::alltoall_", "c10d::broadcast_", "c10d::reduce_scatter_", "c10d::scatter_"),
        ),
        written_and_work,
    ),
    **dict.fromkeys(
        (
            *("c10d::alltoall_base_", "c10d::barrier", "c10d::gather_", "c10d::recv_", "c10d::recv_any_source_"),
            *("c10d::reduce_", "c10d::send"),
        ),
        lambda *_: completed_work([]),
    ),
}
