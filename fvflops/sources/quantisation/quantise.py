"""Replace the weights of a model by packed ones, as its `quantization_config` says."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from fvflops.sources.imports import import_module
from fvflops.sources.quantisation.scheme import METHODS, Scheme, read_scheme

_LOGGER = logging.getLogger("fvflops")
# Of mixtures of experts it quantises the experts alone.
_EXPERTS_ONLY = "mxfp4"


def quantise(model: Any, settings: Mapping[str, Any]) -> None:
    """Pack the weights of a model of transformers that its `quantization_config` quantises.

    These are linear layers and stacks of experts, without the output layer, tied weights and the modules that the
    settings leave out. A method that is not known leaves the model as it is, and is logged in one line.
    """
    scheme = read_scheme(settings)
    method = settings.get("quant_method", "?")
    if scheme is None:
        dtype = str(model.dtype).removeprefix("torch.")
        _LOGGER.warning(
            "quantization_config (%s) is not applied, weights are %s: fvflops knows usual settings of %s",
            method,
            dtype,
            ", ".join(METHODS),
        )
        return
    for module, name in list(_quantised_weights(model, scheme, experts_only=method == _EXPERTS_ONLY)):
        weight = module._parameters[name]
        assert weight is not None
        module._parameters[name] = nn.Parameter(scheme.pack(weight.detach()), requires_grad=False)


def _quantised_weights(model: nn.Module, scheme: Scheme, *, experts_only: bool) -> Iterator[tuple[nn.Module, str]]:
    should_convert = import_module("transformers.quantizers.quantizers_utils").should_convert_module
    kept = [*import_module("transformers.quantizers.base").get_keys_to_not_convert(model), *scheme.ignored]
    for path, module in model.named_modules():
        if not should_convert(path, kept):
            continue
        if isinstance(module, nn.Linear):
            if not experts_only:
                yield module, "weight"
        elif type(module).__name__.endswith("Experts"):
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.ndim == 3 and parameter.is_floating_point():
                    yield module, name
