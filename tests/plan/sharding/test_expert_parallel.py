"""Plans of mixtures of experts: tensor and expert parallelism of zoo models and of transformers."""

import json

import pytest

from fvflops.cli import main
from fvflops.plan.plans import plan_rank, plan_step
from fvflops.plan.sharding.sharding_styles import ShardingError
from fvflops.zoo import build
from tests.support.models import small_transformers as sizes
from tests.support.models.small_transformers import build_small
from tests.support.processes.family_worker import TOKENS
from tests.support.random_cases import long_except
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas

FLOAT = 4  # bytes of a float32
define_torchvision_schemas()


BATCH, LENGTH = TOKENS.shape
PROJECTIONS = 2 * sizes.WIDTH * sizes.HEAD_WIDTH * (sizes.HEADS + sizes.KEY_HEADS)
DENSE, EXPERT, ROUTER, HEAD = (
    3 * sizes.WIDTH * sizes.DENSE_WIDTH,
    3 * sizes.WIDTH * sizes.EXPERT_WIDTH,
    sizes.WIDTH * sizes.EXPERTS,
    sizes.WIDTH * sizes.VOCABULARY,
)
# DeepSeek-V3's attention: queries down and up, keys and values down and up, the output.
LATENT = (
    sizes.WIDTH * sizes.QUERY_RANK
    + sizes.QUERY_RANK * sizes.HEADS * (sizes.KEPT + sizes.ROTATED)
    + sizes.WIDTH * (sizes.KEY_RANK + sizes.ROTATED)
    + sizes.KEY_RANK * sizes.HEADS * (sizes.KEPT + sizes.VALUE)
    + sizes.HEADS * sizes.VALUE * sizes.WIDTH
)
# Of one layer, forward: two products of each pair of positions.
PAIRS = BATCH * sizes.HEADS * LENGTH * LENGTH
SCORES = PAIRS * 2 * sizes.HEAD_WIDTH
LATENT_SCORES = PAIRS * (sizes.KEPT + sizes.ROTATED + sizes.VALUE)

