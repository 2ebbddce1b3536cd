"""Replace the weights of a model by packed ones, as its `quantization_config` says."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fvflops.sources.imports import import_module
from fvflops.sources.weights.packed_weight import PackedWeight, bits_of


class Scheme(NamedTuple):
    """How weights are stored: the `format` of an element, and the dtype of a `block`'s `scale`.

    A block has (rows, columns) elements; a size of 0 is the whole dimension. `offset_bits` is the number of bits of a
    block's zero point; `nested` blocks share a float32 scale of their scales. `compute` is the dtype of products, ""
    for the input's. `ignored` are patterns of names of modules that keep their weights.
    """

    format: str
    scale: torch.dtype = torch.float16
    block: tuple[int, int] = (1, 0)
    offset_bits: int = 0
    nested: int = 0
    compute: str = ""
    ignored: tuple[str, ...] = ()

    def pack(self, weight: torch.Tensor) -> PackedWeight:
        """Return a packed weight of zeros with the shape and the device of a weight."""
        *stack, rows, columns = weight.shape
        bits = bits_of(self.format)
        whole = {"int8": torch.int8}.get(self.format) or (
            getattr(torch, self.format) if self.format.startswith("float8") else None
        )
        make = weight.new_zeros
        blocks = [math.ceil(size / (block or size)) for size, block in zip((rows, columns), self.block, strict=True)]
        width = columns if whole is not None else math.ceil(columns * bits / 8)
        codes = make((*stack, rows, width), dtype=whole or torch.uint8)
        offset = None
        if self.nested:
            offset = make((*stack, 1, math.ceil(math.prod(blocks) / self.nested)), dtype=torch.float32)
        elif self.offset_bits:
            dtype = torch.int8 if whole is not None else torch.uint8
            offset = make((*stack, blocks[0], math.ceil(blocks[1] * self.offset_bits / 8)), dtype=dtype)
        scale = make((*stack, *blocks), dtype=self.scale)
        compute = getattr(torch, self.compute, None) if self.compute else None
        if self.compute and compute is None:
            lacking = f"torch {torch.__version__} has no {self.compute}, in which these weights compute"
            raise ValueError(f"{lacking}: use a newer torch")
        return PackedWeight((codes, scale, offset), self.format, weight.shape, weight.dtype, compute)


def read_scheme(settings: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme of a `quantization_config`, None for an unsupported method or setting.

    >>> read_scheme({"quant_method": "gptq", "bits": 4, "group_size": 128}).format
    'int4'
    """
    method = str(settings.get("quant_method", "")).lower().replace("_", "-")
    if not method and (settings.get("load_in_4bit") or settings.get("load_in_8bit")):
        method = "bitsandbytes"
    reader = _READERS.get(method)
    scheme = reader(settings) if callable(reader) else reader
    if scheme is None:
        return None
    names = ("modules_to_not_convert", "ignore", "llm_int8_skip_modules", "skip_modules")
    ignored = [str(item) for name in names for item in settings.get(name) or ()]
    return scheme._replace(ignored=tuple(item.removeprefix("re:") for item in ignored))


def _grouped(settings: Mapping[str, Any], bits: Any, default: int, *, symmetric: bool = False) -> Scheme | None:
    """Return the scheme of `bits`-bit integers with a float16 scale for each group of a row."""
    group = settings.get("group_size", default)
    if type(bits) is not int or not 1 <= bits <= 8 or not (group is None or type(group) is int):
        return None
    return Scheme(f"int{bits}", block=(1, group if group and group > 0 else 0), offset_bits=0 if symmetric else bits)


def _gptq(settings: Mapping[str, Any]) -> Scheme | None:
    return _grouped(settings, settings.get("bits", settings.get("w_bit", 4)), 128)


def _hqq(settings: Mapping[str, Any]) -> Scheme | None:
    given = settings.get("quant_config") or settings
    given = given.get("weight_quant_params", given) if isinstance(given, Mapping) else {}
    scheme = _grouped(given, given.get("nbits", 4), 64)
    return None if scheme is None else scheme._replace(offset_bits=8)


def _bitsandbytes(settings: Mapping[str, Any]) -> Scheme | None:
    if settings.get("load_in_8bit"):
        return Scheme("int8", torch.float32, compute="int8")
    kind = settings.get("bnb_4bit_quant_type", "fp4")
    format = {"nf4": "nf4", "fp4": "float4_e2m1fn"}.get(str(kind))
    if not settings.get("load_in_4bit") or format is None:
        return None
    nested = bool(settings.get("bnb_4bit_use_double_quant"))
    return Scheme(format, torch.uint8 if nested else torch.float32, (1, 64), nested=256 if nested else 0)


def _fp8(settings: Mapping[str, Any]) -> Scheme | None:
    block = settings.get("weight_block_size", (128, 128))
    rows, columns = (0, 0) if block is None else block
    return Scheme("float8_e4m3fn", torch.float32, (rows, columns), compute="float8_e4m3fn")


