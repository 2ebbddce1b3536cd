"""Training steps of each layout: a rank's plan equals torch's own classes in processes that communicate by gloo."""

import logging
import sys
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from fvflops import FlopCountAnalysis, plan_rank, plan_step
from fvflops.capture.shorten import shorten
from fvflops.plan import rank_model
from fvflops.plan.communication import read_communication
from fvflops.plan.fake_process_group import torch_warnings_ignored
from fvflops.plan.pipeline_schedules import SCHEDULES, ScheduleError
from fvflops.plan.pipeline_stages import PipelineStages
from fvflops.plan.plan_options import PlanError
from fvflops.plan.rank_step import Action
from fvflops.plan.sharding.fully_sharded import PRECISIONS
from fvflops.plan.sharding.sharding_styles import ShardingError
from fvflops.trace import Trace
from fvflops.zoo import build
from fvflops.zoo.llama import Llama
from tests.support.processes.layout_worker import CASES, COMPARED, CONFIG, LENGTH, RANKS, TOKENS
from tests.support.processes.start import run_ranks, selected_cases
from tests.support.random_cases import long_except
from tests.support.trace_comparison import transfers

FLOAT = 4  # bytes of a float32
HIDDEN = FLOAT * TOKENS.numel() * CONFIG.hidden_size
BLOCK = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32  # parameters of a layer: q and o, k and v, MLP, norms
EMBEDDING = 64 * 32
HEAD = EMBEDDING + 32  # with its norm
ALL = 4 * BLOCK + EMBEDDING + HEAD
# Plain accumulation and stages, and interleaved ones, are among the default steps of test_families.py.
LONG = ("accumulation", "stages", "interleaved", "interleaved sequences", "zero bubble")


@pytest.fixture(scope="module")
def recorded(request):
    ranks = run_ranks("layout_worker", RANKS, selected_cases(request, "name"))
    return lambda name, rank: Trace.from_json(ranks[rank][name])


def make_model():
    with torch.device("meta"):
        return Llama(CONFIG)


def plan(mesh, **options):
    return plan_rank(make_model(), TOKENS, mesh=mesh, table="exact", **options)


def by_axis(planned):
    return {
        (key.collective, key.axis): volume.payload
        for key, volume in planned.communication().by_collective_and_group().items()
    }


def pass_kinds(planned):
    return Counter(action.kind for action in planned.step.actions)


@pytest.mark.parametrize("rank", COMPARED)
@pytest.mark.parametrize("name", long_except([name for name in CASES if name not in LONG], CASES))
def test_a_plan_equals_the_process(recorded, name, rank):
    mesh, options = CASES[name]
    planned = plan(mesh, rank=rank % torch.Size(mesh.values()).numel(), **options)
    trace = recorded(name, rank)
    theirs = FlopCountAnalysis.from_trace(trace, table="exact", warn=False).by_phase()
    ours = planned.flops("exact").by_phase()
    # Reductions after the last microbatch, and additions of split backward passes, run outside of autograd's engine.
    assert ours.keys() == {"forward", "backward"} and theirs.keys() <= {"forward", "backward", "other"}
    assert sum(ours.values(), Counter()) == sum(theirs.values(), Counter())
    for label in ("mm", "scaled_dot_product_attention", "mul", "silu", "silu_backward", "neg", "_to_copy"):
        assert ours["forward"][label] == theirs["forward"][label], label
    assert transfers(planned.communication()) == transfers(read_communication(trace))


def test_gradients_are_reduced_in_each_microbatch_or_once():
    each, once = (plan({"fsdp": 2}, microbatches=3, reduce_each_microbatch=each) for each in (True, False))
    assert by_axis(each)["reduce_scatter", "fsdp"] == 3 * FLOAT * ALL
    assert by_axis(once)["reduce_scatter", "fsdp"] == FLOAT * ALL
    assert not each.derived and len(set(map(id, each.step.passes.values()))) == 4  # the second and third are equal
    kept = plan({"fsdp": 2}, microbatches=3, reshard_after_forward=False)
    assert by_axis(kept)["all_gather", "fsdp"] == 3 * FLOAT * ALL
    # The root's parameters stay after its forward.
    assert by_axis(each)["all_gather", "fsdp"] == 3 * FLOAT * (ALL + 4 * BLOCK)


