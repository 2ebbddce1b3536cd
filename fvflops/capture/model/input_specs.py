"""Inputs described by their sizes: `1,3,224,224` or `ids=1,128:int64`, as `--input` and `input_size` accept."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fvflops.text import shown


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input: its keyword or None, its shape in elements, its dtype by torch's name."""

    name: str | None
    shape: tuple[int, ...]
    dtype: str = "float32"


def parse_input(text: str, *, option: str = "--input ", dtype: str = "float32") -> InputSpec:
    """Return the input that `[NAME=]SHAPE[:DTYPE]` describes; a mistake raises ValueError, which repeats the text.

    The message begins with `option`; `dtype` is the default.

    >>> parse_input("ids=1,128:int64")
    InputSpec(name='ids', shape=(1, 128), dtype='int64')
    """
    default = dtype
    name, separator, rest = text.rpartition("=")
    shape, _, dtype = rest.partition(":")
    if separator and not name.isidentifier():
        raise ValueError(f"{option}{text}: {name!r} is not an argument name; write NAME=SHAPE")
    if not re.fullmatch(r"\d+([,x]\d+)*", shape):
        raise ValueError(f"{option}{text}: {shape!r} is not a shape; write it like 1,3,224,224")
    dtype = dtype or default
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"{option}{text}: {dtype!r} is not a dtype of torch, such as float32, bfloat16, int64 or bool")
    return InputSpec(name or None, tuple(int(size) for size in re.split("[,x]", shape)), dtype)


def read_sizes(sizes: Any, *, dtype: str = "float32") -> tuple[InputSpec, ...]:
    """Return the inputs that `input_size` describes; another value raises ValueError.

    `sizes` is a shape, a text as for `--input`, a sequence of these, or a mapping of argument names to shapes or texts.

    >>> read_sizes([(1, 3, 8, 8), "mask=1,8:bool"])
    (InputSpec(name=None, shape=(1, 3, 8, 8), dtype='float32'), InputSpec(name='mask', shape=(1, 8), dtype='bool'))
    >>> read_sizes({"ids": "1,16:int64"})
    (InputSpec(name='ids', shape=(1, 16), dtype='int64'),)
    """
    if isinstance(sizes, Mapping):
        items = [(str(name), size) for name, size in sizes.items()]
    elif isinstance(sizes, str) or is_shape(sizes):
        items = [("", sizes)]
    else:
        items = [("", size) for size in (sizes if isinstance(sizes, (tuple, list)) else [None])]
    texts = [(name, _write_size(size, sizes)) for name, size in items or [("", None)]]
    named = [f"{name}={text}" if name else text for name, text in texts]
    return tuple(parse_input(text, option="input_size=", dtype=dtype) for text in named)


def is_shape(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and bool(value) and all(type(size) is int and size >= 0 for size in value)


def _write_size(size: Any, sizes: Any) -> str:
    if isinstance(size, str):
        return size
    if is_shape(size):
        return ",".join(map(str, size))
    raise ValueError(
        f"input_size={shown(sizes)}: pass a shape such as (1, 3, 224, 224), a text such as '1,16:int64', a "
        "list of these for several inputs, or a dict by argument name"
    )


def make_tensor(spec: InputSpec, device: torch.device | str) -> torch.Tensor:
    """Return a tensor of the spec: random numbers for floats, ones for ids and masks.

    1 is a valid index of any embedding with two or more rows, and a mask of ones keeps every position.
    """
    dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(spec.shape, dtype=dtype, device=device)
    return torch.ones(spec.shape, dtype=dtype, device=device)


def make_arguments(
    specs: Sequence[InputSpec], device: torch.device | str
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    args = tuple(make_tensor(spec, device) for spec in specs if spec.name is None)
    kwargs = {spec.name: make_tensor(spec, device) for spec in specs if spec.name is not None}
    return args, kwargs
