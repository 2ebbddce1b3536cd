"""Blocks of blocks: added, joined, called twice, checkpointed, frozen, without a graph, with state and with hooks."""

from dataclasses import replace

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.support.fuzz import functions, sequences
from tests.support.fuzz.block import Draw, Kind, Made
from tests.support.models.parts import Applied

# Blocks that take a sequence and return a sequence.
_PARTS = {
    name: kind
    for name, kind in {**sequences.KINDS, **functions.KINDS}.items()
    if kind.takes == "sequence" and not kind.gives
}


def _part(draw: Draw, without: str = "") -> Made:
    name = draw.of(*(name for name in _PARTS if name != without))
    return _PARTS[name].make(draw)


def _around(part, function, **changes):
    """Return a part called by a function, which gets it and its input."""
    return replace(part, module=Applied(lambda self, x: function(self.block, x), block=part.module), **changes)


def _add(x, y):
    return x + (y if y.shape == x.shape else y.mean())


def _join(x, y):
    return torch.cat([x, y], -1) if y.shape[:-1] == x.shape[:-1] else x * y.mean()


def _residual(block, x):
    return _add(x, block(x))


def _without_gradient(block, x):
    with torch.no_grad():
        y = block(x)
    return _add(x, y)


class Branches(nn.Module):
    """Two blocks side by side, in a dict of lists of modules."""

    def __init__(self, one, other):
        super().__init__()
        self.paths = nn.ModuleDict({"left": nn.ModuleList([one]), "right": nn.ModuleList([nn.Sequential(other)])})

    def forward(self, x):
        return sum((_add(x, path[0](x)) for path in self.paths.values()), torch.zeros((), device=x.device))


def branches(draw):
    one, other = _part(draw), _part(draw)
    if one.macs is None or other.macs is None:
        return Made(Branches(one.module, other.module), None)
    backward = sorted({a + b for a in one.backward_macs() for b in other.backward_macs()})
    return Made(Branches(one.module, other.module), one.macs + other.macs, backward or None)


def checkpointed(draw):
    part = _part(draw, without="scripted")  # it catches the exception by which torch ends a recomputation
    reentrant = draw.flag()
    return _around(part, lambda block, x: _add(x, checkpoint(block, x, use_reentrant=reentrant)))


def frozen(draw):
    part = _part(draw)
    part.module.requires_grad_(False)
    return _around(part, _residual, backward=None)


def called_twice(draw):
    part = _part(draw)
    macs = None if part.macs is None else 2 * part.macs
    backward = [2 * times for times in part.backward_macs()] or None
    return _around(part, lambda block, x: _residual(block, x) - _residual(block, x), macs=macs, backward=backward)


class Stateful(nn.Module):
    """A block that keeps a running mean in a buffer, and its last two results in an attribute."""

    def __init__(self, block: nn.Module, width: int) -> None:
        super().__init__()
        self.block = block
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.kept = []

    def forward(self, x):
        y = _add(x, self.block(x))
        with torch.no_grad():
            self.mean.lerp_(y.mean((0, 1)), 0.1)
            self.calls += 1
        self.kept = [*self.kept[-1:], y.detach()]
        return y + self.mean


def stateful(draw):
    part = _part(draw)
    return replace(part, module=Stateful(part.module, draw.shape[-1]))


def hooked(draw):
    """A block with hooks that change what goes in and what comes out."""
    part = _part(draw)
    part.module.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    part.module.register_forward_hook(lambda module, args, result: result + 1)
    return _around(part, _residual)


_MAKERS = {
    "residual": lambda draw: _around(_part(draw), _residual),
    "dense": lambda draw: _around(_part(draw), lambda block, x: _join(x, block(x))),
    "branches": branches,
    "checkpointed": checkpointed,
    "without_gradient": lambda draw: _around(_part(draw), _without_gradient, backward=(0,)),
    "frozen": frozen,
    # The input of the block requires no gradient, and some of its weights do.
    "detached": lambda draw: _around(_part(draw), lambda block, x: _add(x, block(x.detach())), backward=None),
    "called_twice": called_twice,
    "stateful": stateful,
    "hooked": hooked,
}
KINDS = {name: Kind("sequence", make) for name, make in _MAKERS.items()}