def test_a_stage_is_gathered_and_reduced_once():
    planned = plan({"pp": 2, "dp": 3, "fsdp": 2}, microbatches=8)
    shard = FLOAT * (2 * BLOCK + EMBEDDING)
    assert by_axis(planned) == {
        ("all_gather", "fsdp"): shard,
        ("reduce_scatter", "fsdp"): shard,
        ("all_reduce", "dp"): shard // 2,
        ("send", "pp"): 8 * HIDDEN,
        ("receive", "pp"): 8 * HIDDEN,
    }
    assert pass_kinds(planned) == {"forward": 8, "backward": 8, "reduce": 1}
    explicit = plan({"pp": 2, "fsdp": 2}, microbatches=8, schedule="interleaved", optimizer=torch.optim.SGD)
    assert pass_kinds(explicit) == {"unshard": 2, "forward": 16, "backward": 16, "reduce": 2, "optimizer": 1}
    gathered = [explicit.step.pass_of(Action("unshard", stage)) for stage in explicit.step.stages]
    assert all({phase for _, _, phase in item.count("op")} == {"forward"} for item in gathered)


def test_the_step_is_the_sum_of_its_passes():
    planned = plan({"pp": 2, "tp": 2}, microbatches=3, optimizer=torch.optim.AdamW, sequence_parallel=True)
    assert planned.step.count("op") == Counter(
        {key: count for key, count in planned.trace.calls.items() if key[0] < len(planned.recorded.signatures)}
    )
    links = planned.step.links[0]
    assert (links.received, links.destination) == (None, 1)
    assert links.sent.nbytes == HIDDEN // 2 and links.sent.shape == (2, LENGTH // 2, 32)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ({"pp": 4, "tp": 2}, {"microbatches": 6}),
        ({"fsdp": 2, "pp": 2}, {"microbatches": 4, "schedule": "zbv"}),
        ({"pp": 4, "fsdp": 2}, {}),
        ({"pp": 4, "fsdp": 2}, {"microbatches": 8}),
        ({"pp": 4, "dp": 2}, {"microbatches": 4, "optimizer": torch.optim.AdamW, "optimizer_sharding": "dp"}),
    ],
    ids=["1f1b", "zbv", "gathered", "gathered once", "sharded optimizer"],
)
def test_the_ranks_of_a_pipeline_are_planned_together(mesh, options):
    step = plan_step(make_model(), TOKENS, mesh=mesh, rank=1, table="exact", **options)
    assert len(step.ranks) == mesh["pp"]
    for planned in (step.ranks[0], *step.ranks[1:][-2:]):
        alone = plan(mesh, rank=planned.rank, **options)
        assert planned.coordinates == alone.coordinates and planned.step.actions == alone.step.actions
        assert planned.flops("exact").by_phase() == alone.flops("exact").by_phase()
        ours, theirs = (
            {(item.group.axis, item.group.first) for item in each.communication().transfers}
            for each in (planned, alone)
        )
        assert ours == theirs
        assert planned.communication().by_axis() == alone.communication().by_axis()
        assert planned.memory().peak == alone.memory().peak
    inner = [planned for planned in step.ranks if 0 < planned.coordinates["pp"] < mesh["pp"] - 1]
    assert len({id(planned.recorded.events) for planned in inner}) <= 1


@pytest.mark.parametrize("mesh", [{"pp": 3, "fsdp": 2}, {"pp": 2, "fsdp": 2, "tp": 2}], ids=["fsdp", "fsdp and tp"])
def test_a_few_of_a_stages_equal_layers_are_recorded(mesh, monkeypatch, caplog):
    stages = []

    def shorten_stage(*args, **options):
        stages.append(shorten(*args, **options))
        return stages[-1]

    monkeypatch.setattr(rank_model, "shorten", shorten_stage)
    with torch.device("meta"):
        model = Llama(replace(CONFIG, layers=9 * mesh["pp"]))
    with caplog.at_level(logging.DEBUG, "fvflops"):
        ranks = plan_step(model, TOKENS, mesh=mesh, microbatches=8, precision="bf16-mixed").ranks
    assert all(stages) and not [text for text in caplog.messages if "the full model is recorded" in text]
    for planned in ranks:
        assert len(planned.recorded.modules.by_name["layers"].children) == 9


