"""The actions of many steps in rounds of independent actions, so that arrays can run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from fvflops.plan.rank_step import Action


class Round(NamedTuple):
    """Actions by index: the rank, its program, whose end it waits for, its transfer, and its own number.

    Number 0 is an action that has ended before the step.
    """

    ranks: np.ndarray
    programs: np.ndarray
    sources: np.ndarray
    transfers: np.ndarray
    numbers: np.ndarray


class Rounds:
    """The ranks of all steps; `first` is the index of each step's first rank."""

    def __init__(self) -> None:
        self.ranks = 0
        self.actions = 0
        self.first: list[int] = []
        self._by_round: list[list[tuple[int, int, int, int, int]]] = []

    def add(
        self, ranks: Sequence[Sequence[tuple[Action, int]]], transfer: Callable[[int, int], int], *, stages: int
    ) -> None:
        """Add the actions of each rank of a step, with their programs; `transfer` is sender and receiver → index."""
        self.first.append(self.ranks)
        ended: dict[tuple[str, int, int], tuple[int, int]] = {}  # → number and round
        done, latest = [0] * len(ranks), [-1] * len(ranks)
        progress = True
        while progress:
            progress = False
            for rank, actions in enumerate(ranks):
                while done[rank] < len(actions):
                    action, program = actions[done[rank]]
                    source, key, receiver = _neighbours(action, stages)
                    if source is not None and source not in ended:
                        break
                    number, after = (0, -1) if source is None else ended[source]
                    latest[rank] = 1 + max(latest[rank], after)
                    self.actions += 1
                    sent = 0 if receiver is None else transfer(action.stage, receiver)
                    self._put(latest[rank], (self.ranks + rank, program, number, sent, self.actions))
                    ended[key] = self.actions, latest[rank]
                    done[rank] += 1
                    progress = True
        assert done == [len(actions) for actions in ranks], "ranks wait for each other"
        self.ranks += len(ranks)

    def _put(self, number: int, action: tuple[int, int, int, int, int]) -> None:
        while len(self._by_round) <= number:
            self._by_round.append([])
        self._by_round[number].append(action)

    def in_order(self) -> list[Round]:
        return [Round(*np.array(actions).T) for actions in self._by_round]


def _neighbours(action: Action, stages: int) -> tuple[tuple[str, int, int] | None, tuple[str, int, int], int | None]:
    """Return the pass that an action waits for, the one that it is, and the stage that it sends to."""
    kind, stage, microbatch = action
    if kind == "forward":
        source = ("forward", stage - 1, microbatch) if stage > 0 else None
        return source, ("forward", stage, microbatch), stage + 1 if stage < stages - 1 else None
    if kind in ("backward", "input_backward"):
        source = ("backward", stage + 1, microbatch) if stage < stages - 1 else None
        return source, ("backward", stage, microbatch), stage - 1 if stage > 0 else None
    return None, (kind, stage, microbatch), None
