"""Quantise bitsandbytes weights on the meta device; the library does so only when they move to another device."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fvflops.capture.model.model_index import ModelIndex

_CLASSES = ("Params4bit", "Int8Params")
# Attributes that make the forward on this machine's CPU repack the weight in place, which needs values.
_REPACKS = ("support_avx512bf16_for_cpu",)


@contextmanager
def quantised_on_meta(model: Any) -> Iterator[None]:
    """Quantise the weights of layers on the meta device, as moving them would; restore them at the end."""
    replaced: list[tuple[nn.Module, nn.Parameter, dict[str, Any]]] = []
    may_have = "bitsandbytes" in sys.modules and isinstance(model, nn.Module)
    try:
        for module in ModelIndex(model).modules if may_have else ():  # unique by identity
            # A ScriptModule has no dict of parameters.
            weight: Any = dict(module.named_parameters(recurse=False)).get("weight")
            if type(weight).__name__ in _CLASSES and weight.device.type == "meta" and not _is_quantised(weight):
                kept = {name: vars(module)[name] for name in _REPACKS if name in vars(module)}
                replaced.append((module, weight, kept))
                module._parameters["weight"] = _quantised(weight)
                vars(module).update(dict.fromkeys(kept, False))
        yield
    finally:
        for module, weight, kept in replaced:
            module._parameters["weight"] = weight
            vars(module).update(kept)


def _is_quantised(weight: Any) -> bool:
    if type(weight).__name__ == "Int8Params":
        return weight.has_fp16_weights or weight.CB is not None
    return weight.bnb_quantized or weight.quant_state is not None


def _quantised(weight: Any) -> Any:
    names = ("blocksize", "compress_statistics", "quant_type", "quant_storage", "has_fp16_weights")
    options = {name: getattr(weight, name) for name in names if hasattr(weight, name)}
    return type(weight)(weight.data, requires_grad=False, **options)._quantize("meta")