def test_a_sharded_stage_accumulates_whole_gradients():
    planned = plan({"pp": 2, "fsdp": 2}, microbatches=3, precision="bf16-mixed")
    gradients = planned.memory().curve("gradient")
    whole = FLOAT * (2 * BLOCK + EMBEDDING)  # accumulated in the data type of the reduction
    assert gradients[planned.step.pass_of(Action("reduce", 0)).begin] == whole
    assert gradients[-1] == whole // 2


def test_stages_that_share_a_parameter_sum_its_gradient():
    with torch.device("meta"):
        model = Llama(replace(CONFIG, tie_embeddings=True))
    ranks = plan_step(model, TOKENS, mesh={"pp": 4, "dp": 2}, microbatches=4, table="exact").ranks
    shared = [by_axis(planned).get(("all_reduce", "pp"), 0) for planned in ranks]
    assert shared == [FLOAT * EMBEDDING, 0, 0, FLOAT * EMBEDDING]
    (transfer,) = [item for item in ranks[3].communication().transfers if item.group.name == "first and last stage"]
    assert (transfer.group.first, transfer.group.step) == (0, 6)
    assert ranks[0].step.actions[-1] == Action("tied_allreduce", 0) and "share" in ranks[0].derived[-1]
    # One rank has both stages.
    assert not by_axis(plan_rank(model, TOKENS, mesh={"pp": 2}, schedule="zbv", microbatches=4)).get(
        ("all_reduce", "pp")
    )


