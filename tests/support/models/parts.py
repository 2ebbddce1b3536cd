"""Modules whose parts are given by name, for models that a test defines by their forward alone."""

from typing import TYPE_CHECKING, Any

from torch import nn


class Parts(nn.Module):
    """A base class: `Net(fc=nn.Linear(4, 4))` has the attribute `fc`."""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    if TYPE_CHECKING:  # a part is of any type

        def __getattr__(self, name: str) -> Any: ...


class Applied(Parts):
    """A module whose forward is a function of the module and its inputs."""

    def __init__(self, function, **parts):
        super().__init__(function=function, **parts)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)
