"""Records of what lowers the peak memory of a training step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fvflops.reports.display import Displayed
from fvflops.text import record_repr, short_repr
from fvflops.units import format_bytes, format_quantity


class MemorySaving(NamedTuple):
    """A change to a training step: its peak memory in bytes, and the FLOPs that it adds, both predicted.

    `change` is "checkpoint" and the class of the `modules` whose activations are recomputed, "dtype" and the dtype of
    weights and inputs, "autocast" and the dtype of the forward pass, or "optimizer" and its name. `saved` is how much
    lower the peak is.
    """

    change: str
    name: str
    modules: tuple[str, ...]
    peak: int
    saved: int
    flops: int

    __repr__ = record_repr


@dataclass(frozen=True, slots=True, repr=False)
class MemorySavings(Displayed):
    """What lowers the peak memory of a training step, the largest saving first.

    `peak` is that of the step in bytes, `flops` its FLOPs in the convention `table`. `useless` are changes that do not
    lower the peak, `failed` is change → error for those with which the step raises, and `untried` names further ones.
    """

    _report = "fvflops.plan.memory.memory_report:savings_report"

    peak: int
    flops: int
    table: str
    changes: tuple[MemorySaving, ...]
    useless: tuple[MemorySaving, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    untried: tuple[str, ...] = ()

    def __repr__(self) -> str:
        best = f"at best {format_bytes(min(change.peak for change in self.changes))}" if self.changes else ""
        changes = format_quantity(len(self.changes), "change")
        return short_repr(self, "", f"peak {format_bytes(self.peak)}", f"{changes} that lower it", best)
