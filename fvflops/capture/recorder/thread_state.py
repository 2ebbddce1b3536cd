"""Recording state of each thread; autograd runs backward passes in its own threads."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from fvflops.capture.attention import Pairs
from fvflops.capture.instrument.probe import StartMark
from fvflops.trace import Value


class OpenRegion(NamedTuple):
    """An open region: the stack to restore, the stack of its call, input specs, current autograd node, readings."""

    region: int
    outer: int
    base: int
    inputs: tuple[Value, ...]
    node: Any
    start: StartMark | None


class OptimizerStep(Protocol):
    """A running optimizer step."""

    optimizer: Any

    def is_running(self) -> bool:
        """Return whether the step is still running."""

    def refresh(self) -> None:
        """Update the storages of each parameter group."""

    def stack_of(self, reads: Any) -> int:
        """Return the stack of an op of the step by the storages it reads."""


class ThreadState:
    """Recording state of one thread.

    `thread_number` is 0 for the thread that starts the recording. `stack` is the current stack, `opened` are the open
    regions that this thread entered. `rerun_node` is the node whose backward reruns a checkpointed forward; `reruns`
    counts the open reruns while a saved tensor is unpacked. `attention` are the pairs of the masked attention that is
    running, `active_optimizers` the running optimizer steps.
    """

    def __init__(self, thread_number: int) -> None:
        self.thread_number = thread_number
        self.stack = 0
        self.opened: list[OpenRegion] = []
        self.reruns = 0
        self.rerun_node: Any = None
        self.attention: Pairs | None = None
        self.active_optimizers: list[OptimizerStep] = []

    def has_entered_during(self, node: Any) -> bool:
        """Return whether the innermost open region was entered during a node's backward."""
        return bool(self.opened) and self.opened[-1].node is node

    def drop_ended_steps(self) -> None:
        """Discard optimizer steps that raised: torch does not report their end."""
        while self.active_optimizers and not self.active_optimizers[-1].is_running():
            self.active_optimizers.pop()
