"""A case: one model of a library, built, with inputs that it takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn


@dataclass(frozen=True, slots=True)
class Case:
    """A model, what makes its inputs, positional (a tuple) or by name (a dict), and what was built, as in Python.

    Inputs are made apart from the model, so that its size is known also where they cannot be made.
    """

    model: nn.Module
    make_inputs: Callable[[], tuple[Any, ...] | dict[str, Any]]
    built: str


class Library(Protocol):
    """What the module of a library offers.

    A *way* is how a model is built: "meta" (weights on the meta device), "random" (random weights), "quick" (random
    weights made quickly, and smaller inputs where the model takes them), "small" (a shrunken configuration with random
    weights) or "tiny" (a smaller one with quick weights). `ways` are those that a library has, in the order in which
    they are tried, `real_ways` those for real execution. "small" and "tiny" are different models, so their rows must
    say so.
    """

    ways: tuple[str, ...]
    real_ways: tuple[str, ...]

    def version(self) -> str:
        """Return the version that is installed."""

    def list_names(self) -> list[str]:
        """Return the names of all models, without building one."""

    def build(self, name: str, way: str) -> Case:
        """Return a model with what makes its inputs; whatever it raises is the cause of the failure."""
