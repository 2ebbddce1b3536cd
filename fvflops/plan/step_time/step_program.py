"""The programs of all ranks of a planned step, as plain data, and their simulation on a device and a network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from fvflops.plan.communication import collective_of
from fvflops.plan.rank_plan import RankPlan
from fvflops.plan.rank_step import Action, Gradient, RankStep
from fvflops.plan.sharding.replicas import AVERAGING, GATHERING, calls_of
from fvflops.plan.step_time.buckets import check_bucket_cap, gather_buckets, overlap_buckets
from fvflops.plan.step_time.calibration import KernelTimer, Network
from fvflops.plan.step_time.pass_program import Collective, Item, Program, Wait, read_program
from fvflops.plan.step_time.schedule_simulation import Simulation, simulate, time_program
from fvflops.trace.process_group import ProcessGroupSpec

# A collective, its payload in bytes, and its group.
Message = tuple[str, int, ProcessGroupSpec]


@dataclass(frozen=True, slots=True)
class StepProgram:
    """The actions of each rank of a pipeline, in order, each with the index of its program in `programs`.

    `places` is stage → the rank that has it, `sent` is stage → bytes of the hidden state of one microbatch. With
    `scattered`, a tensor-parallel group, each of its ranks sends a share of them, which the receivers gather, as
    Megatron-LM and DeepSpeed do. Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM" (2021), section 4.1.
    """

    ranks: tuple[tuple[tuple[Action, int], ...], ...]
    programs: tuple[Program, ...]
    places: Mapping[int, int]
    sent: Mapping[int, int]
    scattered: ProcessGroupSpec | None = None

    def simulate(
        self, timer: KernelTimer, network: Network | None, *, host_waits: bool = False, log: bool = False
    ) -> Simulation:
        """Return when each rank runs its actions; ranks that communicate without a network raise ValueError."""
        timed = [time_program(program, timer, network) for program in self.programs]
        ranks = [[(action, timed[index]) for action, index in actions] for actions in self.ranks]

        def transfer(sender: int, receiver: int) -> float:
            messages = self.messages(sender, receiver)
            if not messages:
                return 0.0
            if network is None:
                raise ValueError("pipeline stages send hidden states over a network: pass network= (--network)")
            return sum(network.seconds(*message) for message in messages)

        return simulate(ranks, transfer, stages=1 + max(self.places), host_waits=host_waits, log=log)

    def with_groups(self, groups: Mapping[str, ProcessGroupSpec], places: Mapping[int, int]) -> StepProgram:
        """Return the step with other process groups by mesh axis, and other ranks of its stages."""
        programs = tuple(replace(program, items=_with_groups(program.items, groups)) for program in self.programs)
        return replace(self, programs=programs, places=places)

    def count(self, kind: Literal["unknown", "bytes_only"]) -> Counter[str]:
        """Return op → calls for the ops of a field of Program, in the steps of all ranks."""
        total: Counter[str] = Counter()
        for index, times in Counter(index for actions in self.ranks for _, index in actions).items():
            total.update({op: calls * times for op, calls in getattr(self.programs[index], kind).items()})
        return total

    def messages(self, sender: int, receiver: int) -> tuple[Message, ...]:
        """Return the transfers of a hidden state or its gradient to a neighbouring stage: none on the same rank."""
        first, last = sorted((self.places[sender], self.places[receiver]))
        if first == last:
            return ()
        nbytes, link = self.sent[min(sender, receiver)], ProcessGroupSpec("", 2, "pp", first, last - first)
        if self.scattered is None:
            return (("send", nbytes, link),)
        return ("send", -(-nbytes // self.scattered.size), link), ("all_gather", nbytes, self.scattered)


def _with_groups(items: Sequence[Item], groups: Mapping[str, ProcessGroupSpec]) -> tuple[Item, ...]:
    def change(item: Item) -> Item:
        if isinstance(item, Collective) and item.call.group is not None and item.call.group.axis in groups:
            return item._replace(call=item.call._replace(group=groups[item.call.group.axis]))
        if isinstance(item, Wait) and item.group is not None and item.group.axis in groups:
            return item._replace(group=groups[item.group.axis])
        return item

    return tuple(map(change, items))


def read_step(
    ranks: Sequence[RankPlan], *, fused: Collection[str] = (), bucket_cap_mb: float | None = None
) -> StepProgram:
    """Return the programs of the ranks of a pipeline; `fused` as in `read_program`.

    Replicas average buckets of gradients of `bucket_cap_mb` MiB during each stage's last backward pass, as
    `assign_buckets` divides them, and gather a sharded optimizer's parameters during its first forward pass; with 0
    they reduce after the backward and gather before the forward pass. Another value below 0 raises ValueError.
    """
    check_bucket_cap(bucket_cap_mb)
    programs: list[Program] = []
    numbers: dict[tuple[Any, ...], int] = {}
    orders = []
    for plan in ranks:
        order = []
        overlapped = {} if bucket_cap_mb == 0 else _find_overlapped(plan.step)
        for action in plan.step.actions:
            recorded, (kind, gradients) = plan.step.pass_of(action), overlapped.get(action, ("", ()))
            if recorded.gradients and bucket_cap_mb != 0:
                in_buckets = set(calls_of(action.kind, recorded.gradients))
                added = tuple(call for call in recorded.added if call not in in_buckets)
                recorded = replace(recorded, added=added)
            # Ranks with equal stages have traces of their own, which differ in the names of groups only.
            key = id(recorded.trace.events), recorded.begin, recorded.end, recorded.added, kind, gradients
            if key not in numbers:
                numbers[key] = len(programs)
                arguments = _overlap(plan.step, action, kind, gradients, bucket_cap_mb) if kind else {}
                program = read_program(
                    *(recorded.trace, recorded.begin, recorded.end), fused=fused, added=recorded.added, **arguments
                )
                programs.append(program)
            order.append((action, numbers[key]))
        orders.append(tuple(order))
    places = {stage: plan.rank for plan in ranks for stage in plan.step.stages}
    links = {stage: links.sent for plan in ranks for stage, links in plan.step.links.items()}
    sent = {stage: 0 if hidden is None else hidden.nbytes for stage, hidden in links.items()}
    return StepProgram(tuple(orders), tuple(programs), places, sent)


def _find_overlapped(step: RankStep) -> dict[Action, tuple[str, tuple[Gradient, ...]]]:
    """Return actions during which replicas communicate → the kind of that communication, and its gradients.

    These are the last backward pass of each stage, and with a sharded optimizer its gathering, which begins when a
    stage before it begins, and its first forward pass, which waits for that.
    """
    last = {action.stage: action for action in step.actions if action.kind in ("backward", "weight_backward")}
    first = _first_passes(step)
    found = {}
    for action in step.actions:
        gradients = step.pass_of(action).gradients
        if action.kind == GATHERING:
            found[action] = found[first[action.stage]] = action.kind, gradients
        elif action.kind in AVERAGING:
            found[last[action.stage]] = action.kind, gradients
    return found


def _first_passes(step: RankStep) -> dict[int, Action]:
    return {action.stage: action for action in reversed(step.actions) if action.kind == "forward"}


def _overlap(
    step: RankStep, action: Action, kind: str, gradients: tuple[Gradient, ...], bucket_cap_mb: float | None
) -> dict[str, Any]:
    """Return the arguments of `read_program` for an action during which replicas communicate."""
    if kind != GATHERING:
        calls = overlap_buckets(step.pass_of(action), kind, gradients, bucket_cap_mb)
        # DDP waits at the end of the pass, Megatron-Core before the optimizer's step.
        return {"overlapped": calls, "waits": kind == "allreduce"}
    calls = gather_buckets(step.pass_of(_first_passes(step)[action.stage]), gradients, bucket_cap_mb)
    ordered = [(position, call) for position, needed in sorted(calls.items()) for call in needed]
    if action.kind == GATHERING:
        return {"overlapped": {0: [call for _, call in ordered]}, "waits": False}
    awaited: dict[int, list[Wait]] = {}
    for number, (position, (signature, _, _)) in enumerate(ordered):
        awaited.setdefault(position, []).append(Wait(number, collective_of(signature).group))  # type: ignore[union-attr]
    return {"awaited": awaited}