def _compressed_tensors(settings: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme of compressed-tensors, if all groups of modules share it and it is for linear layers."""
    groups = list((settings.get("config_groups") or {}).values())
    if not groups or any(group != groups[0] for group in groups[1:]) or groups[0].get("targets") not in (["Linear"],):
        return None
    weights, inputs = groups[0].get("weights") or {}, groups[0].get("input_activations") or {}
    return _of_arguments(weights, inputs)


def _of_arguments(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> Scheme | None:
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    formats = {("int", 4): "int4", ("int", 8): "int8", ("float", 8): "float8_e4m3fn", ("float", 4): "float4_e2m1fn"}
    format = formats.get((kind, bits))  # type: ignore[arg-type]
    if format is None:
        return None
    strategy, group = weights.get("strategy"), weights.get("group_size") or 0
    block = {"tensor": (0, 0), "channel": (1, 0), "block": tuple(weights.get("block_structure") or (128, 128))}.get(
        str(strategy), (1, group)
    )
    scale = torch.float8_e4m3fn if format == "float4_e2m1fn" else torch.float16
    computed = {("int", 8): "int8", ("float", 8): "float8_e4m3fn", ("float", 4): "float4_e2m1fn_x2"}
    compute = computed.get((inputs.get("type", "int"), inputs.get("num_bits")), "")  # type: ignore[arg-type]
    return Scheme(format, scale, block, 0 if weights.get("symmetric", True) else bits or 0, compute=compute)


def _quanto(settings: Mapping[str, Any]) -> Scheme | None:
    name = str(settings.get("weights", "int8"))
    if name == "float8":
        return Scheme("float8_e4m3fn")
    found = re.fullmatch(r"int([248])", name)
    bits = int(found[1]) if found else 0
    return _grouped({"group_size": 0 if bits == 8 else 128}, bits, 128, symmetric=bits == 8) if bits else None


def _torchao(settings: Mapping[str, Any]) -> Scheme | None:
    """Return the scheme of torchao: the name of one configuration, in the old or the new spelling."""
    given = settings.get("quant_type")
    data: Mapping[str, Any] = settings.get("quant_type_kwargs") or {}
    if isinstance(given, Mapping):
        inner = given.get("default", given)
        given, data = inner.get("_type"), inner.get("_data") or {}
    name = str(given).lower().replace("_", "").removesuffix("config")
    if name == "int4weightonly":
        return Scheme("int4", torch.bfloat16, (1, int(data.get("group_size") or 128)), 16)
    schemes = {
        "int8weightonly": Scheme("int8", torch.float32),
        "int8dynamicactivationint8weight": Scheme("int8", torch.float32, compute="int8"),
        "float8weightonly": Scheme("float8_e4m3fn", torch.float32),
        "float8dynamicactivationfloat8weight": Scheme("float8_e4m3fn", torch.float32, compute="float8_e4m3fn"),
    }
    return schemes.get(name)


def _fp_quant(settings: Mapping[str, Any]) -> Scheme | None:
    name = str(settings.get("forward_dtype", "nvfp4"))
    group = {"mxfp4": 32, "nvfp4": 16}.get(name)
    return group and Scheme("float4_e2m1fn", torch.uint8, (1, group), compute="float4_e2m1fn_x2")  # type: ignore


# Method → its scheme, or the function that reads it from the settings. Sources: the classes of
# transformers.utils.quantization_config in 5.23 for names and defaults, and each library's layers for their tensors.
_READERS: Mapping[str, Scheme | Callable[[Mapping[str, Any]], Scheme | None]] = {
    **dict.fromkeys(("gptq", "awq", "auto-round", "autoround"), _gptq),
    "bitnet": Scheme("int2", torch.bfloat16, (0, 0), compute="int8"),
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "eetq": Scheme("int8"),
    "fbgemm-fp8": Scheme("float8_e4m3fn", torch.float32, compute="float8_e4m3fn"),
    "fp8": _fp8,
    "fp-quant": _fp_quant,
    "hqq": _hqq,
    "mxfp4": Scheme("float4_e2m1fn", torch.uint8, (1, 32)),
    "quanto": _quanto,
    "torchao": _torchao,
}
METHODS: Sequence[str] = sorted(_READERS)


_LOGGER = logging.getLogger("fvflops")
# The method that quantises only the experts of a mixture of experts.
_EXPERTS_ONLY = "mxfp4"


def quantise(model: Any, settings: Mapping[str, Any]) -> None:
    """Pack the weights of a transformers model that its `quantization_config` quantises.

    These are linear layers and stacks of experts, except the output layer, tied weights and modules that the settings
    ignore. An unsupported method leaves the model unchanged and logs a warning.
    """
    scheme = read_scheme(settings)
    method = settings.get("quant_method", "?")
    if scheme is None:
        dtype, known = str(model.dtype).removeprefix("torch."), ", ".join(METHODS)
        text = "quantization_config (%s) is not applied, weights are %s: fvflops knows usual settings of %s"
        _LOGGER.warning(text, method, dtype, known)
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
