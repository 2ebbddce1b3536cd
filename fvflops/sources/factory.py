"""Models that a factory returns: `package.module:factory` or `file.py:factory`."""

from __future__ import annotations

from torch import nn

from fvflops.sources.imports import import_attribute
from fvflops.sources.loaded_model import BuiltModel
from fvflops.sources.options import SourceOptions


def build_from_factory(source: str, name: str, _: SourceOptions) -> BuiltModel:
    """Return the model of a factory, which returns a module or (module, inputs); a module itself is accepted too."""
    factory = import_attribute(source, name)
    result = factory if isinstance(factory, nn.Module) else factory()
    model, inputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{source}:{name} returned {type(model).__name__}: return a torch.nn.Module, or (module, inputs)"
        )
    return BuiltModel(model, inputs=inputs)
