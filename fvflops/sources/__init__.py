"""Models by name: a MODEL argument in, a module and its inputs out."""

from __future__ import annotations

from fvflops.sources.load import SOURCES, load_model, load_source
from fvflops.sources.loaded_model import LoadedModel
from fvflops.sources.options import SourceOptions

__all__ = ["SOURCES", "LoadedModel", "SourceOptions", "load_model", "load_source"]
