"""Parse `--input`, such as `1,3,224,224` or `ids=1,128:int64`, and create tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class InputSpec:
    """One input: its keyword or None, its shape in elements, its dtype by torch's name."""

    name: str | None
    shape: tuple[int, ...]
    dtype: str = "float32"


def parse_input(text: str) -> InputSpec:
    """Return the input that `[NAME=]SHAPE[:DTYPE]` describes; a mistake raises ValueError that replays the text.

    >>> parse_input("ids=1,128:int64")
    InputSpec(name='ids', shape=(1, 128), dtype='int64')
    """
    name, separator, rest = text.rpartition("=")
    shape, _, dtype = rest.partition(":")
    if separator and not name.isidentifier():
        raise ValueError(f"--input {text}: {name!r} is not an argument name; write NAME=SHAPE")
    if not re.fullmatch(r"\d+([,x]\d+)*", shape):
        raise ValueError(f"--input {text}: {shape!r} is not a shape; write it like 1,3,224,224")
    dtype = dtype or "float32"
    if not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise ValueError(f"--input {text}: {dtype!r} is not a dtype of torch, such as float32, bfloat16, int64 or bool")
    return InputSpec(name or None, tuple(int(size) for size in re.split("[,x]", shape)), dtype)


def make_tensor(spec: InputSpec, device: torch.device | str) -> torch.Tensor:
    """Return a tensor of the spec: random numbers for floats, ones for ids and masks.

    A one is a valid index wherever an embedding has two rows, and keeps every position of a mask.
    """
    dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(spec.shape, dtype=dtype, device=device)
    return torch.ones(spec.shape, dtype=dtype, device=device)


def make_arguments(
    specs: Sequence[InputSpec], device: torch.device | str
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Return the positional and the keyword arguments that the specs describe."""
    args = tuple(make_tensor(spec, device) for spec in specs if spec.name is None)
    kwargs = {spec.name: make_tensor(spec, device) for spec in specs if spec.name is not None}
    return args, kwargs
