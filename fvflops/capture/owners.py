"""The owners: which stack each node of autograd's graph was made under, so that its backward ops belong there."""

from __future__ import annotations

from typing import Any

import torch


class Owners:
    """Stacks by the sequence numbers of the nodes that were made under them.

    Autograd numbers its nodes as it makes them, with a counter for each thread, and makes the node of an op before a
    dispatch mode sees that op; only the node of a write through a view comes after it. So all numbers given since the
    last look belong to the stack that is open now, and there is a look at each op and wherever the stack changes.
    """

    def __init__(self) -> None:
        self._stacks: dict[int, int] = {}
        self._next = _next_number()

    def look(self, stack: int) -> None:
        """Note that the nodes made since the last look were made under a stack."""
        number = _next_number()
        if number != self._next:
            self._stacks.update(dict.fromkeys(range(self._next, number), stack))
            self._next = number

    def of(self, node: Any) -> int | None:
        """Return the stack under which a node was made, or None where no recording saw that."""
        return self._stacks.get(node._sequence_nr())


def _next_number() -> int:
    return int(torch.autograd._get_sequence_nr())
