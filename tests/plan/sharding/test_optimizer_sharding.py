"""A distributed optimizer (ZeRO-1): plans against processes that train by gloo, with torch's optimizer and an own."""

from collections import Counter
from functools import partial

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from fvflops import FlopCountAnalysis, plan_rank, plan_step
from fvflops.plan.added_optimizers import MasterWeights, Muon
from fvflops.plan.communication import read_communication
from fvflops.plan.plan_options import PlanError
from fvflops.plan.step_time.step_estimate import estimate_step
from fvflops.trace import Trace
from fvflops.zoo import build
from tests.support.processes.start import run_ranks, selected_cases
from tests.support.processes.zero_worker import ADAMW, CASES, WHOLE, cases_of
from tests.support.random_cases import long_except
from tests.support.trace_comparison import volumes

TOKENS = torch.ones(2, 16, dtype=torch.int64)
# Bytes of the number that AdamW adds to its count of steps on the CPU: as int64, and as the count's float32. Clipping
# takes as many, and its result is alive.
COUNT, CLIPPING = 12, 16
COMPARED = [
    (ranks, f"{whose}, {name}")
    for ranks in (2, 4)
    for whose, cases in zip(("own", "torch"), cases_of(ranks), strict=True)
    for name in cases
]
# Each optimizer, data type of the gradients, padding and layout once.
DEFAULT = (
    *((2, f"own, {name}") for name in ("float32", "float32 gradients", "uneven, master weights")),
    *((4, f"own, {name}") for name in ("tp", "tp sequence", "pp")),
    *((2, "torch, few layers"), (4, "torch, uneven")),
)


@pytest.fixture(scope="module")
def runs(request):
    """Return number of processes → what the first and the last of them found."""
    groups = run_ranks("zero_worker", (2, 4), selected_cases(request, "ranks", "name"), timeout=800)
    return {ranks: {rank: found[rank] for rank in (0, ranks - 1)} for ranks, found in groups.items()}


def plan_case(name, ranks, rank):
    whose, _, name = name.partition(", ")
    case = CASES[name]
    options = {"optimizer": partial(MasterWeights, make=ADAMW) if case.masters else ADAMW, "optimizer_sharding": "dp"}
    options["gradient_dtype"] = case.gradients
    if whose == "torch":
        options = {"optimizer": partial(ZeroRedundancyOptimizer, optimizer_class=ADAMW)}
    if "pp" in case.mesh:
        options["schedule"] = "gpipe"
    options |= {"loss": torch.sum, "sequence_parallel": case.sequence, "table": "exact"}
    return plan_rank(
        case.build(), case.inputs, mesh=case.mesh or {"dp": ranks}, rank=rank, microbatches=case.microbatches, **options
    )


def flops_of(analysis):
    return sum(sum(ops.values()) for ops in analysis.by_phase().values())


@pytest.mark.parametrize(("ranks", "name"), long_except(DEFAULT, COMPARED))
def test_a_plan_equals_the_processes(runs, ranks, name):
    for rank, found in runs[ranks].items():
        planned, trace = plan_case(name, ranks, rank), Trace.from_json(found[name]["trace"])
        theirs = FlopCountAnalysis.from_trace(trace, table="exact", warn=False)
        assert flops_of(planned.flops("exact")) == flops_of(theirs) > 0
        ours = volumes(planned.communication())
        assert ours == volumes(read_communication(trace))
        assert ("reduce_scatter" in {key[0] for key in ours}) == name.startswith("own")
        later = planned.memory()
        held = later.at(len(later.trace.events) - 1).by_kind
        assert {kind: held[kind] for kind in found[name]["held"]} == found[name]["held"]
        baseline = planned.memory(first_step=True).baseline
        for index, is_first in enumerate((True, False)):
            actions = planned.memory_by_action(first_step=is_first)
            (step,) = (action for action in actions if action.action.kind == "optimizer")
            clips = CASES[name.partition(", ")[2]].masters and not is_first
            extra = found[name]["optimizer"][index] - (step.peak - step.before)
            assert extra == (CLIPPING if clips else COUNT)
            timeline = planned.memory(first_step=is_first)
            if name in WHOLE:
                at_optimizer = timeline.at_peak().phase == "optimizer"
                assert found[name]["step"][index] == timeline.peak - baseline + COUNT * at_optimizer


def plan(mesh, layers=2, hidden_size=64, **options):
    model = build("megatron_gpt_tiny", device="meta", layers=layers, hidden_size=hidden_size).bfloat16()
    return plan_step(model, (TOKENS, TOKENS), mesh=mesh, **{"optimizer": partial(MasterWeights, make=ADAMW), **options})


def transfers_of(planned):
    """Return collective → calls and bytes over dp, without the norm of the gradients."""
    return {
        (key.collective, key.dtype): (volume.calls, volume.payload)
        for key, volume in planned.communication().by_collective_and_group().items()
        if "dp" in key.axis and volume.payload > 4
    }


