"""Cost of one op call: as returned by a formula, and as counted in a metric."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from fvflops.trace import Status


@dataclass(frozen=True, slots=True)
class Cost:
    """The arithmetic of one call.

    `macs` are multiply-adds, each of which counts as the `multiply_add` FLOPs of a formula table; `flops` are all other
    operations. `activations` is the number of output elements of matrix products and convolutions, as fvcore counts
    them, or None where the formula does not define it. All are integers >= 0; anything else raises ValueError.

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
                raise ValueError(f"a Cost has {name} = {value!r}: it must be an integer >= 0")


class OpCost(NamedTuple):
    """Cost of one op call in the unit of a metric; reports sum costs by `label`, such as "conv".

    `value` is in that unit. For FLOPs, `macs` and `flops` are its parts (the value is `multiply_add * macs + flops`),
    and `activations` the activations of the same call, None where the formula table counts none.
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
        """Return a cost in FLOPs, with `multiply_add` FLOPs for one multiply-add.

        >>> OpCost.in_flops("mm", Status.COUNTED, 2, macs=60, flops=3).value
        123
        """
        return cls(label, status, multiply_add * macs + flops, macs, flops, activations)
