"""What a count says on a torch without one of its private names: missing_names NAME ...

torch is imported once; for each name a forked process counts a model and a training step without it, and prints a line
of JSON. The name "" takes none away.
"""

import dataclasses
import json
import os
import sys

import torch
from torch import nn

from fvflops.torch_internals import INTERNALS
from tests.support.models.parts import Parts


class CNN(Parts):
    """A convolution with normalisation, pooling and a classifier: a loss, for a training step."""

    def forward(self, x):
        return self.head(self.features(x).flatten(1)).logsumexp(1).mean()


def count(model, x, *, step: bool, execution: str) -> int:
    from fvflops import FlopCountAnalysis, TrainingStepAnalysis

    if step:
        return TrainingStepAnalysis(model, x, optimizer=torch.optim.SGD, execution=execution).total()
    return FlopCountAnalysis(model, x, execution=execution).total()


CASES = {
    "count_shapes": {"step": False, "execution": "auto"},
    "count_real": {"step": False, "execution": "real"},
    "count_step_shapes": {"step": True, "execution": "auto"},
    "count_step_real": {"step": True, "execution": "real"},
}


def take_away(name: str) -> None:
    """Let the search for a name fail as on a torch that lacks it."""
    internal = INTERNALS[name]
    part = "name" if internal.name else "module"
    INTERNALS[name] = dataclasses.replace(internal, **{part: f"{getattr(internal, part)}_gone"})


def count_without(name: str) -> dict[str, int | str]:
    """Return the count of each case, or its error."""
    if name:
        take_away(name)
    said = {}
    for case, options in CASES.items():
        features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        try:
            said[case] = count(CNN(features=features, head=nn.Linear(4, 5)), torch.ones(2, 3, 8, 8), **options)
        except Exception as error:
            said[case] = f"{type(error).__name__}: {error}"
    return said


def main():
    for name in sys.argv[1:]:
        child = os.fork()
        if not child:
            print(json.dumps([name, count_without(name)]), flush=True)
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
