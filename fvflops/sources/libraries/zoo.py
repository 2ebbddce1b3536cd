"""Models of fvflops' own zoo: `zoo:NAME`."""

from __future__ import annotations

from collections.abc import Sequence

from fvflops.sources.input_specs import InputSpec
from fvflops.sources.loaded_model import BuiltModel
from fvflops.sources.options import SourceOptions
from fvflops.zoo import ZOO
from fvflops.zoo import build as build_zoo_model


def list_names() -> Sequence[str]:
    """Return the names of all models."""
    return list(ZOO)


def build(name: str, _: SourceOptions) -> BuiltModel:
    """Return a model of the zoo."""
    model = build_zoo_model(name)
    return BuiltModel(model, tuple(InputSpec(None, shape, dtype) for _, shape, dtype in ZOO[name].inputs))
