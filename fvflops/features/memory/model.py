"""Records of what lowers the peak memory of a training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


class MemorySaving(NamedTuple):
    """A change to a training step: its peak memory in bytes, and the FLOPs that it adds, both predicted.

    `change` is "checkpoint" and the class of the `modules` whose activations are recomputed, "dtype" and the dtype of
    weights and inputs, or "optimizer" and its name. `saved` is how much lower the peak is.
    """

    change: str
    name: str
    modules: tuple[str, ...]
    peak: int
    saved: int
    flops: int


@dataclass(frozen=True, slots=True)
class MemorySavings:
    """What lowers the peak memory of a training step, the largest saving first.

    `peak` is that of the step in bytes, `flops` its FLOPs in the convention `table`. `useless` are changes that do not
    lower the peak, `failed` is change → error for those with which the step raises, `untried` are classes of modules
    that were not tried.
    """

    peak: int
    flops: int
    table: str
    changes: tuple[MemorySaving, ...]
    useless: tuple[MemorySaving, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    untried: tuple[str, ...] = ()
