"""Policies of activation checkpointing, run by torch's own code."""

from collections import Counter

import pytest
import torch

from fvflops import plan_rank, plan_step
from fvflops.zoo.llama import Llama, LlamaConfig

LAYERS, HIDDEN, FFN, KV = 4, 32, 48, 16
CONFIG = LlamaConfig(vocab_size=64, hidden_size=HIDDEN, intermediate_size=FFN, layers=LAYERS, heads=4, kv_heads=2)
TOKENS = torch.ones(2, 16, dtype=torch.int64)
T = TOKENS.numel()


def plan(checkpoint, **mesh):
    with torch.device("meta"):
        model = Llama(CONFIG)
    return plan_rank(model, TOKENS, mesh=mesh or {"tp": 1}, checkpoint=checkpoint)


def recomputed(planned):
    return planned.flops().by_phase().get("recompute", Counter())


def test_every_nth_block_is_recomputed():
    full, half = plan("full"), plan("every 2")
    layer = T * (2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV + 2 * HIDDEN * FFN)  # without the last product, which ends it
    assert recomputed(full)["mm"] == LAYERS * layer == 2 * recomputed(half)["mm"]
    assert recomputed(plan("every 5")) == recomputed(plan(()))


def test_selective_checkpointing_keeps_attention_and_every_second_product():
    planned = plan("selective")
    # Of q, k, v, o, gate, up and down: k, o and up are computed again.
    again = T * (HIDDEN * KV + HIDDEN * HIDDEN + HIDDEN * FFN)
    assert recomputed(planned) == {"mm": LAYERS * again}
    kept = {policy: max(plan(policy).memory().curve("activation")) for policy in ("full", "selective", ())}
    assert kept["full"] < kept["selective"] < kept[()]


def test_selective_checkpointing_keeps_what_torchtitan_does():
    """Bytes that a layer keeps: its input, the results of q, v, gate and down, and of attention with its statistics."""

    def kept(layers):
        with torch.device("meta"):
            model = Llama(LlamaConfig(**{**fields(), "layers": layers}))
        timeline = plan_rank(model, TOKENS, mesh={"tp": 1}, checkpoint="selective").memory()
        events = timeline.trace.events
        first = next(at for at, event in enumerate(events) if (event.kind, event.phase) == ("op", "backward"))
        return timeline.at(first).by_kind["activation"]

    def fields():
        return {name: getattr(CONFIG, name) for name in CONFIG.__slots__}

    heads, item = 4, 4
    assert kept(3) - kept(2) == item * T * (HIDDEN + HIDDEN + KV + FFN + HIDDEN + HIDDEN + heads)


@pytest.mark.parametrize("mesh", [{"fsdp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_a_policy_is_that_of_every_layout(mesh):
    whole = recomputed(plan("selective"))["mm"]
    share = {"fsdp": 1, "tp": 2, "pp": 2}[next(iter(mesh))]
    assert recomputed(plan("selective", **mesh))["mm"] == whole / share


def test_an_unknown_policy_raises():
    with pytest.raises(ValueError, match="no checkpoint policy 'selectiv': did you mean 'selective'"):
        plan("selectiv")


@pytest.mark.parametrize(
    "checkpoint",
    [["layers.1", "layers.2"], lambda name, _: name in ("layers.1", "layers.2")],
    ids=["names", "predicate"],
)
def test_layers_of_the_model_are_recomputed_in_their_stage(checkpoint):
    with torch.device("meta"):
        model = Llama(CONFIG)
    by_rank = [
        planned.flops().by_phase().get("recompute", {}).get("mm", 0)
        for planned in plan_step(model, TOKENS, mesh={"pp": 4}, checkpoint=checkpoint).ranks
    ]
    assert by_rank[0] == by_rank[3] == 0 < by_rank[1] == by_rank[2]
    (whole,) = plan_step(model, TOKENS, mesh={"dp": 1}, checkpoint=checkpoint).ranks
    assert sum(by_rank) == whole.flops().by_phase()["recompute"]["mm"]
    first, second = plan_step(model, TOKENS, mesh={"pp": 2}, checkpoint=["layers.3", "norm"]).ranks
    assert "recompute" not in first.flops().by_phase() and second.flops().by_phase()["recompute"]["mm"] == by_rank[1]
