"""Order of actions of pipeline ranks, compared with torch's schedules, and the memory of a step that follows it."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from torch.distributed.pipelining import schedules as torch_schedules

from fvflops import plan_rank, plan_step
from fvflops.plan import action_recording
from fvflops.plan.memory.storage_lifetimes import read_memory
from fvflops.plan.pipeline_schedules import (
    SCHEDULES,
    ScheduleError,
    StandInStage,
    order_actions,
    rank_of_stage,
    stages_of_rank,
)
from fvflops.plan.rank_step import Action
from fvflops.zoo.llama import Llama, LlamaConfig
from tests.support.random_cases import long_except


class LoggingStage(StandInStage):
    def __init__(self, stage, count):
        super().__init__(stage, count, count, stage)
        self.log = []

    def forward_one_chunk(self, microbatch, *args, **options):
        self.log.append(Action("forward", self.stage_index, microbatch))

    def backward_one_chunk(self, microbatch, **options):
        self.log.append(Action("backward", self.stage_index, microbatch))

    def perform_reduce_grad(self, factor):
        self.log.append(Action("reduce", self.stage_index))

    def release_fwd_send_outputs(self, *args):  # torch 2.15
        pass

    def no_transfers(self, microbatch):
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = no_transfers


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 4), (3, 8)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_a_schedule_of_one_stage_per_rank_runs_in_this_order(name, ranks, microbatches):
    for rank, actions in enumerate(order_actions(name, ranks, microbatches)):
        stage = LoggingStage(rank, ranks)
        schedule = getattr(torch_schedules, SCHEDULES[name].torch_class)(stage, microbatches)
        schedule._initialize_stage = lambda *_: None
        schedule._step_microbatches([()] * microbatches, [{}] * microbatches)
        assert tuple(stage.log) == actions


@pytest.mark.parametrize(
    ("name", "ranks", "microbatches", "stages_per_rank"),
    [
        *(("interleaved", 2, 4, 2), ("interleaved", 4, 8, 5), ("zero-bubble", 2, 4, 1)),
        *(("zero-bubble", 4, 8, 2), ("zbv", 4, 8, 2), ("dualpipev", 4, 10, 2)),
    ],
)
def test_a_schedule_of_several_stages_per_rank_is_lowered_to_this_order(name, ranks, microbatches, stages_per_rank):
    count = ranks * stages_per_rank
    stages = [StandInStage(stage, count, ranks, 0) for stage in stages_of_rank(name, 0, ranks, stages_per_rank)]
    schedule = getattr(torch_schedules, SCHEDULES[name].torch_class)(stages, microbatches, loss_fn=lambda *_: None)
    orders = order_actions(name, ranks, microbatches, stages_per_rank)
    for rank, actions in enumerate(orders):
        theirs = [
            f"{part.stage_index} {part.computation_type.name} {part.microbatch_index}"
            for action in schedule.pipeline_order_with_comms[rank]
            for part in action.sub_actions or (action,)
            if not part.computation_type.name.startswith(("SEND", "RECV", "WAIT"))
        ]
        assert [_as_torch(action) for action in actions] == theirs
    assert schedule.stage_index_to_group_rank == {stage: rank_of_stage(name, stage, ranks) for stage in range(count)}


def _as_torch(action):
    names = {
        "backward": "FULL_BACKWARD",
        "input_backward": "BACKWARD_INPUT",
        "weight_backward": "BACKWARD_WEIGHT",
        "reduce": "REDUCE_GRAD",
    }
    microbatch = None if action.microbatch < 0 else action.microbatch
    return f"{action.stage} {names.get(action.kind, action.kind.upper())} {microbatch}"


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_microbatch_goes_through_every_stage_once(name):
    stages_per_rank = SCHEDULES[name].stages_per_rank or 3
    orders = order_actions(name, 4, 8, stages_per_rank)
    assert [len(order) for order in orders] and len(orders) == 4
    for rank, actions in enumerate(orders):
        kinds = Counter((action.kind, action.stage) for action in actions)
        for stage in stages_of_rank(name, rank, 4, stages_per_rank):
            assert kinds["forward", stage] == 8 and kinds["reduce", stage] == 1
            assert kinds["backward", stage] + kinds["input_backward", stage] == 8
            assert kinds["input_backward", stage] == kinds["weight_backward", stage]


def test_fewer_microbatches_than_ranks_are_all_in_flight():
    first, last = order_actions("1f1b", 4, 2)[0], order_actions("1f1b", 4, 2)[-1]
    assert [action.kind for action in first] == ["forward", "forward", "backward", "backward", "reduce"]
    assert [action.kind for action in last] == ["forward", "backward", "forward", "backward", "reduce"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("interleave", 2, 4, 2), "no schedule 'interleave': did you mean 'interleaved'"),
        (("zbv", 2, 4, 3), "schedule zbv has 2 stages per rank; got 3"),
        (("interleaved", 4, 9, 2), "interleaved with 4 pipeline ranks, 2 stages per rank and 9 microbatches: "),
        (("dualpipev", 4, 4, 2), "DualPipeV requires at least as many microbatches as stages"),
    ],
)
def test_a_schedule_that_does_not_fit_raises(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        order_actions(*arguments)


CONFIG = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, layers=4, heads=4, kv_heads=2)
TOKENS = torch.ones(2, 16, dtype=torch.int64)

CASES = {
    "accumulation": ({"fsdp": 2}, {"microbatches": 3}),
    "accumulation, one reduction": ({"fsdp": 2}, {"microbatches": 3, "reduce_each_microbatch": False}),
    "1f1b": ({"pp": 2}, {"microbatches": 4}),
    "gpipe": ({"pp": 2}, {"microbatches": 4, "schedule": "gpipe"}),
    "interleaved": ({"pp": 2, "fsdp": 2}, {"microbatches": 4, "schedule": "interleaved"}),
    "gathered again": ({"pp": 2, "fsdp": 2}, {"microbatches": 3, "reshard_after_forward": True}),
    "sequence parallel": ({"pp": 2, "tp": 2}, {"microbatches": 3, "sequence_parallel": True}),
    "zero bubble": ({"pp": 2, "fsdp": 2}, {"microbatches": 4, "schedule": "zbv"}),
}


def plan(mesh, **options):
    with torch.device("meta"):
        model = Llama(CONFIG)
    return plan_rank(model, TOKENS, mesh=mesh, **options)


# Each case on the first or the last rank, and both where they differ most.
WALKS = [
    *(("accumulation", "first"), ("accumulation, one reduction", "first"), ("gathered again", "last")),
    *(("1f1b", "first"), ("1f1b", "last"), ("gpipe", "first")),
    *(("interleaved", "first"), ("sequence parallel", "last"), ("zero bubble", "first")),
]


@pytest.mark.parametrize(("name", "which"), long_except(WALKS, product(CASES, ("first", "last"))))
def test_the_walk_equals_a_recording_of_all_microbatches(name, which, monkeypatch):
    mesh, options = CASES[name]
    rank = torch.Size(mesh.values()).numel() - 1 if which == "last" else 0
    options = {**options, "rank": rank, "optimizer": torch.optim.AdamW}
    shared = plan(mesh, **options)
    monkeypatch.setattr(action_recording._ActionRecorder, "_key", lambda self, action, state: action)
    separate = plan(mesh, **options)
    assert len(set(map(id, separate.step.passes.values()))) == len(separate.step.actions)
    everything = read_memory(separate.recorded, run_end=separate.step.recorded_events)
    assert shared.memory().peak == separate.memory().peak == everything.peak
    assert shared.memory().at_peak().by_kind == separate.memory().at_peak().by_kind
    ours, theirs = (
        [item._replace(action=None) for item in each.memory_by_action(first_step=True)] for each in (shared, separate)
    )
    assert ours == theirs


def test_a_rank_that_shares_a_recording_has_the_memory_of_its_own():
    """But for one buffer of a collective, which FSDP2 keeps until the next: equal stages are recorded in one order."""
    with torch.device("meta"):
        model = Llama(replace(CONFIG, layers=8))
    options = {"mesh": {"pp": 4, "fsdp": 2}, "microbatches": 8, "schedule": "interleaved"}
    shared = plan_step(model, TOKENS, **options).ranks
    assert shared[1].recorded.events is shared[2].recorded.events
    for rank in (1, 2):
        own = plan_rank(model, TOKENS, rank=shared[rank].rank, **options)
        theirs, expected = (each.memory().at_peak().by_kind for each in (shared[rank], own))
        buffer = theirs.pop("communication", 0), expected.pop("communication", 0)
        assert theirs == expected and abs(buffer[0] - buffer[1]) <= own.parameter_bytes * 2


def test_actions_follow_each_other():
    planned = plan({"pp": 2}, microbatches=8, optimizer=torch.optim.AdamW)
    timeline, actions = planned.memory(), planned.memory_by_action()
    assert [item.action for item in actions] == list(planned.step.actions)
    assert actions[0].before == timeline.baseline and max(item.peak for item in actions) == timeline.peak
    assert all(one.after == other.before for one, other in pairwise(actions))
    # Of six equal rounds of a backward and a forward pass one is shown.
    assert len(timeline.trace.events) < len(planned.recorded.events) + 3 * 242


def test_a_rank_holds_the_microbatches_of_its_schedule():
    def held(rank, **options):
        planned = plan({"pp": 4}, rank=rank, **options)
        return max(planned.memory().curve("activation")) / max(plan({"pp": 4}, rank=rank).memory().curve("activation"))

    assert [held(rank, microbatches=8) for rank in (1, 2)] == [3, 2]
    assert [held(rank, microbatches=2) for rank in (1, 2)] == [2, 2]
    assert held(1, microbatches=8, schedule="gpipe") == 8
