"""The parameter count: what a module holds in parameters, and how much of it works on a token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """The elements of one parameter, or of all parameters of a module; a tied parameter counts once.

    `total` are all, `trainable` those that want a gradient, `buffers` the elements of buffers, which are not among the
    total. The others are what a run told, and None where there was none: `active` are the elements that work on an
    average token, `looked_up` those among them that are rows of tables and multiply nothing (an embedding; the whole
    table is active), and `unused` those of parameters that no op read.

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
        """The elements that want no gradient."""
        return self.total - self.trainable
