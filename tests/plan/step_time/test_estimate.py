"""Estimated steps of small models: what adds up, what cannot be, and what must be refused."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from fvflops import Efficiency, MasterWeights, estimate_step, find_device, model_flops, plan_rank, plan_step
from fvflops.plan.step_time.calibration import PEAK
from fvflops.trace import PHASES
from fvflops.zoo import build
from tests.support.models.parts import Applied

TOKENS = torch.ones(2, 16, dtype=torch.int64)
# Slow enough that kernels, the host and collectives all take part of a step.
EFFICIENCY = Efficiency(matmul=0.5, bandwidth=0.5, kernel=2e-6, launch=1e-6, launch_backward=1e-6, source="a test")
LAYOUTS = {
    "one rank": ({"dp": 1}, {}),
    "replicas": ({"dp": 16}, {"microbatches": 2}),
    "sharded": ({"fsdp": 4, "tp": 2}, {"microbatches": 2}),
    "pipeline": ({"pp": 2, "dp": 2, "tp": 2}, {"microbatches": 4}),
    "sharded pipeline": ({"pp": 2, "fsdp": 2}, {"microbatches": 4, "precision": "bf16-mixed"}),
}


def plan(mesh, name="llama_tiny", **options):
    return plan_step(
        build(name, device="meta"), TOKENS, mesh=mesh, **{"optimizer": torch.optim.AdamW, "table": "exact", **options}
    )


def estimate(mesh, **options):
    return estimate_step(plan(mesh, **options), device="H100", efficiency=EFFICIENCY)


@pytest.fixture(scope="module", params=LAYOUTS)
def estimated(request):
    mesh, options = LAYOUTS[request.param]
    return estimate(mesh, **options)


def test_the_parts_of_the_slowest_rank_add_up_to_the_step(estimated):
    parts = estimated.kernels, *estimated.exposed.values(), estimated.launching, estimated.bubble, estimated.sending
    assert sum(parts) == pytest.approx(estimated.seconds)
    assert all(part >= 0 for part in parts)
    if len(estimated.plans) == 1:
        assert estimated.bubble == estimated.bubble_share == 0 and estimated.sending == pytest.approx(0, abs=1e-12)
    assert sum(estimated.by_phase.values()) == pytest.approx(estimated.kernels)
    assert sum(estimated.by_module.values()) == pytest.approx(estimated.kernels)
    assert set(estimated.by_phase) <= set(PHASES)


def test_figures_follow_from_the_time(estimated):
    mesh = estimated.plans[0].mesh
    replicas = mesh.get("dp", 1) * mesh.get("fsdp", 1)
    microbatches = max(action.microbatch for action in estimated.plans[0].step.actions) + 1
    assert estimated.samples == TOKENS.shape[0] * microbatches * replicas
    assert estimated.tokens == estimated.samples * TOKENS.shape[1]
    assert estimated.tokens_per_second == estimated.tokens / estimated.seconds
    assert 0 < estimated.bound < estimated.seconds
    assert 0 < estimated.mfu <= estimated.hfu < estimated.mfu * estimated.seconds / estimated.bound
    assert estimated.gpus == estimated.plans[0].world
    total = sum(model_flops(item.flops()) for item in estimated.plans)
    assert estimated.model_flops == total / len(estimated.plans)
    assert "step" in repr(estimated) or repr(estimated).startswith("<StepEstimate of")


def test_at_efficiency_1_the_step_is_the_bound():
    step = plan({"pp": 2, "tp": 2}, microbatches=2)
    estimated = estimate_step(step, device="H100", efficiency=PEAK)
    assert estimated.seconds == estimated.bound and estimated.launching == 0


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_more_microbatches_never_lower_the_utilisation(schedule):
    utilisations = [estimate({"pp": 2}, schedule=schedule, microbatches=count).mfu for count in (1, 2, 4, 8)]
    assert utilisations == sorted(utilisations)


def test_faster_links_and_kernels_never_lengthen_a_step():
    step = plan({"fsdp": 4, "tp": 2})
    slow = estimate_step(step, device="H100", efficiency=EFFICIENCY, network="HGX A100 800G")
    fast = estimate_step(step, device="H100", efficiency=EFFICIENCY, network="HGX H100 3200G")
    faster = estimate_step(step, device="H100", efficiency=replace(EFFICIENCY, matmul=0.9), network="HGX H100 3200G")
    assert faster.seconds <= fast.seconds <= slow.seconds


def test_recomputation_costs_time_but_is_no_work_of_the_model():
    plain, recomputed = (
        estimate({"fsdp": 2}),
        estimate({"fsdp": 2}, checkpoint=lambda name, _: name.startswith("layers.")),
    )
    assert recomputed.by_phase["recompute"] > 0 == plain.by_phase.get("recompute", 0)
    assert recomputed.seconds > plain.seconds and recomputed.model_flops == plain.model_flops
    assert recomputed.hfu / recomputed.mfu > plain.hfu / plain.mfu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.filterwarnings("error::UserWarning")
def test_kernels_that_skip_masked_pairs_may_exceed_the_peak_for_all_pairs(dtype):
    x = torch.ones(1, 16, 65536, 128, dtype=dtype, device="meta", requires_grad=True)
    step = plan_step(
        Applied(lambda self, x: nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)),
        x,
        mesh={"dp": 1},
        loss=torch.sum,
        optimizer=None,
        device="cuda",
    )
    estimated = estimate_step(step, device="H20", efficiency=PEAK)
    assert estimated.hfu > estimated.mfu > 1 > estimated.mfu_of_unmasked > 0.4


def test_the_time_between_steps_is_added():
    step = plan({"dp": 1})
    estimated = estimate_step(step, device="H100", efficiency=replace(EFFICIENCY, step=1.0))
    assert estimated.seconds == pytest.approx(1 + estimate_step(step, device="H100", efficiency=EFFICIENCY).seconds)
    assert estimated.between == 1 and estimated.bubble == 0


def test_a_gpt_with_master_weights():
    step = plan(
        {"pp": 2, "dp": 2},
        "megatron_gpt_tiny",
        microbatches=2,
        optimizer=partial(MasterWeights, make=torch.optim.AdamW),
    )
    estimated = estimate_step(step, device="A100", efficiency=EFFICIENCY)
    assert estimated.by_phase["optimizer"] > 0 and estimated.network.source.startswith("assumed for A100")
    assert any("DDP" in text for text in estimated.assumptions)


def test_an_estimate_says_what_is_given_for_data_dependent_ops():
    class Routed(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return super().forward(y[y[:, 0] > 0])

    step = plan_step(Routed(8, 8), torch.ones(4, 8), mesh={"dp": 2}, assume={"aten::index": 0.5})
    estimated = estimate_step(step, device="H100", efficiency=EFFICIENCY)
    assert any(text.endswith("for which are given aten::index=0.5") for text in estimated.assumptions)


def test_ranks_of_experts_are_no_more_ranks():
    estimated = estimate_step(plan({"fsdp": 4, "ep": 2}, "mixtral_tiny"), device="H100", efficiency=EFFICIENCY)
    assert (estimated.gpus, estimated.tokens) == (4, 4 * TOKENS.numel())
    assert {"fsdp", "ep"} <= set(estimated.communication)


def test_inputs_that_are_no_tokens_are_samples():
    step = plan_step(torch.nn.Linear(8, 8), torch.ones(5, 8), mesh={"dp": 3}, microbatches=2)
    estimated = estimate_step(step, device="H100", efficiency=EFFICIENCY)
    assert (estimated.samples, estimated.tokens, estimated.tokens_per_second) == (30, None, None)
    with pytest.raises(ValueError, match="are not token ids"):
        estimated.cost_to_train(10**12)


def test_the_cost_of_a_training():
    estimated = estimate({"dp": 4})
    cost = estimated.cost_to_train(estimated.tokens * 10**6, price=2.0, watts=500)
    assert cost.steps == 10**6 and cost.seconds == pytest.approx(estimated.seconds * 10**6)
    assert cost.gpu_hours == pytest.approx(4 * cost.days * 24)
    assert cost.cost == 2 * cost.gpu_hours and cost.energy == pytest.approx(0.5 * cost.gpu_hours)
    assert estimated.cost_to_train(10**9).cost is None
    with pytest.raises(ValueError, match="price must be a number above 0; got -1"):
        estimated.cost_to_train(10**9, price=-1)


def test_what_cannot_be_estimated():
    rank = plan_rank(build("llama_tiny", device="meta"), TOKENS, mesh={"pp": 2}, microbatches=2)
    with pytest.raises(ValueError, match="the pipeline has 2 ranks, and 1 are given: plan all of them by plan_step"):
        estimate_step(rank, device="H100")
    with pytest.raises(ValueError, match=r"needs a network: pass network= \(--network\)"):
        estimate_step(plan({"tp": 2}), device="V100")
    with pytest.raises(ValueError, match="did you mean 'H100'"):
        estimate_step(plan({"dp": 1}), device="H10")
    nothing = replace(find_device("H100"), bandwidth=None)
    with pytest.raises(ValueError, match="has no bandwidth"):
        estimate_step(plan({"dp": 1}), device=nothing, efficiency=EFFICIENCY)


def test_mfu_above_100_percent_is_explained_by_masked_attention():
    tokens = torch.ones(1, 32768, dtype=torch.int64)
    estimate = estimate_step(plan_step(build("llama_tiny", device="meta"), tokens, mesh={"dp": 1}), device="H100")
    faster = estimate.seconds / estimate.bound
    assert estimate.mfu * faster > 1 > estimate.mfu_of_unmasked * faster
    assert "MFU and HFU exceed 100 %" in str(estimate)
    short = estimate_step(plan({"dp": 1}), device="H100")
    assert short.mfu_of_unmasked < short.mfu and "exceed 100 %" not in str(short)
