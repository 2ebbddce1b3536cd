"""What else a breakdown may have of its run: calls in time, memory over the ops, and the peaks of a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Allocated bytes after each op of a run.

    `layers` is kind of memory → bytes after each op, the lowest layer first. `ops` and `modules` are names, and
    `phases` phases, of the ops in their order. `measured` is whether the bytes were measured, else predicted.

    >>> MemoryCurve({"parameter": [4, 4], "activation": [0, 2]}, ["mm", "relu"], ["fc", ""], ["forward"] * 2).peak()
    6
    """

    layers: Mapping[str, Sequence[int]]
    ops: Sequence[str]
    modules: Sequence[str]
    phases: Sequence[str]
    measured: bool = False

    def totals(self) -> list[int]:
        """Return the sum of the layers after each op."""
        return [sum(values) for values in zip(*self.layers.values(), strict=True)]

    def peak(self) -> int:
        """Return the largest total, 0 without ops."""
        return max(self.totals(), default=0)


@dataclass(frozen=True, slots=True)
class Peaks:
    """The peaks of a device: its memory's `bandwidth` in bytes/s, and FLOP/s by dtype."""

    device: str
    bandwidth: int
    flops: Mapping[str, int] = field(default_factory=dict)
