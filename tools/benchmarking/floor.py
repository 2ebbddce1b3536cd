"""The floor: what so many dispatches cost that nothing is done in, below which no counter with a mode can get."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


@contextmanager
def below_autograd() -> Iterator[None]:
    """Run in the composite vocabulary: ops reach a mode as they were called."""
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        yield


class ListingMode(TorchDispatchMode):
    """Passes on, and keeps what each op returned, its tensors replaced by their shape, strides and dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        leaves, structure = pytree.tree_flatten(result)
        self.results.append(([_describe(leaf) for leaf in leaves], structure))
        return result


def _describe(leaf: Any) -> Any:
    return (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else None


class ReadyMode(TorchDispatchMode):
    """Answers every op with one tensor."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.tensor


class FreshMode(TorchDispatchMode):
    """Answers the n-th op with new meta tensors as the n-th result describes them.

    `structured` gives the result back as the op would; otherwise it is one tensor, made last.
    """

    def __init__(self, results: list[Any], structured: bool) -> None:
        super().__init__()
        self.results = iter(results)
        self.structured = structured

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        described, structure = next(self.results)
        tensors = [
            None if item is None else torch.empty_strided(item[0], item[1], dtype=item[2], device="meta")
            for item in described
        ]
        if not self.structured:
            return args[0]
        return tensors[0] if len(tensors) == 1 and structure.is_leaf() else pytree.tree_unflatten(tensors, structure)


def list_dispatches(run: Callable[[], object], *, composite: bool) -> list[Any]:
    """Return what each op of a run gives back, in order."""
    with ListingMode() as mode:
        if composite:
            with below_autograd():
                run()
        else:
            run()
    return mode.results


def return_ready(dispatches: int) -> None:
    """Dispatch a trivial op so often, each time answered with the same tensor."""
    tensor = torch.empty(1, device="meta")
    with below_autograd(), ReadyMode(tensor):
        for _ in range(dispatches):
            torch.relu(tensor)


def return_fresh(results: list[Any]) -> None:
    """Dispatch a trivial op for each result, making that result's tensors."""
    tensor = torch.empty(1, device="meta")
    with below_autograd(), FreshMode(results, structured=False):
        for _ in results:
            torch.relu(tensor)


def replay(run: Callable[[], object], results: list[Any]) -> None:
    """Run a model whose ops are answered from the results of an earlier run of it."""
    with below_autograd(), FreshMode(results, structured=True):
        run()
