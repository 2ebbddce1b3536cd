"""What a training on a number of tokens takes: days, GPU hours, money and energy."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fvflops.text import record_repr


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class TrainingCost:
    """A training of `steps` steps in `seconds` on `gpus` GPUs, without restarts, evaluation and checkpoints.

    `price` is that of a GPU hour in any currency, `watts` the power of a GPU; both are given, not estimated, and None
    where they are not. `cost` and `energy` follow from them.

    >>> cost = TrainingCost(tokens=1e12, seconds=10 * 86400, steps=250_000, gpus=1000, price=2.5, watts=700)
    >>> cost.days, cost.gpu_hours, cost.cost, cost.energy
    (10.0, 240000.0, 600000.0, 168000.0)
    """

    tokens: float
    seconds: float
    steps: float
    gpus: int
    price: float | None = None
    watts: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("tokens", self.tokens), ("price", self.price), ("watts", self.watts)):
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be a number above 0; got {value}")

    def __repr__(self) -> str:
        return record_repr(self)

    @property
    def days(self) -> float:
        """The time in days."""
        return self.seconds / 86_400

    @property
    def gpu_hours(self) -> float:
        """The time in hours, times the GPUs."""
        return self.seconds / 3600 * self.gpus

    @property
    def cost(self) -> float | None:
        """GPU hours times their price, None without one."""
        return None if self.price is None else self.gpu_hours * self.price

    @property
    def energy(self) -> float | None:
        """The energy of all GPUs in kWh, None without their power."""
        return None if self.watts is None else self.gpu_hours * self.watts / 1000
