"""Recording state of each thread; autograd runs backward passes in its own threads."""

from __future__ import annotations

from operator import iadd
from typing import Any, NamedTuple

import torch

from fvflops.capture.decomposed_attention import Pairs
from fvflops.capture.instrument.probe import StartMark
from fvflops.torch_internals import next_sequence_number
from fvflops.trace import Value


def append_row(rows: list[Any], row: Any) -> int:
    """Append a row and return its index, which no other thread gets.

    It holds no lock, which a signal could leave held: in one call of C, no other thread and no signal comes between.

    >>> append_row(["first"], "second")
    1
    """
    return next(map(len, map(iadd, (rows,), ((row,),)))) - 1


class OpenRegion(NamedTuple):
    """An open region: the stack to restore, the stack of its call, input specs, current autograd node, readings."""

    region: int
    outer: int
    base: int
    inputs: tuple[Value, ...]
    node: Any
    start: StartMark | None


class ThreadState:
    """Recording state of one thread.

    `thread_number` is 0 for the thread that starts the recording. `stack` is the current stack, `opened` are the open
    regions that this thread entered. `rerun_node` is the node whose backward reruns a checkpointed forward; `reruns`
    counts the open reruns while a saved tensor is unpacked. `attention` are the pairs of the masked attention that is
    running, `active_optimizers` the running optimizer steps. `node_owners` maps the sequence numbers of the autograd
    nodes that this thread created to their stack and op, "" if unknown.

    Autograd numbers nodes in the order of their creation, just before the op is dispatched (for a write through a view,
    just after). `assign_nodes` is called at each op and whenever the stack changes, so all numbers since its previous
    call belong to the current stack.
    """

    def __init__(self, thread_number: int) -> None:
        self.thread_number = thread_number
        self.stack = 0
        self.opened: list[OpenRegion] = []
        self.reruns = 0
        self.rerun_node: Any = None
        self.attention: Pairs | None = None
        self.active_optimizers: list[Any] = []  # OptimizerStep of `instrument`, which imports this
        self.next_node = -1  # sequence number of the thread's next node, -1 before the first call of `assign_nodes`
        self.node_owners: dict[int, tuple[int, str]] = {}

    def assign_nodes(self, stack: int, op: str = "") -> None:
        """Attribute the nodes created since the previous call of this method to `stack`, and the newest one to `op`."""
        number = next_sequence_number()
        first = self.next_node
        if first < 0:
            # The owners of this thread's earlier nodes are unknown, but the op's node has just been created.
            first = number - (bool(op) and torch.is_grad_enabled() and number > 0)
        if number != first:
            if number - 1 != first:
                self.node_owners.update(dict.fromkeys(range(first, number - 1), (stack, "")))
            self.node_owners[number - 1] = stack, op
        self.next_node = number

    def drop_ended_steps(self) -> None:
        """Discard optimizer steps that raised: torch does not report their end."""
        while self.active_optimizers and not self.active_optimizers[-1].is_running():
            self.active_optimizers.pop()
