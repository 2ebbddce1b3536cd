"""Work handles of collectives in shape execution, which sends nothing."""

from __future__ import annotations

from collections.abc import Sequence
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