class Tower(nn.Module):
    """A model without known pipeline stages: 4 linear layers of 8 features between two others."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.trunk = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.head = nn.Linear(8, 3)

    def forward(self, x, labels=None):
        x = self.stem(x)
        for layer in self.trunk:
            x = layer(x).relu()
        return self.head(x) if labels is None else (self.head(x), labels)


def test_any_model_can_be_split_by_names():
    stages = PipelineStages(("stem",), "trunk", ("head",), "x", "x", last_arguments=("labels",))
    inputs = {"x": torch.ones(5, 6), "labels": torch.ones(5)}
    step = plan_step(Tower(), inputs, mesh={"pp": 2, "fsdp": 2}, microbatches=2, split_by=stages)
    sizes = 6 * 8 + 8 + 2 * (8 * 8 + 8), 2 * (8 * 8 + 8) + 8 * 4 + 4  # of the head's 3 rows the first rank has 2
    assert [2 * planned.parameters for planned in step.ranks] == list(sizes)
    with pytest.raises(ShardingError, match=r"no pipeline stages are known for .*Tower: from Python pass split_by"):
        plan_rank(Tower(), inputs, mesh={"pp": 2})


def test_stages_may_have_given_numbers_of_layers():
    sizes = [plan({"pp": 3}, rank=rank, stage_layers=[2, 1, 1]).parameters for rank in range(3)]
    assert sizes == [2 * BLOCK + EMBEDDING, BLOCK, BLOCK + HEAD]
    # Embedding and head count as a layer each.
    assert [plan({"pp": 3}, rank=rank).parameters for rank in range(3)] == [BLOCK + EMBEDDING, 2 * BLOCK, BLOCK + HEAD]


def test_fully_sharded_ranks_run_the_kernels_of_cuda():
    options = {"precision": "bf16-mixed", "optimizer": torch.optim.AdamW}
    cpu, cuda = (plan({"fsdp": 2}, device=device, **options) for device in ("cpu", "cuda"))
    attention = {item.op for item in cuda.trace.signatures if "attention" in item.op}
    assert attention == {f"aten::_scaled_dot_product_cudnn_attention{end}" for end in ("", "_backward")}
    assert cuda.flops().macs() == cpu.flops().macs() and by_axis(cuda) == by_axis(cpu)
    assert cuda.memory().device == "cuda:0" and {item.device for item in cuda.recorded.storages} == {"cuda:0"}
    # As on a GPU, autocast casts the arguments of attention; so does plan_rank without FSDP2.
    replicas = plan({"dp": 2}, device="cuda", precision="bf16-mixed")
    assert attention <= {item.op for item in replicas.trace.signatures}


def test_a_precision_has_its_dtypes():
    mixed = plan({"fsdp": 2}, precision="bf16-mixed")
    dtypes = {key.collective: key.dtype for key in mixed.communication().by_collective_and_group()}
    assert dtypes == {"all_gather": "bfloat16", "reduce_scatter": "float32"}
    assert mixed.parameter_bytes == FLOAT * ALL // 2
    half = plan({"pp": 2, "fsdp": 2}, precision="bf16")
    assert half.parameter_bytes == 2 * half.parameters and half.step.links[0].sent.dtype == "bfloat16"
    replicas = plan({"dp": 2}, precision="bf16-mixed")  # by autocast
    assert by_axis(replicas) == {("all_reduce", "dp"): FLOAT * ALL}
    products = [item for item in replicas.trace.signatures if item.op == "aten::mm"]
    assert {spec.dtype for item in products for spec in item.outputs} == {"bfloat16"}


SPLIT = {"schedule": "zero-bubble", "microbatches": 4}


@pytest.mark.parametrize(
    ("mesh", "options", "error", "message"),
    [
        ({"pp": 2}, {"schedule": "1f1c"}, ScheduleError, "no schedule '1f1c': did you mean '1f1b'"),
        ({"pp": 2}, {"stages_per_rank": 3}, ShardingError, "layers has 4 layers, too few for 6 stages"),
        ({"pp": 2}, {"stage_layers": [3, 2]}, ShardingError, r"stage_layers gives \[3, 2\], a sum of 5"),
        ({"dp": 2}, {"stages_per_rank": 2}, PlanError, "no pipeline stages .*: add pp to it"),
        ({"dp": 2}, {"schedule": "zbv"}, PlanError, "no pipeline stages .*: add pp to it"),
        ({"tp": 3}, {"sequence_parallel": True}, PlanError, "tp=3 must divide the sequence of 16 tokens: try 2, 4, 8"),
        ({"fsdp": 2}, {"precision": "bf16mixed"}, ValueError, "no precision 'bf16mixed': did you mean 'bf16-mixed'"),
        ({"pp": 2, "fsdp": 2}, {**SPLIT, "precision": "bf16-mixed"}, PlanError, "use precision bf16-mixed-reduce or "),
        ({"pp": 2}, {**SPLIT, "checkpoint": "selective"}, PlanError, "zero-bubble with selective .* is not supported"),
    ],
)
def test_an_invalid_layout_raises(mesh, options, error, message):
    with pytest.raises(error, match=message):
        plan(mesh, **options)


def test_no_warning_of_torch_is_shown(recwarn):
    hook = sys.excepthook
    plan({"dp": 2, "fsdp": 2, "cp": 2}, microbatches=2)
    assert not recwarn.list and sys.excepthook is hook


def test_torchs_log_of_redistributions_is_silent_during_a_plan():
    logger = logging.getLogger("torch.distributed.tensor._redistribute")
    before = logger.level, logger.isEnabledFor(logging.WARNING)
    with torch_warnings_ignored():
        assert not logger.isEnabledFor(logging.WARNING)
    assert (logger.level, logger.isEnabledFor(logging.WARNING)) == before


@pytest.mark.parametrize("precision", PRECISIONS)
def test_sequence_parallelism_is_planned_in_each_precision(precision):
    model = build("megatron_gpt_tiny", device="meta", layers=1)
    tokens = torch.zeros(2, 16, dtype=torch.int64, device="meta")
    alone, divided = (
        plan_rank(model, (tokens, tokens), mesh={"dp": 2, "tp": size}, sequence_parallel=size > 1, precision=precision)
        for size in (1, 2)
    )
    assert divided.flops().macs() * 2 == alone.flops().macs() > 0


@pytest.mark.parametrize("schedule", [name for name, item in SCHEDULES.items() if item.splits_backward])
def test_halves_of_a_backward_pass_recompute_checkpointed_layers(schedule):
    options = {"schedule": schedule, "microbatches": 4}
    plain, recomputed = (plan({"pp": 2}, checkpoint=checkpoint, **options) for checkpoint in ((), "full"))
    assert recomputed.flops().macs() > plain.flops().macs()
