"""Models on the meta device: copies without weights, quantised weights, and inputs cast to a dtype."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from fvflops.capture.model.model_index import ModelIndex
from fvflops.capture.model.packed_layers import LOW_PRECISION
from fvflops.capture.recorder.tensor_specs import inner_tensors, rebuild
from fvflops.torch_internals import is_wrapper_subclass


def copy_to_meta(model: nn.Module, replaced: Mapping[nn.Module, nn.Module] = MappingProxyType({})) -> nn.Module:
    """Return a copy on meta with the buffers' values; modules in `replaced` are replaced by copies of the values."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(_empty_on_meta(parameter), parameter.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().clone()
    for module, replacement in replaced.items():
        memo[id(module)] = copy.deepcopy(replacement, memo)
    return copy.deepcopy(model, memo)


def _empty_on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if is_wrapper_subclass(tensor) and any(inner.dtype in LOW_PRECISION for inner in inner_tensors(tensor)):
        return rebuild(tensor, _empty_on_meta)  # a quantized weight: torch would return an ordinary tensor
    return torch.empty_like(tensor, device="meta")


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Return nested inputs with their floating-point tensors cast to a dtype.

    >>> [tensor.dtype for tensor in cast_floats((torch.ones(2), torch.ones(2, dtype=torch.int64)), torch.bfloat16)]
    [torch.bfloat16, torch.int64]
    """
    return map_tensors(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return nested inputs with each tensor in mappings, tuples and lists changed; other objects stay as they are."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, Mapping):
        return {name: map_tensors(item, change) for name, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(map_tensors(item, change) for item in value)
    return value


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
