"""Costs: what a formula returns for one call, and what a table makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fvflops.trace import Status


@dataclass(frozen=True, slots=True)
class Cost:
    """The arithmetic of one call.

    `macs` are multiply-adds, each of which counts for `multiply_add` flops in a table; `flops` is arithmetic that is
    no multiply-add. `activations` are elements of what the op's products write, or None where the formula does not
    say. All are whole and not negative; anything else raises ValueError.

    >>> Cost(macs=120, activations=24)
    Cost(macs=120, flops=0, activations=24)
    """

    macs: int = 0
    flops: int = 0
    activations: int | None = None

    def __post_init__(self) -> None:
        for name in ("macs", "flops", "activations"):
            value = getattr(self, name)
            if value is None and name == "activations":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"a Cost has {name} = {value!r}: it must be a whole number, 0 or more")


class OpCost(NamedTuple):
    """What one call costs under one label, in the unit of a metric.

    `value` is what the metric counts. Of a table's FLOPs `macs` and `flops` are the parts, kept apart (the value is
    `multiply_add * macs + flops`), and `activations` the elements beside them, None where the table counts none.
    """

    label: str
    status: Status
    value: int = 0
    macs: int = 0
    flops: int = 0
    activations: int | None = None

    @classmethod
    def in_flops(
        cls, label: str, status: Status, multiply_add: int, macs: int, flops: int, activations: int | None = None
    ) -> OpCost:
        """Return a cost in FLOPs, where a multiply-add is so many.

        >>> OpCost.in_flops("mm", Status.COUNTED, 2, macs=60, flops=3).value
        123
        """
        return cls(label, status, multiply_add * macs + flops, macs, flops, activations)
