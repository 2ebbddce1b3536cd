"""Registry of the Python formulas that tables refer to with `use`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from fvflops.formulas.cost import Cost
from fvflops.formulas.functions.attention import SEQUENCE_VALUES
from fvflops.formulas.language.call import Call
from fvflops.text import explaining_arguments, shown, suggest, truncate

# A formula returns a Cost, or an integer number of FLOPs.
Formula = Callable[[Call], Cost | int]

_MODULES = (
    *("attention", "convolution", "einsum", "exact_attention", "matmul", "peer_conventions", "rnn", "sampling"),
    "state_space",
)
_FUNCTIONS: Mapping[str, Any] = {
    name: function
    for module in _MODULES
    for name, function in vars(importlib.import_module(f"fvflops.formulas.functions.{module}")).items()
}
# The formula of `use: NAME` is the function count_NAME of one of these modules.
FORMULAS: Mapping[str, Formula] = {
    name.removeprefix("count_"): _FUNCTIONS[name] for name in sorted(_FUNCTIONS) if name.startswith("count_")
}

# Arguments of which a formula reads the values, where they are known.
VALUES: Mapping[str, tuple[str, ...]] = {
    f"{prefix}attention_bshd{suffix}": SEQUENCE_VALUES for prefix in ("", "exact_") for suffix in ("", "_backward")
}

_REGISTERED: dict[str, Formula] = {}


@explaining_arguments
def register_formula(name: str, function: Formula) -> None:
    """Make `function` available to all tables of this process as `use: name`.

    `function` takes a `Call` and returns a `Cost`, or an integer number of FLOPs. A name that fvflops ships, or that
    is registered for another function, raises ValueError; registering the same function again has no effect.

    >>> register_formula("convolution", lambda call: Cost(flops=9 * call.tensor("u").numel))
    Traceback (most recent call last):
    ValueError: the formula 'convolution' is shipped with fvflops: choose another name
    """
    if not isinstance(name, str) or not name.isidentifier():
        raise ValueError(f"a formula name must be an identifier such as 'fused_scan'; got {shown(name)}")
    if not callable(function):
        raise TypeError(f"the formula {name!r} is {function!r}, which cannot be called")
    if not can_be_called(function, 1):
        raise TypeError(f"the formula {name!r} takes {inspect.signature(function)}: write a function of (call)")
    if name in FORMULAS:
        raise ValueError(f"the formula {name!r} is shipped with fvflops: choose another name")
    if _REGISTERED.setdefault(name, function) is not function:
        raise ValueError(f"the formula {name!r} is registered already, as {_REGISTERED[name]!r}: choose another name")


def can_be_called(function: Callable[..., object], count: int) -> bool:
    """Return whether a function accepts `count` positional arguments alone; True where its signature is unknown.

    >>> can_be_called(lambda call: 0, 1), can_be_called(lambda: 0, 1)
    (True, False)
    """
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # a callable of C without a signature
        return True
    return True


def find_formula(name: str) -> Formula:
    """Return the formula of a name; an unknown one raises KeyError with the closest match."""
    for registry in (FORMULAS, _REGISTERED):
        if name in registry:
            return registry[name]
    known = [*FORMULAS, *_REGISTERED]
    hint = suggest(name, known, quote=False) or f": available are {truncate(', '.join(known), 500)}"
    raise KeyError(f"unknown formula {truncate(name)}{hint}")
