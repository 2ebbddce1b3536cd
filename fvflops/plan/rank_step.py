"""A rank's training step as an order of actions, each a slice of a recorded Trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fvflops.text import short_repr, shown_by_fields
from fvflops.trace import Event, Signature, TensorSpec, Trace, Value

# A call that was not run: its signature, its phase, and its number of calls.
Call = tuple[Signature, str, int]


class Gradient(NamedTuple):
    """A gradient that replicas average: the name of its parameter in the rank's module tree, and the rank's part.

    `group` is the process group of the `replicas`. If they gather the parameter, `spec` is the parameter's.
    """

    parameter: str
    spec: TensorSpec
    group: Value
    replicas: int


@shown_by_fields
class Action(NamedTuple):
    """One action of a rank.

    Kinds, in the order in which a rank can do them: "unshard" gathers a stage's parameters (FSDP2); "forward" and
    "backward" are passes of a microbatch, of which zero-bubble schedules split the second into "input_backward" and
    "weight_backward"; "reduce" scatters a stage's gradients after the last microbatch (FSDP2 under a pipeline
    schedule), "reshard" frees its gathered parameters, "allreduce" averages its gradients (DistributedDataParallel),
    "reduce_scatter" averages a sharded optimizer's part of them, and "all_gather" gathers the parameters that its parts
    have updated in the step before; "tied_allreduce" sums the gradients of parameters that the first and the last stage
    share; then "optimizer".

    `stage` is the index of the pipeline stage in the model, 0 without pp and -1 for all stages of the rank (the
    optimizer's step). `microbatch` is -1 for actions of none.
    """

    kind: str
    stage: int = 0
    microbatch: int = -1


@dataclass(frozen=True, slots=True, repr=False)
class Pass:
    """The recording of an action: the events from `begin` up to `end` of a Trace.

    `added` are calls that were not run, such as DistributedDataParallel's all-reduce, and `gradients` the gradients
    that their collectives average, or the parameters that these gather.
    """

    trace: Trace
    begin: int
    end: int
    added: tuple[Call, ...] = ()
    gradients: tuple[Gradient, ...] = ()

    def __repr__(self) -> str:
        return short_repr(self, f"events {self.begin:,} to {self.end:,}")

    def count(self, kind: str) -> Counter[tuple[int, int, str]]:
        """Return (item, stack, phase) → number of its events of a kind, "op" or "exit", without `added`."""
        events: Sequence[Event] = self.trace.events or ()
        return Counter(
            (event.item, event.stack, event.phase)
            for event in events[self.begin : self.end]
            if event.kind == kind and not event.raised
        )


@dataclass(frozen=True, slots=True)
class StageLinks:
    """The hidden states of one microbatch that a stage receives and sends, None where it does not.

    Their gradients go the other way. `source` and `destination` are the pipeline ranks of the neighbouring stages; with
    the stage's own rank nothing is sent.
    """

    received: TensorSpec | None = None
    sent: TensorSpec | None = None
    source: int | None = None
    destination: int | None = None


@dataclass(frozen=True, slots=True, repr=False)
class RankStep:
    """One rank's training step.

    `coordinates` is axis → the rank's index, `schedule` the name of the pipeline schedule, "" without one. `passes` has
    a Pass for each of the `actions`; equal ones share it: microbatches between the first and the last are recorded
    once. `links` is stage → its links.
    """

    coordinates: Mapping[str, int]
    actions: tuple[Action, ...]
    passes: Mapping[Action, Pass]
    links: Mapping[int, StageLinks]
    schedule: str = ""

    def __repr__(self) -> str:
        return short_repr(self, self.schedule, f"{len(self.actions):,} actions")

    @property
    def stages(self) -> tuple[int, ...]:
        """The pipeline stages of the rank, in the model's order."""
        return tuple(self.links)

    @property
    def recorded_events(self) -> int:
        """The number of events of the recording up to the end of its last pass."""
        return max(item.end for item in self.passes.values())

    def pass_of(self, action: Action) -> Pass:
        """Return the recording of an action; one that is not in `actions` raises KeyError."""
        return self.passes[action]

    def count(self, kind: str) -> Counter[tuple[int, int, str]]:
        """Return (item, stack, phase) → number of events of a kind in the whole step, as `Pass.count`."""
        total: Counter[tuple[int, int, str]] = Counter()
        for item, times in self._repetitions():
            for key, count in item.count(kind).items():
                total[key] += times * count
        return total

    def added(self) -> list[Call]:
        """Return the calls of the whole step that were not run."""
        return [
            (call, phase, times * count) for item, times in self._repetitions() for call, phase, count in item.added
        ]

    def _repetitions(self) -> list[tuple[Pass, int]]:
        passes = {id(self.passes[action]): self.passes[action] for action in self.actions}
        times = Counter(id(self.passes[action]) for action in self.actions)
        return [(passes[key], count) for key, count in times.items()]


def share_equal(passes: Mapping[Action, Pass]) -> dict[Action, Pass]:
    """Return the passes with one object for equal slices of a Trace."""
    shared: dict[tuple[int, int, tuple[Call, ...], tuple[Gradient, ...]], Pass] = {}
    return {
        action: shared.setdefault((item.begin, item.end, item.added, item.gradients), item)
        for action, item in passes.items()
    }
