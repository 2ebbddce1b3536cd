"""Random weights made quickly, for runs whose numbers do not matter."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch

_BLOCK = 4099  # a prime, so that the rows of a weight differ


@contextmanager
def quick_weights() -> Iterator[None]:
    """Initialise large tensors with copies of one block of small random numbers.

    >>> with quick_weights():
    ...     layer = torch.nn.Linear(1000, 1000)
    >>> len(layer.weight.unique()) <= _BLOCK
    True
    """
    block = torch.rand(_BLOCK) * 0.04 - 0.02

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        flat = tensor.detach().view(-1)
        whole = len(flat) // _BLOCK * _BLOCK
        flat[:whole].view(-1, _BLOCK).copy_(block)
        flat[whole:].copy_(block[: len(flat) - whole])
        return tensor

    # erfinv_ is a step of truncated normal numbers.
    names = ("uniform_", "normal_", "erfinv_")
    originals = {name: getattr(torch.Tensor, name) for name in names}
    for name, original in originals.items():
        setattr(torch.Tensor, name, _replace(original, fill))
    try:
        yield
    finally:
        for name in names:
            delattr(torch.Tensor, name)  # the original is inherited


def _replace(original: Callable[..., Any], fill: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    @wraps(original)
    def initialise(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        is_large = tensor.numel() > _BLOCK and tensor.is_contiguous() and tensor.is_floating_point()
        return fill(tensor) if is_large and tensor.device.type == "cpu" else original(tensor, *args, **kwargs)

    return initialise
