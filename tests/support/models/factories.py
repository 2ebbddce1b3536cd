"""Factories of small models, in a file that tests copy and name as MODEL."""

import torch
from torch import nn


class Linear(nn.Linear):
    """A layer whose input is chosen as `choose` says."""

    def __init__(self, choose=lambda x: x):
        super().__init__(4, 3)
        self.choose = choose

    def forward(self, x):
        return super().forward(self.choose(x))


def build():
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU())


ready = build()


def with_inputs():
    return build(), (torch.ones(2, 4),)


def list_of_inputs():
    return build(), [torch.ones(2, 4)]


def with_names():
    return Linear(), {"x": torch.ones(5, 4)}


def one_dict():
    return Linear(lambda batch: batch["a"]), ({"a": torch.ones(5, 4)},)


def routed():
    return Linear(lambda x: x[x[:, 0] > 0]), torch.ones(8, 4)


def unknown():
    @torch.library.custom_op("fvflops_factories::scan", mutates_args=())
    def scan(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    return Linear(scan), torch.ones(2, 4)


def empty():
    return nn.Identity(), torch.ones(2, 4)


def broken():
    raise ZeroDivisionError("in the factory\nsecond line")


def exiting():
    raise SystemExit(0)
