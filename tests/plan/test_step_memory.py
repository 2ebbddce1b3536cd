"""A step in which equal passes are shared has the memory of one in which every microbatch was run."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from fvflops import plan_rank, plan_step
from fvflops.plan import action_recording
from fvflops.plan.memory.storage_lifetimes import read_memory
from fvflops.zoo.llama import Llama, LlamaConfig

CONFIG = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, layers=4, heads=4, kv_heads=2)
TOKENS = torch.ones(2, 16, dtype=torch.int64)

CASES = {
    "accumulation": ({"fsdp": 2}, {"microbatches": 3}),
    "accumulation, one reduction": ({"fsdp": 2}, {"microbatches": 4, "reduce_each_microbatch": False}),
    "1f1b": ({"pp": 2}, {"microbatches": 4}),
    "gpipe": ({"pp": 2}, {"microbatches": 4, "schedule": "gpipe"}),
    "interleaved": ({"pp": 2, "fsdp": 2}, {"microbatches": 4, "schedule": "interleaved"}),
    "gathered again": ({"pp": 2, "fsdp": 2}, {"microbatches": 4, "reshard_after_forward": True}),
    "sequence parallel": ({"pp": 2, "tp": 2}, {"microbatches": 4, "sequence_parallel": True}),
    "zero bubble": ({"pp": 2, "fsdp": 2}, {"microbatches": 4, "schedule": "zbv"}),
}


def plan(mesh, **options):
    with torch.device("meta"):
        model = Llama(CONFIG)
    return plan_rank(model, TOKENS, mesh=mesh, **options)


@pytest.mark.parametrize("last", [False, True], ids=["first rank", "last rank"])
@pytest.mark.parametrize("name", CASES)
def test_the_walk_equals_a_recording_of_all_microbatches(name, last, monkeypatch):
    mesh, options = CASES[name]
    rank = torch.Size(mesh.values()).numel() - 1 if last else 0
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
        model = Llama(replace(CONFIG, layers=14))
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