# Model → multiply-adds of a token in layers that tp divides, and in those that each rank computes whole, then the
# attention's products that are divided, and that are not, of a step: flash attention has five backward for two forward.
MACS = {
    "llama": (2 * (PROJECTIONS + DENSE) + HEAD, 0, 2 * SCORES * 7 // 2, 0),
    "qwen3": (2 * (PROJECTIONS + DENSE) + HEAD, 0, 2 * SCORES * 7 // 2, 0),
    "mixtral": (2 * (PROJECTIONS + sizes.TOP_K * EXPERT) + HEAD, 2 * ROUTER, 2 * SCORES * 7 // 2, 0),
    "qwen3_moe": (2 * (PROJECTIONS + sizes.TOP_K * EXPERT) + HEAD, 2 * ROUTER, 2 * SCORES * 7 // 2, 0),
    # The first layer is dense, the second has a shared expert; the plan leaves the attention whole.
    "deepseek_v3": (DENSE + (sizes.TOP_K + 1) * EXPERT + HEAD, 2 * LATENT + ROUTER, 0, 2 * LATENT_SCORES * 3),
}


@pytest.mark.parametrize("name", long_except(("llama", "mixtral", "deepseek_v3"), sizes.NAMES))
def test_tensor_parallelism_divides_the_products_that_the_models_plan_names(name):
    divided, whole, divided_scores, whole_scores = MACS[name]
    single, half = (
        plan_rank(build_small(name), (TOKENS,), {"use_cache": False}, mesh={"dp": 2, "tp": tp}) for tp in (1, 2)
    )
    assert single.flops().macs() == 3 * TOKENS.numel() * (divided + whole) + divided_scores + whole_scores
    assert half.flops().macs() == 3 * TOKENS.numel() * (divided // 2 + whole) + divided_scores // 2 + whole_scores
    assert half.parameters < single.parameters == single.model_parameters


def test_tied_embeddings_of_transformers_stay_tied():
    options = {"mesh": {"dp": 2, "tp": 2}}
    tied, untied = (
        plan_rank(build_small("llama", tie_word_embeddings=tie), (TOKENS,), {"use_cache": False}, **options)
        for tie in (True, False)
    )
    assert untied.parameters - tied.parameters == sizes.VOCABULARY * sizes.WIDTH // 2
    assert tied.flops().macs() == untied.flops().macs()


# The tiny Mixtral: a token's row of the hidden state, its two experts, and the parameters of one expert.
ROW, TWO, EXPERT_OF_ZOO = FLOAT * 64, 2, 3 * 64 * 96


def plan_mixtral(mesh, **options):
    return plan_rank(build("mixtral_tiny", device="meta"), (TOKENS,), mesh=mesh, **options)


def volumes(plan):
    """Return (collective, axis, dtype) → calls and payload."""
    transfers = plan.communication().by_collective_and_group()
    return {(key.collective, key.axis, key.dtype): volume[:2] for key, volume in transfers.items()}


def test_tokens_are_sent_to_their_experts_and_back_in_both_directions():
    plan = plan_mixtral({"dp": 4, "ep": 2})
    assert volumes(plan) == {
        ("all_to_all", "ep", "int64"): (2, 2 * 4 * 8),  # how many each of four experts gets
        ("all_to_all", "ep", "float32"): (2 * 4, 2 * 4 * TOKENS.numel() * TWO * ROW),
        # Two ranks have the same half of the experts, and four the rest of the model.
        ("all_reduce", "dp", "float32"): (1, FLOAT * (205_632 - 2 * 4 * EXPERT_OF_ZOO)),
        ("all_reduce", "edp", "float32"): (1, FLOAT * 2 * 2 * EXPERT_OF_ZOO),
    }
    assert plan.parameters == 205_632 - 2 * 2 * EXPERT_OF_ZOO and plan.world == 4
    assert plan.flops().macs() == plan_mixtral({"dp": 4}).flops().macs()
    assert "balanced routing: all experts get equally many tokens" in plan.derived


def test_experts_are_sharded_fully_among_the_ranks_that_remain():
    plan = plan_mixtral({"dp": 2, "fsdp": 8, "ep": 4}, rank=9)
    found = volumes(plan)
    # One expert of each of two layers, gathered forward and backward; the replicas of dp sum a rank's shard.
    assert found["all_gather", "efsdp", "float32"] == (4, FLOAT * 4 * EXPERT_OF_ZOO)
    assert found["reduce_scatter", "efsdp", "float32"] == (2, FLOAT * 2 * EXPERT_OF_ZOO)
    assert found["all_reduce", "dp", "float32"] == (5, FLOAT * plan.parameters)
    groups = {item.group.axis: (item.group.first, item.group.step) for item in plan.communication().transfers}
    assert groups == {"fsdp": (8, 1), "ep": (8, 1), "efsdp": (9, 4), "dp": (1, 8)}


def test_a_histogram_decides_how_much_a_rank_computes():
    balanced = plan_mixtral({"fsdp": 2, "ep": 2})
    assert plan_mixtral({"fsdp": 2, "ep": 2}, routing=[10, 10, 10, 10]).flops().macs() == balanced.flops().macs()
    busy, idle = (plan_mixtral({"fsdp": 2, "ep": 2}, rank=rank, routing=[3, 3, 1, 1]) for rank in (0, 1))
    expert_rows = 2 * TOKENS.numel() * TWO  # of both ranks, in a layer
    assert busy.flops().macs() - balanced.flops().macs() == 2 * 3 * expert_rows // 4 * EXPERT_OF_ZOO
    assert busy.flops().macs() + idle.flops().macs() == 2 * balanced.flops().macs()
    assert "routing by the given numbers of tokens of each expert" in busy.derived


def test_the_command_line_takes_the_tokens_of_each_expert(capsys):
    command = ["plan", "zoo:mixtral_tiny", "--mesh", "fsdp=2,ep=2", "--input", "2,16:int64", "--format", "json"]
    assert main([*command, "--routing", "3,3,1,1"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["macs"] == plan_mixtral({"fsdp": 2, "ep": 2}, routing=[3, 3, 1, 1]).flops().macs()
    assert written["mesh"] == {"fsdp": 2, "ep": 2} and written["world"] == 2
    assert main([*command, "--routing", "3,x"]) == 2
    assert "--routing 3,x: expected the tokens of each expert, such as 3,3,1,1" in capsys.readouterr().err


def test_a_loop_over_experts_needs_no_more_than_their_tokens():
    model = build_small("mixtral")
    grouped = plan_rank(model, (TOKENS,), {"use_cache": False}, mesh={"fsdp": 2, "ep": 2})
    model.config._experts_implementation = "eager"
    looped = plan_rank(model, (TOKENS,), {"use_cache": False}, mesh={"fsdp": 2, "ep": 2})
    assert looped.flops().macs() == grouped.flops().macs()
    assert volumes(looped) == volumes(grouped)


def test_equal_layers_that_are_left_out_change_nothing():
    layers = 10
    mesh, names = {"dp": 4, "ep": 2}, [f"layers.{layer}.mlp.experts" for layer in range(layers)]
    # A routing by names is planned with all layers.
    short, full = (
        plan_rank(build("mixtral_tiny", device="meta", layers=layers), (TOKENS,), mesh=mesh, routing=routing)
        for routing in ([1, 1, 1, 1], {name: [1, 1, 1, 1] for name in names})
    )
    assert short.flops("exact").by_phase() == full.flops("exact").by_phase()
    assert volumes(short) == volumes(full)
    assert short.memory().peak == full.memory().peak and short.parameters == full.parameters


def test_stages_and_cuda_kernels_and_microbatches_with_experts():
    stages = [plan_mixtral({"pp": 2, "dp": 2, "ep": 2}, rank=rank, microbatches=2) for rank in (0, 2)]
    whole = plan_mixtral({"dp": 2, "ep": 2}, microbatches=2)
    assert sum(stage.flops().macs() for stage in stages) == whole.flops().macs()
    key = "all_to_all", "ep", "float32"
    assert [volumes(stage)[key] for stage in stages] == [(8, volumes(whole)[key][1] // 2)] * 2
    mesh, inputs = {"dp": 2, "tp": 2, "ep": 2}, ((TOKENS,), {"use_cache": False})
    as_on_cuda, on_cpu = (plan_rank(build_small("qwen3_moe"), *inputs, mesh=mesh, device=it) for it in ("cuda", "cpu"))
    assert as_on_cuda.communication().by_axis() == on_cpu.communication().by_axis()


LLAMA = {"model": "llama_tiny"}


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        ({"fsdp": 6, "ep": 4}, {}, "ep=4 must divide the 6 ranks of fsdp: use ep=1, 2, 3 or 6"),
        ({"fsdp": 3, "ep": 3}, {}, r"ep=3 must divide the 4 experts of layers.0.mlp.experts: use ep=1, 2 or 4"),
        ({"fsdp": 10, "ep": 2}, {}, "ep leaves 5 ranks of fsdp for each 2 experts .* widths 64 and 96 by 5"),
        ({"ep": 2}, {}, "ep=2 must divide the 1 rank of fsdp: use ep=1"),
        ({"fsdp": 2, "tp": 4, "ep": 2}, {}, "and be a multiple of cp and tp .4.: use ep=1, 4 or 8"),
        ({"fsdp": 4, "tp": 4, "ep": 2, "etp": 2}, {}, r"etp=2 must be 1 or the size of tp .4."),
        ({"tp": 3}, {}, r"tp=3 must divide the numbers of heads .*: use tp=1 or 2"),
        ({"fsdp": 2, "ep": 2}, LLAMA, "no mixtures of experts are known in fvflops.*Llama: plan it without ep"),
        ({"fsdp": 2}, {**LLAMA, "routing": [1]}, "no mixtures of experts are known in Llama: plan it without routing"),
        ({"fsdp": 2}, {"routing": [1, 2]}, "a number for each of 4 experts, .* got 2"),
        ({"fsdp": 2}, {"routing": [9, 1, 1, 1]}, "sends 48 of a rank's 32 tokens to expert 0"),
        ({"fsdp": 2}, {"routing": [0] * 4}, "non-negative numbers, not all zero"),
        ({"fsdp": 2}, {"routing": {"mlp": [1] * 4}}, "routing has 'mlp', but the model's experts are layers.0"),
        ({"pp": 2}, {"routing": {"mlp": [1] * 4}}, "routing by names of experts is not supported with pp"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_what_can(mesh, options, message):
    model, options = options.get("model", "mixtral_tiny"), {key: options[key] for key in options if key != "model"}
    with pytest.raises(ValueError, match=message):
        plan_rank(build(model, device="meta"), (TOKENS,), mesh=mesh, **options)


def test_transformers_refuses_what_it_cannot_divide():
    with pytest.raises(ShardingError, match="plan it without etp"):
        mesh = {"fsdp": 2, "tp": 2, "ep": 2, "etp": 2}
        plan_rank(build_small("mixtral"), (TOKENS,), {"use_cache": False}, mesh=mesh)


def test_stages_of_other_layers_are_not_taken_as_equal():
    options = {"mesh": {"pp": 4, "dp": 2, "ep": 2}, "microbatches": 4, "schedule": "1f1b"}
    model = build_small("deepseek_v3", num_hidden_layers=4, first_k_dense_replace=2)
    ranks = plan_step(model, (TOKENS,), {"use_cache": False}, **options).ranks
    whole = plan_rank(model, (TOKENS,), {"use_cache": False}, mesh={"dp": 2, "ep": 2}, microbatches=4)
    assert sum(plan.flops().macs() for plan in ranks) == whole.flops().macs()
    assert ["all_to_all" in plan.communication().by_collective() for plan in ranks] == [False, False, True, True]
