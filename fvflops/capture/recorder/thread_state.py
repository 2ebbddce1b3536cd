"""The strand: what one thread of a run is at, while autograd may go on in another."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from fvflops.capture.instrument.probe import StartMark
from fvflops.trace import Value


class OpenRegion(NamedTuple):
    """A region that is being run.

    The stacks to go back to and to file it under, what went in, autograd's node, and what the meter read.
    """

    region: int
    outer: int
    base: int
    inputs: tuple[Value, ...]
    node: Any
    begun: StartMark | None


class OptimizerStep(Protocol):
    """An optimizer's step that goes on."""

    optimizer: Any

    def is_running(self) -> bool:
        """Return whether the step is still being made."""

    def refresh(self) -> None:
        """Note what each parameter group works with, as it is now."""

    def stack_of(self, reads: Any) -> int:
        """Return the stack of an op of the step that reads these storages."""


class ThreadState:
    """The place of one thread in a run.

    `thread_number` is 0 for the thread that is recorded, `stack` the stack that is open, `opened` the regions in it
    that this thread has entered, `rerun` the node in whose backward a checkpointed forward runs again, `reruns` how
    many do so while a saved tensor is unpacked, `steps` the optimizers' steps.
    """

    def __init__(self, thread_number: int) -> None:
        self.thread_number = thread_number
        self.stack = 0
        self.opened: list[OpenRegion] = []
        self.reruns = 0
        self.rerun: Any = None
        self.active_optimizers: list[OptimizerStep] = []

    def has_opened_for(self, node: Any) -> bool:
        """Return whether the region that is open was entered while a node's backward ran."""
        return bool(self.opened) and self.opened[-1].node is node

    def drop_ended_steps(self) -> None:
        """Forget the optimizers' steps that raised, and so told nobody of their end."""
        while self.active_optimizers and not self.active_optimizers[-1].is_running():
            self.active_optimizers.pop()
