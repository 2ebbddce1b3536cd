"""The cost: what a formula returns for one call."""

from __future__ import annotations

from dataclasses import dataclass


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
