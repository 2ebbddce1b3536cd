"""A random network that is made from a number alone, so that the number replays it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from random import Random

import torch
from torch import nn

from tests.support.fuzz import composites, convolutions, functions, sequences
from tests.support.fuzz.block import Adapter, Draw

KINDS = {**convolutions.KINDS, **sequences.KINDS, **functions.KINDS, **composites.KINDS}
_STARTS = {
    "vector": (3, 6),
    "sequence": (2, 5, 8),
    "signal": (2, 4, 9),
    "image": (2, 4, 7, 6),
    "volume": (2, 2, 4, 5, 3),
}
_OPTIMIZERS = {
    "none": None,
    "SGD": partial(torch.optim.SGD, lr=0.01),
    "momentum": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": partial(torch.optim.Adam, amsgrad=True),
    "AdamW": torch.optim.AdamW,
    "AdamW, one by one": partial(torch.optim.AdamW, foreach=False),
    "Adam, fused": partial(torch.optim.Adam, fused=True),
    "RMSprop": partial(torch.optim.RMSprop, centered=True),
    "Adagrad": torch.optim.Adagrad,
    "NAdam": torch.optim.NAdam,
}


@dataclass(frozen=True)
class Plan:
    """What a network is made from: the number, and which of its blocks are kept, None for all."""

    seed: int
    kept: tuple[int, ...] | None = None

    def choose(self) -> tuple[str, bool, str, list[tuple[int, str]]]:
        """Return the layout of the input, whether it is trained, the optimizer, and the blocks' places and kinds."""
        rng = Random(self.seed)
        start, training, optimizer = rng.choice(list(_STARTS)), rng.random() < 0.7, rng.choice(list(_OPTIMIZERS))
        kinds = [rng.choice(list(KINDS)) for _ in range(rng.randint(2, 7))]
        # Every kind comes in turn, whatever the others are.
        kinds[rng.randrange(len(kinds))] = list(KINDS)[self.seed % len(KINDS)]
        places = range(len(kinds)) if self.kept is None else self.kept
        return start, training, optimizer, [(place, kinds[place]) for place in places]

    def smaller(self) -> Iterator[Plan]:
        places = [place for place, _ in self.choose()[3]]
        for place in places:
            yield replace(self, kept=tuple(other for other in places if other != place))


class Network(nn.Module):
    """Blocks one after the other, each after an adapter; `made` holds each with its multiply-adds, by its name."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        layout, training, optimizer, blocks = plan.choose()
        self.optimizer = _OPTIMIZERS[optimizer]
        # What comes of small inputs alone is computed in a run by shapes too; what comes of a weight is not.
        self.scale = nn.Parameter(torch.ones(()))
        self.made = {}
        self.shapes = {}
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(plan.seed)
            self.input = x = torch.randn(_STARTS[layout])
            for place, name in blocks:
                kind = KINDS[name]
                adapter = Adapter(layout, kind.takes).train(training)
                x = adapter(x)
                made = kind.make(Draw(tuple(x.shape), Random(f"{plan.seed} {place}"), training))
                made.module.train(training)
                self.made[f"{name}_{place}"] = made
                self.shapes[f"{name}_{place}"] = tuple(x.shape)
                self.add_module(f"adapter_{place}", adapter)
                self.add_module(f"{name}_{place}", made.module)
                x, layout = made.module(x), kind.gives or kind.takes
        self.train(training)

    def forward(self, x):
        x = x * self.scale
        for module in self.children():
            x = module(x)
        return x

    def describe(self) -> str:
        _, training, optimizer, _ = self.plan.choose()
        lines = [
            f"tests.support.fuzz.network.Network({self.plan!r}): "
            f"{'training' if training else 'eval'}, optimizer {optimizer}"
        ]
        lines.append(f"  input {tuple(self.input.shape)}")
        for name, made in self.made.items():
            text = repr(made.module).replace("\n", "\n    ")
            lines.append(f"  {name} of {self.shapes[name]}, {made.macs} multiply-adds: {text}")
        return "\n".join(lines)
