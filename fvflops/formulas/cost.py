"""Cost of one op call: as returned by a formula, and as counted in a metric."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from fvflops.trace import Status


@dataclass(frozen=True, slots=True)
class Cost:
    """The arithmetic of one call.

    `macs` are multiply-adds, each of which counts as the `multiply_add` FLOPs of a formula table; `flops` are all other
    operations. `activations` is the number of output elements of matrix products and convolutions, as fvcore counts
    them, or None if the formula does not define it. `recomputed` is the number of multiply-adds with which a fused
    backward op recomputes results of the forward pass; `fvflops.mfu` excludes them. All are integers >= 0; anything
    else raises ValueError.

    >>> Cost(macs=120, activations=24)
    Cost(macs=120, flops=0, activations=24)
    """

    macs: int = 0
    flops: int = 0
    activations: int | None = None
    recomputed: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        for name in ("macs", "flops", "activations", "recomputed"):
            value = getattr(self, name)
            if value is None and name == "activations":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"a Cost has {name} = {value!r}: it must be an integer >= 0")
        if self.recomputed > self.macs:
            raise ValueError(f"a Cost has recomputed = {self.recomputed}: it must be at most its macs, {self.macs}")


class OpCost(NamedTuple):
    """Cost of one op call in the unit of a metric; reports sum costs by `label`, such as "conv".

    For FLOPs, `value` is `multiply_add * macs + flops`, and `activations` are the activations of the same call, None if
    the formula table counts none. `recomputed` is as in Cost.
    """

    label: str
    status: Status
    value: int = 0
    macs: int = 0
    flops: int = 0
    activations: int | None = None
    recomputed: int = 0

    @classmethod
    def in_flops(
        cls,
        label: str,
        status: Status,
        multiply_add: int,
        macs: int,
        flops: int,
        activations: int | None = None,
        recomputed: int = 0,
    ) -> OpCost:
        """Return a cost in FLOPs, with `multiply_add` FLOPs for one multiply-add.

        >>> OpCost.in_flops("mm", Status.COUNTED, 2, macs=60, flops=3).value
        123
        """
        return cls(label, status, multiply_add * macs + flops, macs, flops, activations, recomputed)
