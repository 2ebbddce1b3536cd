"""What a block is: a module for tensors of a layout, and the multiply-adds that a forward pass of it takes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from random import Random

import torch
from torch import nn

Shape = tuple[int, ...]

# Layout → number of axes beside batch and channels, which are the first two, and of a sequence the first and the last.
AXES = {"vector": 0, "sequence": 1, "signal": 1, "image": 2, "volume": 3}
_LARGEST = {0: 0, 1: 10, 2: 8, 3: 5}  # by the number of axes, the size of one
_CHANNELS = 12
_GROWN = 3  # the size that an axis of one element is repeated to, as norms and kernels want more


@dataclass(frozen=True)
class Made:
    """A module, and its multiply-adds forward and backward by closed forms; None where there is none.

    Backward has several where kernels differ. By default it is twice the forward: a product for each factor's gradient.
    """

    module: nn.Module
    macs: int | None = 0
    backward: Sequence[int] | None = ()

    def backward_macs(self) -> tuple[int, ...]:
        """Return what a backward pass may take; empty where no closed form is known."""
        if self.backward is None or self.macs is None:
            return ()
        return tuple(self.backward) or (2 * self.macs,)


@dataclass(frozen=True)
class Draw:
    """What a block is made from: the shape of its input, random choices, and whether the network is to train."""

    shape: Shape
    rng: Random
    training: bool

    def size(self, low: int, high: int) -> int:
        return self.rng.randint(low, high)

    def flag(self) -> bool:
        return self.rng.random() < 0.5

    def of(self, *choices):
        return self.rng.choice(choices)

    def divisor(self, number: int) -> int:
        return self.rng.choice([part for part in range(1, number + 1) if number % part == 0])

    @property
    def positions(self) -> int:
        """How many elements there are in a channel of the last axis, over the batch."""
        return prod(self.shape[:-1])


@dataclass(frozen=True)
class Kind:
    takes: str
    make: Callable[[Draw], Made]
    gives: str = ""


def kinds(takes: str, *makers: Callable[[Draw], Made], gives: str = "") -> dict[str, Kind]:
    """Return the kinds of blocks that functions make, by their names."""
    return {make.__name__: Kind(takes, make, gives) for make in makers}


class Function(nn.Module):
    """A function with the tensors it uses as parameters or buffers: called with the input, then with them."""

    def __init__(self, function: Callable[..., torch.Tensor], *parameters: torch.Tensor) -> None:
        super().__init__()
        self.function = function
        self.weights = nn.ParameterList(parameters)

    def forward(self, x):
        return self.function(x, *self.weights)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) / 4)


class Adapter(nn.Module):
    """Bring a tensor to another layout, and to sizes that every block can take; by views and copies alone."""

    def __init__(self, before: str, after: str) -> None:
        super().__init__()
        self.before, self.after = before, after

    def forward(self, x):
        axes = AXES[self.after]
        if self.before == "sequence":
            x = x.transpose(1, 2)
        if x.dim() - 2 > axes:
            x = x.flatten(axes + 1) if axes else x.flatten(2)[..., 0]
        if x.shape[1] > _CHANNELS:
            x = x[:, :_CHANNELS]
        for axis in range(2, x.dim()):
            if x.shape[axis] > _LARGEST[axes]:
                x = x.narrow(axis, 1, _LARGEST[axes])
            elif x.shape[axis] == 1:
                x = x.repeat_interleave(_GROWN, axis)
        while x.dim() - 2 < axes:
            x = x.unsqueeze(-1).repeat(*[1] * x.dim(), _GROWN)
        if x.shape[1] == 1:
            x = torch.cat([x, x], 1)
        return x.transpose(1, 2) if self.after == "sequence" else x
