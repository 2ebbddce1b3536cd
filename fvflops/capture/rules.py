"""The shape rules of our own: ops whose rule torch lacks, or has stricter than the op itself, and sizes to be assumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Rule = Callable[..., Any]


class ShapeRules:
    """What a shape run does where torch's own shape rule does not serve.

    `assume` gives sizes for ops whose result's size depends on values, by op name; `exact` forbids a rule that gives
    an upper bound only. `bounds` are the ops for which a bound was taken.
    """

    def __init__(self, assume: Mapping[str, Any] | None = None, *, exact: bool = False) -> None:
        self.assume = dict(assume or {})
        self.exact = exact
        self.bounds: set[str] = set()

    def instead(self, name: str) -> Rule | None:
        """Return the rule that stands for torch's, called as the op is, with tensors on the meta device."""
        return RULES.get(name)

    def sized(self, name: str) -> Rule | None:
        """Return the rule of an op whose size was given or can be bounded, or None."""
        return None

    def needs_values(self, name: str) -> bool:
        """Return whether the op's result, or its size, depends on the numbers in its arguments."""
        return False


RULES: dict[str, Rule] = {}
