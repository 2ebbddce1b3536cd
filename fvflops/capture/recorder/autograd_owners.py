"""Map autograd nodes to the region stack (modules and functions) in which they were created.

Its innermost module owns the backward ops of the node.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any

import torch

from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.torch_internals import next_sequence_number


class _ThreadNodes:
    """One thread's autograd nodes: the next sequence number, and number → (stack, op), with op "" if unknown."""

    __slots__ = ("next_number", "owners")

    def __init__(self, next_number: int) -> None:
        self.next_number = next_number
        self.owners: dict[int, tuple[int, str]] = {}


class NodeOwners:
    """The region stack in which each autograd node was created, by the node's sequence number.

    A stack is given by its index in the Trace.

    Autograd numbers nodes in the order of their creation, just before the op is dispatched (for a write through a view,
    just after). `assign_new` is called at each op and whenever the stack changes, so all numbers since its previous
    call belong to the current stack. Each thread counts from 0, so that nodes of several threads can have one number:
    the owner is then an op that fits the node's name, preferably in the thread that called the backward pass.
    `calling_threads` are the threads that are calling backward passes, the innermost last.
    """

    def __init__(self) -> None:
        self.calling_threads: list[int] = []
        self._threads = {get_ident(): _ThreadNodes(next_sequence_number())}
        self._mark = object()
        self._has_marks = False

    def assign_new(self, stack: int, op: str = "") -> None:
        """Attribute the nodes created since the previous call of this method to `stack`, and the newest one to `op`."""
        number = next_sequence_number()
        nodes = self._threads.get(get_ident())
        if nodes is None:
            # The owners of this thread's earlier nodes are unknown, but the op's node has just been created.
            has_node = bool(op) and torch.is_grad_enabled() and number > 0
            nodes = self._threads[get_ident()] = _ThreadNodes(number - has_node)
        if number == nodes.next_number:
            return
        if number - 1 != nodes.next_number:
            nodes.owners.update(dict.fromkeys(range(nodes.next_number, number - 1), (stack, "")))
        nodes.owners[number - 1] = stack, op
        nodes.next_number = number

    def assign_last(self, stack: int) -> None:
        """Attribute new nodes to `stack`, as `assign_new` does, and the newest one even if it is attributed already."""
        self.assign_new(stack)
        nodes = self._threads[get_ident()]
        nodes.owners[nodes.next_number - 1] = stack, ""

    def assign_graph(self, results: Any, arguments: Any, stack: int) -> None:
        """Attribute to `stack` the nodes between the tensors in `arguments` and those in `results`.

        Nodes that an earlier call attributed are left as they are. Needed in threads that the model starts, where nodes
        of equal ops can have equal numbers.
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
            pending += [inner for inner, _ in node.next_functions]

    def keep_last(self, count: int) -> None:
        """Discard all but the last `count` nodes of each thread: graphs are short-lived."""
        for nodes in self._threads.values():
            if len(nodes.owners) > count:
                nodes.owners = dict(list(nodes.owners.items())[-count:])

    def stack_of(self, node: Any) -> int | None:
        """Return the stack in which a node was created, or None if that was not recorded."""
        if self._has_marks and self._mark in node.metadata:
            mark: int = node.metadata[self._mark]
            return mark
        number = node._sequence_nr()
        if len(self._threads) == 1:
            ((_, nodes),) = self._threads.items()
            owner = nodes.owners.get(number)
            return None if owner is None else owner[0]
        owners = {thread: nodes.owners[number] for thread, nodes in self._threads.items() if number in nodes.owners}
        if len(owners) > 1:
            name = node.name()
            owners = {thread: owner for thread, owner in owners.items() if _can_create(owner[1], name)} or owners
        if not owners:
            return None
        caller = self.calling_threads[-1] if self.calling_threads else None
        return owners[caller][0] if caller in owners else next(iter(owners.values()))[0]


def _can_create(op: str, node: str) -> bool:
    """Return whether an op can have created a node: `aten::add.Tensor` creates `AddBackward0`."""
    node_class = node.rstrip("0123456789")
    if not op or not node_class.endswith("Backward") or "::" in node:
        return True
    packet = op.partition("::")[2].partition(".")[0]
    return node_class.removesuffix("Backward").lower() == packet.replace("_", "").lower()
