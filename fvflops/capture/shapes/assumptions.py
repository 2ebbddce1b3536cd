"""Assumptions about data-dependent ops: sizes and values that a caller gives."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Number, Real
from typing import Any

import torch

from fvflops.capture.shapes.rules.data_dependent import SIZED, VALUES, selection_of
from fvflops.text import suggest
from fvflops.trace.signature import packet_of

ITEM = "aten::_local_scalar_dense"

_OF_ITEM = frozenset({"aten::item", "aten::is_nonzero", "aten::allclose"})  # composite ops that call it
_BOOLEANS = frozenset({"aten::equal", "aten::is_nonzero", "aten::allclose"})


def check_assumptions(assume: Mapping[str, Any]) -> None:
    """Raise ValueError for a name whose result cannot be assumed, or an invalid size or value.

    >>> check_assumptions({"aten::nonzer": 3})
    Traceback (most recent call last):
    ...
    ValueError: assume={'aten::nonzer': 3}: 'aten::nonzer' ...did you mean 'aten::nonzero'...
    """
    for name, given in assume.items():
        problem = _problem_with(name, given)
        if problem:
            raise ValueError(f"assume={{{name!r}: {given!r}}}: {problem}")


def _problem_with(name: Any, given: Any) -> str:
    packet = selection_of(name) if isinstance(name, str) else ""
    if packet in VALUES:
        if packet in _BOOLEANS:
            return "" if given in (True, False) else "the op's result is True or False"
        return "" if isinstance(given, Number) else "the op's result is a number, True or False"
    if packet not in SIZED:
        names = sorted({*SIZED, *VALUES})
        hint = suggest(str(name), names, separator="; ") or "."
        return f"{name!r} is not an op whose result can be assumed{hint} Those that can: {', '.join(names)}"
    if isinstance(given, Integral) and not isinstance(given, bool):
        return "" if int(given) >= 0 else "a size is not negative"
    if isinstance(given, Real) and not isinstance(given, bool):
        return "" if 0 <= float(given) <= 1 else "a fraction is between 0.0 and 1.0; give a number of results as an int"
    return "give a number of results (int), or a fraction of the elements examined, 0.0 to 1.0"


def can_be_assumed(name: str) -> bool:
    """Return whether a size or value can be assumed for an op."""
    return selection_of(name) in SIZED or packet_of(name) in VALUES


def assumption_for(name: str, assume: Mapping[str, Any]) -> Any:
    """Return the assumption for an op: under its full name, without the overload, or under that of `.item()`.

    >>> assumption_for("aten::index.Tensor", {"aten::index": 5}), assumption_for("aten::item", {ITEM: 7})
    (5, 7)
    """
    packet = packet_of(name)
    for known in (name, packet, ITEM if packet in _OF_ITEM else packet):
        if known in assume:
            return assume[known]
    return None


def read_value(packet: str, given: Any, *args: Any, **_: Any) -> bool | int | float | complex:
    """Return an assumed value in the type of the op's result: by the tensor's dtype, or a bool.

    >>> read_value(ITEM, 3, torch.empty((), device="meta"))
    3.0
    """
    dtype = args[0].dtype
    if packet in _BOOLEANS or dtype is torch.bool:
        return bool(given)
    if dtype.is_complex:
        return complex(given)
    return float(given) if dtype.is_floating_point else math.trunc(given)
