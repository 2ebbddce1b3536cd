"""Order of actions of each pipeline rank, by the schedules of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from fvflops.plan.rank_step import Action
from fvflops.text import suggest

# torch's computation type → kind of action.
_KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "input_backward",
    "W": "weight_backward",
    "UNSHARD": "unshard",
    "RESHARD": "reshard",
    "REDUCE_GRAD": "reduce",
}


class ScheduleError(ValueError):
    """A schedule that does not exist, does not support some numbers, or in which ranks wait for each other."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """A pipeline schedule: its class in torch.distributed.pipelining, and how it places stages on ranks.

    With `style` "loop", stage s is on rank s modulo ranks; with "v", the second half of the stages runs back from the
    last rank to the first, which has the first and the last stage. `stages_per_rank` is the required number, 0 for any.
    A schedule that `splits_backward` computes gradients of inputs and of weights in separate actions.
    """

    torch_class: str
    description: str
    style: Literal["loop", "v"] = "loop"
    stages_per_rank: int = 0
    splits_backward: bool = False


SCHEDULES: Mapping[str, Schedule] = {
    "gpipe": Schedule("ScheduleGPipe", "all forward passes, then all backward passes", stages_per_rank=1),
    "1f1b": Schedule("Schedule1F1B", "one forward, one backward pass", stages_per_rank=1),
    "interleaved": Schedule("ScheduleInterleaved1F1B", "1F1B with several stages on each rank"),
    "zero-bubble": Schedule(
        "ScheduleInterleavedZeroBubble",
        "interleaved, with weight gradients deferred to fill bubbles",
        splits_backward=True,
    ),
    "zbv": Schedule("ScheduleZBVZeroBubble", "zero bubble, two stages on each rank in a V", "v", 2, True),
    "dualpipev": Schedule("ScheduleDualPipeV", "DualPipe, two stages on each rank in a V", "v", 2, True),
}


@dataclass(slots=True)
class StandInStage:
    """The attributes of a PipelineStage that torch's schedules read to order actions."""

    stage_index: int
    num_stages: int
    group_size: int
    group_rank: int
    submod: nn.Module | None = None
    has_backward: bool = True
    stage_index_to_group_rank: dict[int, int] = field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1


def find_schedule(name: str) -> Schedule:
    if name not in SCHEDULES:
        raise ScheduleError(f"no schedule {name!r}{suggest(name, SCHEDULES)}: the schedules are {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def choose_schedule(name: str | None, stages_per_rank: int | None) -> tuple[str, int]:
    """Return a schedule and the number of stages per rank, with defaults for None.

    >>> choose_schedule(None, None), choose_schedule(None, 4), choose_schedule("zbv", None)
    (('1f1b', 1), ('interleaved', 4), ('zbv', 2))
    """
    if name is None:
        name = "1f1b" if stages_per_rank in (None, 1) else "interleaved"
    needed = find_schedule(name).stages_per_rank
    return name, stages_per_rank or needed or 2


def rank_of_stage(name: str, stage: int, ranks: int) -> int:
    """Return the pipeline rank of a stage.

    >>> [rank_of_stage("interleaved", stage, 2) for stage in range(4)]
    [0, 1, 0, 1]
    >>> [rank_of_stage("zbv", stage, 2) for stage in range(4)]
    [0, 1, 1, 0]
    """
    turn, index = divmod(stage, ranks)
    return ranks - 1 - index if find_schedule(name).style == "v" and turn % 2 else index


def stages_of_rank(name: str, rank: int, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """Return the stages of a pipeline rank, in the model's order.

    >>> stages_of_rank("interleaved", 1, 4, 2), stages_of_rank("zbv", 1, 4, 2)
    ((1, 5), (1, 6))
    """
    return tuple(s for s in range(ranks * stages_per_rank) if rank_of_stage(name, s, ranks) == rank)


def order_actions(name: str, ranks: int, microbatches: int, stages_per_rank: int = 1) -> list[tuple[Action, ...]]:
    """Return the order of each pipeline rank's actions, with FSDP2's "unshard", "reshard" and "reduce".

    Torch's schedule runs the actions of a step in this order. GPipe and 1F1B gather parameters in their forward passes,
    so that they have no "unshard". Numbers that the schedule does not support raise ScheduleError.

    >>> for actions in order_actions("1f1b", 2, 3):
    ...     print(*(f"{action.kind}{action.microbatch}" for action in actions if action.microbatch >= 0))
    forward0 forward1 backward0 forward2 backward1 backward2
    forward0 backward0 forward1 backward1 forward2 backward2
    """
    schedule = find_schedule(name)
    if schedule.stages_per_rank not in (0, stages_per_rank):
        raise ScheduleError(f"schedule {name} has {schedule.stages_per_rank} stages per rank; got {stages_per_rank}")
    if schedule.stages_per_rank == 1:
        warm_up = [microbatches if name == "gpipe" else min(microbatches, ranks - rank) for rank in range(ranks)]
        return [_alternate(rank, warm_up[rank], microbatches) for rank in range(ranks)]
    return [tuple(actions) for actions in _read_order(name, schedule, ranks, microbatches, stages_per_rank)]


def _alternate(stage: int, warm_up: int, microbatches: int) -> tuple[Action, ...]:
    """Return `warm_up` forward passes, then alternating backward and forward passes."""
    actions = [Action("forward", stage, index) for index in range(warm_up)]
    for index in range(microbatches):
        actions.append(Action("backward", stage, index))
        if warm_up + index < microbatches:
            actions.append(Action("forward", stage, warm_up + index))
    return (*actions, Action("reduce", stage))


def _read_order(
    name: str, schedule: Schedule, ranks: int, microbatches: int, stages_per_rank: int
) -> list[list[Action]]:
    """Return the order of actions that torch's schedule class generates for stand-in stages."""
    from fvflops.torch_internals import add_gradient_reductions, add_unsharding, pipeline_schedules

    # Without sends and receives, which torch adds in quadratic time and which follow from the order.
    quick = type(
        schedule.torch_class,
        (getattr(pipeline_schedules, schedule.torch_class),),
        {"_prepare_schedule_with_comms": lambda self, actions: None},
    )
    count = ranks * stages_per_rank
    stages = [StandInStage(stage, count, ranks, 0) for stage in stages_of_rank(name, 0, ranks, stages_per_rank)]
    try:
        made = quick(stages, microbatches, loss_fn=lambda *_: None)
    except ValueError as error:
        raise ScheduleError(
            f"schedule {name} with {ranks} pipeline ranks, {stages_per_rank} stages per rank and {microbatches} "
            f"microbatches: {error}"
        ) from error
    orders = []
    # Torch gathers up to 3 stages ahead. With more than a rank has it searches all actions for each one.
    ahead = min(3, stages_per_rank)
    for rank in range(ranks):
        lowered = add_gradient_reductions(add_unsharding(made.pipeline_order[rank], ahead), microbatches)
        orders.append([action for item in lowered for action in _read_action(item)])
    return orders


def _read_action(action: Any) -> list[Action]:
    """Return torch's action as one action, as two if DualPipe overlaps them, as none for the waits of torch 2.15."""
    if action.computation_type.value == "WAIT_REDUCE_GRAD":
        return []
    if action.sub_actions is not None:
        return [item for part in action.sub_actions for item in _read_action(part)]
    microbatch = -1 if action.microbatch_index is None else action.microbatch_index
    return [Action(_KINDS[action.computation_type.value], action.stage_index, microbatch)]
