"""Process group of a collective, as plain data."""

from __future__ import annotations

import json
from dataclasses import dataclass

from fvflops.trace.spec import Symbol, Value

_KIND = "process_group"


@dataclass(frozen=True, slots=True)
class ProcessGroupSpec:
    """A process group from the perspective of one of its ranks.

    `name` is torch's name for it, which differs from rank to rank; `axis` is the name of its device mesh dimension, or
    "". Its `size` ranks are `first`, `first + step` and so on; `step` is None where they are not evenly spaced, and 0
    for a single rank.

    >>> ProcessGroupSpec.of(ProcessGroupSpec("5", 8, "tp", 0, 1).symbol()).size
    8
    """

    name: str
    size: int
    axis: str = ""
    first: int = 0
    step: int | None = None

    def symbol(self) -> Symbol:
        """Return the value that represents the group among an op's arguments."""
        return Symbol(_KIND, json.dumps([self.name, self.size, self.axis, self.first, self.step]))

    @staticmethod
    def of(value: Value) -> ProcessGroupSpec | None:
        if not isinstance(value, Symbol) or value.kind != _KIND:
            return None
        return ProcessGroupSpec(*json.loads(value.name))

    def __str__(self) -> str:
        return f"{self.axis or self.name}={self.size}"
