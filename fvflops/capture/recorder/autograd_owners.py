"""The owners: which stack each node of autograd's graph was made under, so that its backward ops belong there."""

from __future__ import annotations

from threading import get_ident
from typing import Any

import torch

from fvflops.capture.recorder.signature import tensors_of
from fvflops.torch_internals import next_sequence_number


class _Numbers:
    """The numbers that one thread's counter gave: the next one, and number → stack and op, "" if it is not known."""

    __slots__ = ("given", "next")

    def __init__(self, next_number: int) -> None:
        self.next = next_number
        self.given: dict[int, tuple[int, str]] = {}


class NodeOwners:
    """Stacks by the sequence numbers of the nodes that were made under them.

    Autograd numbers its nodes as it makes them, and makes the node of an op before a dispatch mode sees that op; only
    the node of a write through a view comes after it. So all numbers given since the last look belong to the stack that
    is open now, and there is a look at each op and wherever the stack changes. Each thread has a counter of its own:
    of several nodes with one number the one counts that the op's name fits, and then the one of the thread from which
    the backward pass was called. `callers` are those threads, the innermost pass last.
    """

    def __init__(self) -> None:
        self.callers: list[int] = []
        self._threads = {get_ident(): _Numbers(next_sequence_number())}
        self._mark = object()
        self._has_marks = False

    def note(self, stack: int, op: str = "") -> None:
        """Note that the nodes made since the last look were made under a stack, the last of them for an op."""
        number = next_sequence_number()
        numbers = self._threads.get(get_ident())
        if numbers is None:
            # What this thread had counted before is not known, but an op's node is made just before the op is seen.
            at_op = bool(op) and torch.is_grad_enabled() and number > 0
            numbers = self._threads[get_ident()] = _Numbers(number - at_op)
        if number == numbers.next:
            return
        if number - 1 != numbers.next:
            numbers.given.update(dict.fromkeys(range(numbers.next, number - 1), (stack, "")))
        numbers.given[number - 1] = stack, op
        numbers.next = number

    def own_graph(self, results: Any, arguments: Any, stack: int) -> None:
        """Mark the nodes between nested arguments and results as made under a stack, those that are marked excepted.

        Threads that a model starts give the same numbers to nodes of the same ops, so that numbers do not tell.
        """
        self._has_marks = True
        seen = {tensor.grad_fn for tensor in tensors_of(arguments)}
        pending = [tensor.grad_fn for tensor in tensors_of(results)]
        while pending:
            node = pending.pop()
            metadata: Any = {} if node is None else node.metadata
            if node is None or node in seen or self._mark in metadata:
                continue
            seen.add(node)
            metadata[self._mark] = stack
            pending += [below for below, _ in node.next_functions]

    def forget_before(self, count: int) -> None:
        """Keep the owners of so many of the last nodes of each thread: graphs do not live for ever."""
        for numbers in self._threads.values():
            if len(numbers.given) > count:
                numbers.given = dict(list(numbers.given.items())[-count:])

    def stack_of(self, node: Any) -> int | None:
        """Return the stack under which a node was made, or None where no recording saw that."""
        if self._has_marks and self._mark in node.metadata:
            mark: int = node.metadata[self._mark]
            return mark
        number = node._sequence_nr()
        if len(self._threads) == 1:
            ((_, numbers),) = self._threads.items()
            given = numbers.given.get(number)
            return None if given is None else given[0]
        found = {thread: numbers.given[number] for thread, numbers in self._threads.items() if number in numbers.given}
        if len(found) > 1:
            name = node.name()
            found = {thread: given for thread, given in found.items() if _fits(given[1], name)} or found
        if not found:
            return None
        caller = self.callers[-1] if self.callers else None
        return found[caller][0] if caller in found else next(iter(found.values()))[0]


def _fits(op: str, node: str) -> bool:
    """Return whether an op can have made a node: `aten::add.Tensor` makes `AddBackward0`."""
    made = node.rstrip("0123456789")
    if not op or not made.endswith("Backward") or "::" in node:
        return True
    packet = op.partition("::")[2].partition(".")[0]
    return made.removesuffix("Backward").lower() == packet.replace("_", "").lower()
