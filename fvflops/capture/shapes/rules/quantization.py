"""Reject quantized tensors, for which torch's shape rules would silently return unquantized ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn


def reject(name: str, *_: Any, **__: Any) -> NoReturn:
    """Raise NotImplementedError."""
    raise NotImplementedError(f"{name}: shape execution does not support quantized tensors")


RULES: dict[str, Callable[..., Any]] = {
    name: partial(reject, name)
    for name in (
        "aten::dequantize.self",
        "aten::dequantize.tensors",
        "aten::quantize_per_channel",
        "aten::quantize_per_tensor",
        "aten::quantize_per_tensor.tensor_qparams",
        "aten::quantize_per_tensor.tensors",
        "aten::quantize_per_tensor_dynamic",
    )
}
