"""Training steps of each family of models in each layout: a rank's plan equals what it does in four processes."""

import json

import pytest
import torch

from fvflops import FlopCountAnalysis, plan_rank, plan_step
from fvflops.plan.communication import read_communication
from fvflops.plan.parallel_axes import dense_axes
from fvflops.plan.sharding.sharding_styles import ShardingError
from fvflops.trace import Trace
from tests.support.models.small_transformers import NAMES, build_small
from tests.support.processes.family_worker import CASES, LAYOUTS, MICROBATCH, STEPS, TOKENS, describe_work, make_family
from tests.support.processes.layout_worker import COMPARED, RANKS
from tests.support.processes.start import run_ranks, selected_cases
from tests.support.random_cases import long_except
from tests.support.schemas.torchvision_schemas import define_torchvision_schemas
from tests.support.trace_comparison import transfers

define_torchvision_schemas()

# Each axis and kind of mixture, divided by this package and by transformers; steps of each family and of each layout.
PASSES = ("zoo ep sequence", "zoo ep etp", "qwen3_moe tp", "deepseek_v3 tp", "mixtral ep", "deepseek_v3 ep tp")
WHOLE_STEPS = (
    *(("llama", "interleaved"), ("qwen3", "tp stages"), ("qwen3 sliding", "stages"), ("qwen3_moe", "accumulation")),
    *(("mixtral", "expert stages"), ("deepseek_v3", "expert stages"), ("zoo mixtral", "sequence stages")),
)


@pytest.fixture(scope="module")
def ranks(request):
    passes, steps = selected_cases(request, "name"), selected_cases(request, "family", "layout")
    return run_ranks("family_worker", RANKS, passes, steps)


def list_senders(mesh, rank):
    """Return the ranks of a rank's group of ep; the ranks of etp alternate."""
    ep, etp = mesh.get("ep", 1), mesh.get("etp", 1)
    first = rank - rank % (ep * etp) + rank % etp
    return range(first, first + ep * etp, etp)


def analyse(trace):
    return FlopCountAnalysis.from_trace(trace, table="exact", warn=False)


def inputs_of(name, tokens):
    return (tokens,), {} if name.startswith("zoo") else {"use_cache": False}


@pytest.mark.parametrize("name", long_except(PASSES, CASES))
def test_a_pass_by_routed_tokens_equals_each_process(ranks, name):
    make, _, mesh, sequence = CASES[name]
    histograms = [passes[name][0] for passes, _ in ranks]
    for rank in COMPARED:
        trace = Trace.from_json(ranks[rank][0][name][1])
        routing = None
        if "ep" in mesh:
            senders = list_senders(mesh, rank)
            routing = {key: [histograms[sender][key] for sender in senders] for key in histograms[0]}
        options = {"mesh": mesh, "rank": rank, "sequence_parallel": sequence, "routing": routing, "table": "exact"}
        plan = plan_rank(make(), *inputs_of(name, TOKENS), **options)
        assert plan.flops("exact").macs() == analyse(trace).macs() > 0
        assert transfers(plan.communication()) == transfers(read_communication(trace))
        assert plan.flops("exact").by_phase() == analyse(trace).by_phase()


@pytest.mark.parametrize(("family", "layout"), long_except(WHOLE_STEPS, STEPS))
def test_a_step_equals_each_process(ranks, family, layout):
    mesh, options = LAYOUTS[layout]
    world = torch.Size(dense_axes(mesh).values()).numel()
    for rank in COMPARED:
        model, inputs = make_family(family, layout).build(), inputs_of(family, MICROBATCH)
        planned = plan_rank(model, *inputs, mesh=mesh, rank=rank % world, table="exact", **options)
        theirs = ranks[rank][1][f"{family} {layout}"]
        assert theirs["macs"] > 0 and theirs["transfers"]
        assert json.loads(json.dumps(describe_work(planned.trace))) == theirs


@pytest.mark.parametrize(
    ("name", "layout", "message"),
    [
        *((name, "sequence stages", "no sequence-parallel plan is known for transformers") for name in NAMES),
        *((name, "expert stages", "no mixtures of experts are known in transformers") for name in ("llama", "qwen3")),
    ],
)
def test_a_layout_that_a_family_cannot_have_is_refused(name, layout, message):
    mesh, options = LAYOUTS[layout]
    with pytest.raises(ShardingError, match=message):
        plan_rank(build_small(name), *inputs_of(name, MICROBATCH), mesh=mesh, **options)


def test_stages_of_other_attention_are_not_taken_as_equal():
    # The third and the fourth layer have attention in a window, by a mask that is added to the scores.
    windows = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 2}
    model, inputs = build_small("qwen3", num_hidden_layers=4, **windows), inputs_of("qwen3", MICROBATCH)
    whole = plan_rank(model, *inputs, mesh={"dp": 1}, table="exact")
    scores = [
        planned.flops("exact").by_phase()["forward"]["scaled_dot_product_attention"]
        for planned in (*plan_step(model, *inputs, mesh={"pp": 4}, table="exact").ranks, whole)
    ]
    assert scores[0] == scores[1] < scores[2] == scores[3] and sum(scores[:4]) == scores[4]
