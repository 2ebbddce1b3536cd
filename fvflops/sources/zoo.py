"""Models of fvflops' own zoo: `zoo:NAME`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fvflops.capture.model.input_specs import InputSpec
from fvflops.sources.call_arguments import call_library, check_names, parse_arguments
from fvflops.sources.loaded_model import BuiltModel
from fvflops.sources.options import SourceOptions
from fvflops.zoo import ZOO
from fvflops.zoo import build as build_zoo_model


def list_names() -> Sequence[str]:
    return list(ZOO)


def build(name: str, options: SourceOptions) -> BuiltModel:
    """Return a model of the zoo; `options.args` are sizes of its architecture."""
    sizes = parse_arguments(options.args)
    if sizes and name in ZOO:
        config = ZOO[name].config
        check_names(ZOO[name].model_class if config is None else type(config), sizes, f"zoo:{name}")
    model = call_library(partial(build_zoo_model, name), sizes, f"zoo:{name}")
    return BuiltModel(model, tuple(InputSpec(None, shape, dtype) for _, shape, dtype in ZOO[name].inputs))
