"""Validate and look up assumptions about data-dependent ops: sizes and values passed as `assume`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Number, Real
from typing import Any

import torch

from fvflops.capture.shapes.rules.data_dependent import SCALAR_RESULTS, SIZE_RULES, data_dependent_key
from fvflops.text import suggest
from fvflops.trace.calls import packet_of

ITEM = "aten::_local_scalar_dense"

# Composite ops and the op that they call: without autograd the former are recorded, with it the latter.
_CALLED = {
    "aten::item": ITEM,
    "aten::is_nonzero": ITEM,
    "aten::allclose": ITEM,
    "aten::argwhere": "aten::nonzero",
    "aten::nonzero_numpy": "aten::nonzero",
    "aten::where": "aten::nonzero",
}
_BOOLEANS = frozenset({"aten::equal", "aten::is_nonzero", "aten::allclose"})


def check_assumptions(assume: Mapping[str, Any]) -> None:
    """Raise ValueError for a name whose result cannot be assumed, or an invalid size or value.

    >>> check_assumptions({"aten::nonzer": 3})
    Traceback (most recent call last):
    ...
    ValueError: assume={'aten::nonzer': 3}: 'aten::nonzer' ...did you mean 'aten::nonzero'...
    """
    for name, value in assume.items():
        problem = _problem_with(name, value)
        if problem:
            raise ValueError(f"assume={{{name!r}: {value!r}}}: {problem}")


def _problem_with(name: Any, value: Any) -> str:
    packet = data_dependent_key(name) if isinstance(name, str) else ""
    if packet in SCALAR_RESULTS:
        if packet in _BOOLEANS:
            return "" if value in (True, False) else "the op's result must be True or False"
        return "" if isinstance(value, Number) else "the op's result must be a number, True or False"
    if packet not in SIZE_RULES:
        names = sorted({*SIZE_RULES, *SCALAR_RESULTS})
        hint = suggest(str(name), names, separator="; ") or "."
        return f"{name!r} is not an op whose result can be assumed{hint} Such ops: {', '.join(names)}"
    if isinstance(value, Integral) and not isinstance(value, bool):
        return "" if int(value) >= 0 else "a size must not be negative"
    if isinstance(value, Real) and not isinstance(value, bool):
        if 0 <= float(value) <= 1:
            return ""
        return "a fraction must be between 0.0 and 1.0; pass a number of results as an int"
    return "pass a number of results (int), or a fraction of the examined elements between 0.0 and 1.0"


def can_be_assumed(name: str) -> bool:
    return data_dependent_key(name) in SIZE_RULES or packet_of(name) in SCALAR_RESULTS


def how_to_assume(name: str) -> str:
    """Return how a size or value is assumed for an op, as the end of a message.

    >>> how_to_assume("aten::nonzero")
    "assume={'aten::nonzero': ...} (--assume aten::nonzero=...)"
    """
    return f"assume={{{name!r}: ...}} (--assume {name}=...)"


def assumption_for(name: str, assume: Mapping[str, Any]) -> Any:
    """Return the assumption for an op: by its full name, its name without overload, or the op that it calls.

    >>> assumption_for("aten::index.Tensor", {"aten::index": 5}), assumption_for("aten::item", {ITEM: 7})
    (5, 7)
    """
    packet = packet_of(name)
    for key in (name, packet, _CALLED.get(packet, packet)):
        if key in assume:
            return assume[key]
    return None


def convert_value(packet: str, value: Any, *args: Any, **_: Any) -> bool | int | float | complex:
    """Convert an assumed value to the type of the op's result, which is a bool or follows from the tensor's dtype.

    >>> convert_value(ITEM, 3, torch.empty((), device="meta"))
    3.0
    """
    dtype = args[0].dtype
    if packet in _BOOLEANS or dtype is torch.bool:
        return bool(value)
    if dtype.is_complex:
        return complex(value)
    return float(value) if dtype.is_floating_point else math.trunc(value)
