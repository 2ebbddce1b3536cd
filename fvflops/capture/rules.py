"""The shape rules of our own: ops whose rule torch lacks, or has stricter than the op itself, and sizes to be assumed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


class AssumedSizes:
    """The sizes that a caller gives for ops whose result's size depends on values, by op name."""

    def __init__(self, assume: Mapping[str, Any] | None) -> None:
        self.assume = dict(assume or {})
        self.asked: frozenset[str] = frozenset({"aten::_local_scalar_dense", "aten::equal", "aten::nonzero"})

    def rule(self, name: str, error: Exception) -> Callable[..., Any]:
        """Return the rule for an op with the assumed size, or raise the error that the op raised."""
        raise error


RULES: dict[str, Callable[[Any, Any], Callable[..., Any]]] = {}
