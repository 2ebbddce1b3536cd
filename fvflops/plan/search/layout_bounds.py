"""Lower bounds for the time and the memory of layouts, from one recording for each sharding of the layers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fvflops.plan.rank_plan import RankPlan
from fvflops.plan.rank_step import Action
from fvflops.plan.search.candidates import Candidate
from fvflops.plan.step_time.efficiency import KernelTimer
from fvflops.plan.step_time.network import Network
from fvflops.plan.step_time.pass_program import Collective
from fvflops.plan.step_time.step_program import StepProgram, read_step
from fvflops.trace.process_group import ProcessGroupSpec

# Kinds of memory that a rank has as many bytes of, divided by the number of ranks that share them.
_STATES = ("parameter", "gradient", "optimizer state")


class Sharding(NamedTuple):
    """What decides how a rank computes a microbatch: layouts with equal ones share a recording."""

    tp: int
    cp: int
    ep: int
    micro_batch: int
    checkpoint: str
    sequence_parallel: bool = False

    @classmethod
    def of(cls, candidate: Candidate) -> Sharding:
        """Return the sharding of a layout.

        >>> Sharding.of(Candidate({"pp": 4, "fsdp": 8, "tp": 2}, 1, 16, "1f1b", "full"))
        Sharding(tp=2, cp=1, ep=1, micro_batch=1, checkpoint='full', sequence_parallel=False)
        """
        tp, cp, ep = (candidate.size(axis) for axis in ("tp", "cp", "ep"))
        return cls(tp, cp, ep, candidate.micro_batch, candidate.checkpoint, candidate.sequence_parallel)

    def candidate(self, gpus: int) -> Candidate:
        """Return a layout with this sharding without pipeline stages, with as many shards as some GPUs can have."""
        shards = max(2, gpus // (self.tp * self.cp))
        axes = {"fsdp": shards, "cp": self.cp, "tp": self.tp, "ep": self.ep}
        return Candidate(
            *({axis: size for axis, size in axes.items() if size > 1}, self.micro_batch, 1),
            checkpoint=self.checkpoint,
            reshard=False,  # the fewest kernels
            sequence_parallel=self.sequence_parallel,
        )


@dataclass(frozen=True, slots=True)
class MicrobatchCost:
    """What a microbatch costs a rank that has all layers.

    `seconds` is the time of its passes without FSDP2's collectives, `gathered` and `reduced` the bytes of parameters
    and gradients that these send in each of its passes. `states` are the bytes of parameters, gradients and optimizer
    state over all ranks that share them, `kept` those of activations that the forward pass of a layer leaves, at least.
    `settings` are those of the plan.
    """

    seconds: float
    gathered: int
    reduced: int
    states: int
    kept: float
    settings: Mapping[str, Any] = field(default_factory=dict)


def measure_microbatch(
    plan: RankPlan,
    timer: KernelTimer,
    network: Network | None,
    in_layers: Callable[[str], bool],
    layers: int,
    fused: Collection[str] = (),
) -> MicrobatchCost:
    """Return what a microbatch costs, from the plan of a layout of `Sharding.candidate`.

    `in_layers` says of a module's name whether it is in one of the `layers`; 0 of them keep nothing that is known.
    `fused` is that of `estimate_step`.
    """
    shared = plan.mesh.get("fsdp", 1) * plan.mesh.get("cp", 1)
    program = read_step([plan], fused=fused)
    axis = next(name for name in _axes_of(program) if "fsdp" in name.split("+"))
    alone = _without_optimizer(program).with_groups({axis: ProcessGroupSpec("", 1, axis, 0, 1)}, program.places)
    payloads = _payloads(program, axis)
    timeline = plan.memory(granularity=1)
    forward = plan.step.pass_of(Action("forward", 0, 0))
    length = forward.end - forward.begin  # the step's first events
    at_end = timeline.at(len(timeline.trace.events or ()) - 1).by_kind
    states = sum(at_end[kind] for kind in _STATES)
    kept = 0
    if layers:
        kept = sum(
            block.nbytes
            for block in timeline.blocks
            if block.kind == "activation"
            and in_layers(block.module)
            and 0 <= block.begin < length
            and (block.end is None or block.end >= length)
        )
    return MicrobatchCost(
        alone.simulate(timer, network).seconds,
        payloads["all_gather"],
        payloads["reduce_scatter"],
        states * shared,
        kept / layers if layers else 0.0,
        plan.settings,
    )


def _axes_of(program: StepProgram) -> list[str]:
    return [item.call.group.axis for item in _collectives(program) if item.call.group is not None]


def _collectives(program: StepProgram) -> list[Collective]:
    return [item for part in program.programs for item in part.items if isinstance(item, Collective)]


def _payloads(program: StepProgram, axis: str) -> Counter[str]:
    """Return collective → its bytes along an axis, of distinct payloads: FSDP2 may gather parameters twice."""
    payloads: Counter[str] = Counter()
    for part in program.programs:
        once: Counter[str] = Counter()
        for item in part.items:
            if isinstance(item, Collective) and item.call.group is not None and item.call.group.axis == axis:
                once[item.call.collective] += item.call.payload
        for name, payload in once.items():
            payloads[name] = max(payloads[name], payload)
    return payloads


def _without_optimizer(program: StepProgram) -> StepProgram:
    ranks = tuple(tuple(item for item in actions if item[0].kind != "optimizer") for actions in program.ranks)
    return StepProgram(ranks, program.programs, program.places, program.sent)


def least_seconds(candidate: Candidate, cost: MicrobatchCost, network: Network | None) -> float:
    """Return a time that no step of a layout is below: with equal stages, and with all communication of FSDP2 hidden.

    The passes of microbatches and the least bubble of the schedule, or the collectives of FSDP2, which follow each
    other.
    """
    stages = candidate.size("pp")
    each = cost.seconds / stages
    bubble = 0.0 if candidate.schedule in ("zero-bubble", "zbv", "dualpipev") else (stages - 1) * each
    passes = candidate.microbatches * each + bubble / candidate.stages_per_rank
    return max(passes, _collective_seconds(candidate, cost, network))


def _collective_seconds(candidate: Candidate, cost: MicrobatchCost, network: Network | None) -> float:
    shards = candidate.size("fsdp") * candidate.size("cp")
    if network is None or candidate.size("fsdp") == 1:
        return 0.0
    group = ProcessGroupSpec("", shards, "fsdp", 0, candidate.size("tp"))
    stages = candidate.size("pp")
    gather = network.seconds("all_gather", cost.gathered // stages, group)
    reduce = network.seconds("reduce_scatter", cost.reduced // stages, group)
    if stages > 1:
        return gather + reduce
    return candidate.microbatches * (gather * (2 if candidate.reshard else 1) + reduce)


def least_peak(candidate: Candidate, cost: MicrobatchCost, layers: int) -> int:
    """Return bytes that the fullest rank of a layout needs at least: its states, and activations of its layers."""
    shards = candidate.size("fsdp") * candidate.size("cp") if candidate.size("fsdp") > 1 else 1
    stages = candidate.size("pp")
    return math.floor(cost.states / (stages * shards) + cost.kept * _layers_in_flight(candidate, layers))


def _layers_in_flight(candidate: Candidate, layers: int) -> float:
    """Return the layers of microbatches whose activations the first pipeline rank has at once, at least."""
    ranks, per_rank = candidate.size("pp"), candidate.stages_per_rank
    in_stage = layers // (ranks * per_rank)
    passes = candidate.microbatches * per_rank
    if candidate.schedule == "interleaved":
        return in_stage * min(passes, 2 * (ranks - 1) + (per_rank - 1) * ranks + 1)
    return in_stage * (min(passes, ranks) if candidate.schedule == "1f1b" else 1)