@pytest.mark.parametrize("gradients", [None, "bf16", "fp32"])
@pytest.mark.parametrize("mesh", [{"dp": 3}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 4}, {"cp": 2, "dp": 2}], ids=str)
def test_bytes_of_mixed_precision(mesh, gradients):
    """16 or 18 bytes a parameter: 12 of them divided by the replicas."""
    step = plan(mesh, optimizer_sharding="dp", gradient_dtype=gradients, microbatches=4)
    replicas = mesh.get("dp", 1) * mesh.get("cp", 1)
    size = 4 if gradients == "fp32" else 2
    for planned in step.ranks:
        padded = -(-planned.parameters // replicas) * replicas
        held = planned.memory().at(-1).by_kind
        assert held["parameter"] == 2 * padded and held["gradient"] == size * padded
        assert held["optimizer state"] == 12 * padded // replicas + 4  # and its count of steps
        assert transfers_of(planned) == {
            ("all_gather", "bfloat16"): (1, 2 * padded),
            ("reduce_scatter", "float32" if size == 4 else "bfloat16"): (1, size * padded),
        }
        kinds = [action.kind for action in planned.step.actions]
        assert kinds[0] == "all_gather" and {"reduce_scatter", "optimizer"} < set(kinds) and "allreduce" not in kinds
        assert planned.settings["optimizer_sharding"] == "dp"


def test_each_rank_updates_its_part_and_all_ranks_all():
    plain, sharded = (plan({"dp": 4}, optimizer=ADAMW, optimizer_sharding=each).ranks[0] for each in (None, "dp"))
    flops = [Counter(planned.flops("exact").by_phase()["optimizer"]) for planned in (plain, sharded)]
    counts = len(list(build("megatron_gpt_tiny", device="meta", layers=2).parameters()))
    assert sum(flops[0].values()) - counts == 4 * (sum(flops[1].values()) - 1)
    assert plain.communication().total().wire == sharded.communication().total().wire


def test_stages_and_interleaved_stages_gather_and_scatter_once_each():
    step = plan({"pp": 2, "dp": 2}, 4, optimizer_sharding="dp", microbatches=4, schedule="interleaved")
    for planned in step.ranks:
        kinds = Counter(action.kind for action in planned.step.actions)
        assert kinds["all_gather"] == kinds["reduce_scatter"] == 2 and kinds["optimizer"] == 1
        assert {calls for calls, _ in transfers_of(planned).values()} == {2}


@pytest.mark.parametrize("schedule", ["zero-bubble", "1f1b"])
def test_split_backward_passes_accumulate_in_buffers_too(schedule):
    options = {"optimizer_sharding": "dp", "gradient_dtype": "fp32", "microbatches": 4, "schedule": schedule}
    step = plan({"pp": 2, "dp": 2}, 4, **options)
    for planned in step.ranks:
        timeline = planned.memory()
        assert timeline.at(-1).by_kind["gradient"] == timeline.at(len(timeline.trace.events) - 1).by_kind["gradient"]


def test_communication_is_beside_the_last_backward_and_the_first_forward_pass():
    step = plan({"dp": 8}, 6, 1024, optimizer_sharding="dp", gradient_dtype="fp32", microbatches=2)
    times = {
        size: estimate_step(step, device="H100", network="HGX H100 3200G", bucket_cap_mb=size) for size in (0, 40, None)
    }
    assert times[40].exposed["dp"] < 0.5 * times[0].exposed["dp"]
    assert times[None].bound < times[0].bound  # no time of launches
    assert times[40].exposed["dp"] < times[None].exposed["dp"] < times[0].exposed["dp"]
    buckets = {size: estimate.settings["gradient_buckets"] for size, estimate in times.items()}
    assert buckets == {0: "none, without overlap", 40: "40 MiB", None: "Megatron-Core's sizes"}
    assert any("gathered during the forward pass" in text for text in times[None].assumptions)
    assert any("gathered before the first" in text for text in times[0].assumptions)


@pytest.mark.parametrize(
    ("mesh", "options", "message"),
    [
        ({"fsdp": 2}, {}, "FSDP2 shards the optimizer and reduces .* itself: use optimizer_sharding without"),
        ({"dp": 2}, {"optimizer": None}, "optimizer_sharding needs an optimizer: pass one"),
        ({"dp": 2}, {"optimizer_sharding": "pd"}, "no optimizer_sharding 'pd': known is dp"),
        ({"dp": 2}, {"gradient_dtype": "fp23"}, r"no data type of gradients 'fp23': did you mean 'fp32'\?"),
        ({"dp": 2}, {"optimizer": torch.optim.Adafactor}, "Adafactor updates whole matrices, .*: choose another"),
        ({"dp": 2}, {"optimizer": partial(MasterWeights, make=Muon)}, "Muon updates whole matrices"),
        ({"dp": 2}, {"optimizer": ADAMW, "gradient_dtype": "fp32"}, "updates bfloat16 parameters by gradients of that"),
        ({"dp": 2}, {"optimizer": ADAMW, "gradient_dtype": "fp32", "optimizer_sharding": None}, "is for master"),
    ],
    ids=["fsdp", "no optimizer", "name", "dtype", "adafactor", "muon", "gradients", "not sharded"],
)
def test_what_makes_no_sense_is_refused(mesh, options, message):
    with pytest.raises(ValueError, match=message):
        plan(mesh, **{"optimizer_sharding": "dp", **options})
    assert issubclass(PlanError, ValueError)


def test_without_replicas_nothing_is_sharded():
    alone, sharded = (plan({"tp": 2}, optimizer_sharding=each).ranks[0] for each in (None, "dp"))
    assert alone.trace.calls == sharded.trace.calls and "optimizer_sharding" not in sharded.settings
