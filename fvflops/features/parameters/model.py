"""Parameters of a module, and how many of them are active for a token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """The elements of one parameter, or of all parameters of a module; a tied parameter counts once.

    `total` are all, `trainable` those that require a gradient, `buffers` the elements of buffers, which `total` lacks.
    The others need a run, and are None without one: `active` are the elements used for an average token, `looked_up`
    those among them in embedding tables, which multiply nothing (the whole table is active), and `unused` those of
    parameters that no op read.

    >>> ParameterCount(total=10, trainable=4).frozen
    6
    """

    total: int = 0
    trainable: int = 0
    active: int | None = None
    looked_up: int | None = None
    unused: int | None = None
    buffers: int = 0

    @property
    def frozen(self) -> int:
        """The elements that require no gradient."""
        return self.total - self.trainable
