"""Map autograd nodes to the stack under which they were created, the owner of their backward ops."""

from __future__ import annotations

from threading import get_ident
from typing import Any

import torch

from fvflops.capture.recorder.signature import tensors_of
from fvflops.torch_internals import next_sequence_number


class _Numbers:
    """Sequence numbers of one thread: the next one, and number → (stack, op), op "" if unknown."""

    __slots__ = ("given", "next")

    def __init__(self, next_number: int) -> None:
        self.next = next_number
        self.given: dict[int, tuple[int, str]] = {}


class NodeOwners:
    """Stacks by the sequence numbers of the autograd nodes created under them.

    Autograd numbers nodes as it creates them. An op's node is created before a dispatch mode sees the op, except that
    of a write through a view, which comes after. So all numbers since the last `note` belong to the open stack; `note`
    is called at each op and wherever the stack changes. Each thread has its own counter: among nodes of one number,
    the one whose op fits the node's name wins, then that of the thread that called the backward pass. `callers` are
    these threads, the innermost pass last.
    """

    def __init__(self) -> None:
        self.callers: list[int] = []
        self._threads = {get_ident(): _Numbers(next_sequence_number())}
        self._mark = object()
        self._has_marks = False

    def note(self, stack: int, op: str = "") -> None:
        """Assign the nodes created since the last call to a stack, the last of them to an op."""
        number = next_sequence_number()
        numbers = self._threads.get(get_ident())
        if numbers is None:
            # This thread's count so far is unknown, but an op's node is created just before the op is dispatched.
            at_op = bool(op) and torch.is_grad_enabled() and number > 0
            numbers = self._threads[get_ident()] = _Numbers(number - at_op)
        if number == numbers.next:
            return
        if number - 1 != numbers.next:
            numbers.given.update(dict.fromkeys(range(numbers.next, number - 1), (stack, "")))
        numbers.given[number - 1] = stack, op
        numbers.next = number

    def assign_last(self, stack: int) -> None:
        """Assign the node created last to a stack."""
        self.note(stack)
        numbers = self._threads[get_ident()]
        numbers.given[numbers.next - 1] = stack, ""

    def assign_graph(self, results: Any, arguments: Any, stack: int) -> None:
        """Assign the nodes between nested arguments and results to a stack, except those that have one.

        Needed in threads of the model: they give equal numbers to nodes of equal ops.
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
        """Keep only the last `count` nodes of each thread: graphs are short-lived."""
        for numbers in self._threads.values():
            if len(numbers.given) > count:
                numbers.given = dict(list(numbers.given.items())[-count:])

    def stack_of(self, node: Any) -> int | None:
        """Return the stack under which a node was created, or None if that was not recorded."""
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
    """Return whether an op can have created a node: `aten::add.Tensor` creates `AddBackward0`."""
    made = node.rstrip("0123456789")
    if not op or not made.endswith("Backward") or "::" in node:
        return True
    packet = op.partition("::")[2].partition(".")[0]
    return made.removesuffix("Backward").lower() == packet.replace("_", "").lower()
