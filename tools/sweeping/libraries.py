"""The libraries whose models are swept, and what their import needs; workers import this first."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from fvflops.sources.load import load_source
from tests.support.torchvision_schemas import define_torchvision_schemas

LIBRARIES = ("timm", "torchvision", "transformers")

define_torchvision_schemas()
# A configuration that names a model to be fetched must fail, not wait for a network.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")


class Library(Protocol):
    """What the module of a library has for real execution.

    `ways` are how a model is built, in the order in which they are tried: "quick" is random weights made quickly, and
    smaller inputs where the model takes them, "random" random weights, and "tiny" a smaller configuration.
    """

    ways: tuple[str, ...]

    def build(self, name: str, way: str) -> tuple[Any, Any]:
        """Return a model and its inputs."""


def list_names(library: str) -> list[str]:
    """Return the MODEL arguments of all models of a library; of transformers, of the first class of each model type."""
    if library == "transformers":
        from sweeping.transformers import list_classes

        return [f"transformers:{name}" for name in list_classes()]
    return [f"{library}:{name}" for name in load_source(library).list_names()]


def find_ways(library: str) -> tuple[str, ...]:
    """Return how a library's models are built for real execution."""
    return _load(library).ways


def make_factory(name: str, way: str) -> Callable[[], Any]:
    """Return what builds a model for real execution in a worker."""
    return partial(_build, name, way)


def _build(name: str, way: str) -> Any:
    library, _, model = name.partition(":")
    return _load(library).build(model, way)


def _load(library: str) -> Library:
    return importlib.import_module(f"sweeping.{library}")
