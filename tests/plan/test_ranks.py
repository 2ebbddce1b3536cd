"""Computation and communication of each rank of a distributed run, recorded and planned on one machine."""

import json
import time
from collections import Counter
from contextlib import suppress
from dataclasses import MISSING, fields, replace
from functools import reduce
from inspect import Parameter, signature

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fvflops import FlopCountAnalysis, load_table, record_call
from fvflops.cli import main
from fvflops.plan.communication import Volume, read_communication
from fvflops.plan.fake_process_group import fake_process_group
from fvflops.plan.memory.memory_savings import ADAFACTOR_ASSUMES
from fvflops.plan.plan_options import PlanError, PlanOptions
from fvflops.plan.plan_report import plan_report
from fvflops.plan.plans import plan_rank
from fvflops.plan.sharding.sharding_styles import ShardingError
from fvflops.plan.trace_changes import Ranks, gather
from fvflops.reports.formats import FORMATS, write_document
from fvflops.trace import Signature, Symbol, TensorSpec, Trace
from fvflops.trace.process_group import ProcessGroupSpec
from fvflops.zoo import build
from fvflops.zoo.llama import Llama, LlamaConfig
from tests.support.processes.rank_worker import (
    CASES,
    FEATURES,
    MICROBATCHES,
    RANKS,
    TOKENS,
    Wide,
    record,
    shard_fully,
    train,
)
from tests.support.processes.start import run_ranks
from tests.support.reports.report_formats import check_report
from tests.support.trace_comparison import transfers

FLOAT = 4  # bytes of a float32

# The tiny Llama: 2 layers, hidden size 64, MLP size 176, 2 of 4 heads for keys and values, vocabulary of 256.
LAYERS, WIDTH, MLP_WIDTH, KEYS, VOCABULARY = 2, 64, 176, 32, 256
BLOCK = 2 * WIDTH * WIDTH + 2 * WIDTH * KEYS + 3 * WIDTH * MLP_WIDTH + 2 * WIDTH
ROOT_PARAMETERS = 2 * VOCABULARY * WIDTH + WIDTH
PARAMETERS = ROOT_PARAMETERS + LAYERS * BLOCK
HIDDEN = TOKENS.numel() * WIDTH
LOGITS = TOKENS.numel() * VOCABULARY


@pytest.fixture(scope="module")
def runs():
    """Return case → the Ranks of each of its steps, recorded by two processes."""
    return {
        name: [Ranks({int(rank): Trace.from_json(text) for rank, text in step.items()}) for step in steps]
        for name, steps in run_ranks("rank_worker", RANKS)[0].items()
    }


def plan_case(name, rank):
    make, _, inputs = CASES[name]
    axis, _, how = name.partition(" ")
    options = {"microbatches": MICROBATCHES} if axis == "pp" else {"sequence_parallel": how == "sequence"}
    inputs = inputs[: len(inputs) // options.get("microbatches", 1)]
    return plan_rank(make(), (inputs,), mesh={axis: RANKS}, rank=rank, table="exact", **options)


def payloads(communication):
    return {key: payload for key, (_, payload) in transfers(communication).items()}


def analyse(trace):
    return FlopCountAnalysis.from_trace(trace, table="exact").uncalled_modules_warnings(False)


@pytest.mark.parametrize("name", CASES)
def test_every_step_counts_the_same(runs, name):
    first, *others = runs[name]
    assert first.flops(table="exact").least > 0 and first.payload().least > 0
    for step in others:
        assert step.flops(table="exact") == first.flops(table="exact")
        for rank in range(RANKS):
            assert analyse(step.traces[rank]).by_phase() == analyse(first.traces[rank]).by_phase()
            assert payloads(step.communication()[rank]) == payloads(first.communication()[rank])


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("name", CASES)
def test_the_plan_equals_each_process(runs, name, rank):
    plan, trace = plan_case(name, rank), runs[name][0].traces[rank]
    assert plan.flops("exact").by_phase() == analyse(trace).by_phase()
    assert payloads(plan.communication()) == payloads(read_communication(trace))
    assert bool(plan.derived) == name.startswith(("dp", "cp", "pp"))
    assert {key.axis for key in plan.communication().by_collective_and_group()} == {name.partition(" ")[0]}


# Sums of hidden states: the embedding's, each layer's attention's and MLP's; gradients have the head's for the first.
SUMS = 2 * (1 + 2 * LAYERS)
KEYS_AND_VALUES = 2 * LAYERS * RANKS * TOKENS.numel() * KEYS
# Of an odd number of rows the first rank has one more, to which the other's are padded.
PADDED = 6 * 6 + 6 + 2 * 6 + 4 * 5
WIDE_PRODUCTS = 200_000 * (6 + 2)
# Case → (collective, dtype) → the payload of a rank, in elements.
PAYLOADS = {
    "dp": {("all_reduce", "float32"): PARAMETERS},
    "dp buffers": {
        ("all_reduce", "float32"): 6 * 5 + 5 + 2 * 5 + 5 * 3,
        ("broadcast", "float32"): 2 * 5,  # running mean and variance
        ("broadcast", "int64"): 2,  # the number of batches has 8 bytes
    },
    # The root's parameters stay after its forward.
    "fsdp": {
        ("all_gather", "float32"): ROOT_PARAMETERS + 2 * LAYERS * BLOCK,
        ("reduce_scatter", "float32"): PARAMETERS,
    },
    "fsdp uneven": {("all_gather", "float32"): 2 * PADDED, ("reduce_scatter", "float32"): PADDED},
    "fsdp wide": {("all_gather", "float32"): 2 * (WIDE_PRODUCTS + 2), ("reduce_scatter", "float32"): WIDE_PRODUCTS + 2},
    "tp": {("all_reduce", "float32"): SUMS * HIDDEN, ("all_gather", "float32"): LOGITS},
    "tp sequence": {("reduce_scatter", "float32"): SUMS * HIDDEN, ("all_gather", "float32"): SUMS * HIDDEN + LOGITS},
    "pp": {("send", "float32"): HIDDEN, ("receive", "float32"): HIDDEN},
    "cp": {
        ("all_gather", "float32"): KEYS_AND_VALUES,
        ("reduce_scatter", "float32"): KEYS_AND_VALUES,
        ("all_reduce", "float32"): PARAMETERS,
    },
}


@pytest.mark.parametrize("name", PAYLOADS)
def test_each_process_communicates_what_its_layout_needs(runs, name):
    for communication in runs[name][0].communication().values():
        expected = {(kind, RANKS, dtype): FLOAT * number for (kind, dtype), number in PAYLOADS[name].items()}
        assert payloads(communication) == expected
        phases = communication.by_phase().values()
        assert sum(volume.payload for volume in phases) == communication.total().payload


@pytest.mark.parametrize("name", ["fsdp", "tp", "tp sequence", "pp", "cp"])
def test_the_processes_compute_the_products_of_the_model(runs, name):
    # With cp each rank has a part of the queries, and all keys of the whole sequence.
    length = TOKENS.shape[1] * (RANKS if name == "cp" else 1)
    tokens = torch.ones(len(TOKENS), length, dtype=torch.int64)
    full = record_call(build("llama_tiny"), (tokens,), loss=lambda y: y.sum(), stops_at=load_table("exact").stops_at)
    macs = runs[name][0].macs(table="exact")
    assert macs.total == analyse(full).macs() * (RANKS if name == "fsdp" else 1)
    assert name in ("pp", "cp") or macs.least == macs.most


def test_communication_belongs_to_modules_and_phases(runs):
    communication = runs["tp"][0].communication()[0]
    modules = communication.by_module()
    assert modules[""] == communication.total() == reduce(Volume.plus, communication.by_phase().values())
    assert modules["layers.0.mlp.down_proj"] == Volume(1, FLOAT * HIDDEN, FLOAT * HIDDEN)
    assert communication.by_axis().keys() == {"0"} and not communication.unsupported


def test_ranks_are_summed(runs):
    step = runs["tp"][0]
    flops = step.flops(table="exact")
    assert flops.total == flops.least + flops.most == analyse(step.merged()).total()
    assert step.flops("layers.1.mlp", table="exact").by_rank[0] == analyse(step.traces[0]).by_module()["layers.1.mlp"]
    with pytest.raises(KeyError, match=r"layers\.1"):
        step.flops("layers.9")


def test_gather_needs_a_process_group():
    trace = record_call(torch.relu, (torch.ones(2),))
    with pytest.raises(RuntimeError, match="init_process_group first"):
        gather(trace)


def plan_llama(mesh, rank=0, **options):
    return plan_rank(build("llama_tiny", device="meta"), (TOKENS,), mesh=mesh, rank=rank, table="exact", **options)


def make_transformers_llama():
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": WIDTH, "intermediate_size": MLP_WIDTH, "num_attention_heads": 4, "num_key_value_heads": 2}
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(num_hidden_layers=LAYERS, vocab_size=VOCABULARY, **sizes)
        )


def test_llama_3_405b_at_16384_ranks_in_seconds():
    start = time.process_time()
    tokens, width, layers, vocabulary, ranks = 8192, 16_384, 126, 128_256, 8
    plan = plan_rank(
        build("llama3_405b"), (torch.ones(1, tokens, dtype=torch.int64),), mesh={"dp": 2048, "tp": ranks}, rank=12_345
    )
    assert time.process_time() - start < 90
    norms = (2 * layers + 1) * width
    assert plan.parameters == (405_853_388_800 - norms) // ranks + norms and plan.model_parameters == 405_853_388_800
    # Twice as many products backward as forward in the linears, five for two in the attention.
    linears, attention = 403_747_897_344 * tokens, 2 * layers * width * tokens * tokens
    assert plan.flops().macs() * ranks * 2 == 2 * 3 * linears + 7 * attention
    hidden = FLOAT * tokens * width
    assert {key: volume.payload for key, volume in plan.communication().by_collective_and_group().items()} == {
        ("all_reduce", "tp", 8, "float32"): 2 * (2 * layers + 1) * hidden,
        ("all_gather", "tp", 8, "float32"): FLOAT * tokens * vocabulary,
        ("all_reduce", "dp", 2048, "float32"): FLOAT * plan.parameters,
    }
    assert plan.world == 16_384 and plan.coordinates == {"dp": 1543, "tp": 1}


def test_axes_nest():
    full = plan_llama({"tp": 2})
    both = plan_llama({"dp": 3, "fsdp": 4, "tp": 2}, rank=23)
    assert both.coordinates == {"dp": 2, "fsdp": 3, "tp": 1} and not both.derived
    axes = both.communication().by_axis()
    assert axes["tp"] == full.communication().by_axis()["tp"]
    assert both.flops().macs() == full.flops().macs() and both.parameters * 4 == full.parameters
    reduced = both.communication().by_collective_and_group()
    sharded = FLOAT * full.parameters
    assert reduced["reduce_scatter", "fsdp", 4, "float32"].payload == sharded
    assert reduced["all_reduce", "dp", 3, "float32"].payload == sharded // 4
    ranks = {item.group.axis: (item.group.first, item.group.step) for item in both.communication().transfers}
    assert ranks == {"dp": (7, 8), "fsdp": (17, 2), "tp": (22, 1)}


def test_keys_of_all_parts_are_gathered_with_the_kernels_of_cuda_too():
    cpu, cuda = (plan_llama({"cp": 2}, device=device).communication().by_axis() for device in ("cpu", "cuda"))
    assert cuda == cpu and cuda["cp"].calls > 1


def test_ranks_that_share_a_parameter_reduce_its_gradient():
    replicas = plan_llama({"dp": 2, "cp": 2, "tp": 2})
    assert replicas.communication().by_axis()["dp+cp"].payload == FLOAT * replicas.parameters
    nested = plan_llama({"dp": 2, "tp": 2, "cp": 2}, rank=7)
    (group,) = {item.group for item in nested.communication().transfers if item.group.axis == "dp+cp"}
    assert (group.size, group.first, group.step) == (4, 2, None)  # 2, 3, 6 and 7
    # All ranks are in the group, for which torch has no axis.
    whole = plan_llama({"dp": 2, "cp": 2})
    assert set(whole.communication().by_axis()) == {"cp", "dp+cp"}
    assert whole.derived[0].startswith("DDP gradient averaging over dp+cp (")
    swapped = plan_llama({"cp": 2, "dp": 2})
    assert set(swapped.communication().by_axis()) == {"cp", "cp+dp"}
    assert swapped.communication().by_axis()["cp+dp"] == whole.communication().by_axis()["dp+cp"]
    assert swapped.flops().total() == whole.flops().total()
    sharded = plan_llama({"dp": 2, "fsdp": 2, "cp": 2})
    sums = sharded.communication().by_collective_and_group()
    by_axis = {(key.collective, key.axis): volume.payload for key, volume in sums.items()}
    assert by_axis["reduce_scatter", "fsdp+cp"] == FLOAT * PARAMETERS
    assert by_axis["all_reduce", "dp"] == FLOAT * PARAMETERS // 4 and sharded.parameters == PARAMETERS // 4


@pytest.mark.parametrize("library", ["zoo", "transformers"])
def test_stages_share_the_layers(library):
    model = build("llama_tiny", device="meta")
    if library == "transformers":
        model = make_transformers_llama()
    mesh = {"pp": 2, "dp": 3, "tp": 2}
    inputs = {"tokens": TOKENS} if library == "zoo" else {"input_ids": TOKENS, "use_cache": False}
    plans = [plan_rank(model, (), inputs, mesh=mesh, rank=rank, microbatches=4) for rank in (0, 6)]
    full = plan_rank(model, (), inputs, mesh={"tp": 2})
    assert [plan.coordinates["pp"] for plan in plans] == [0, 1]
    assert sum(plan.parameters for plan in plans) == full.parameters
    assert sum(plan.flops().macs() for plan in plans) == 4 * full.flops().macs()
    for plan in plans:
        axes = plan.communication().by_axis()
        assert axes["pp"] == Volume(8, 8 * FLOAT * HIDDEN, 8 * FLOAT * HIDDEN)
        assert axes["dp"].payload >= FLOAT * plan.parameters
    both = sum(plan.communication().by_axis()["tp"].payload for plan in plans)
    assert both == 4 * full.communication().by_axis()["tp"].payload


def test_the_same_mesh_again_and_another_between():
    model = Llama(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, layers=1, heads=4, kv_heads=4))
    meshes = {"dp": 4, "tp": 2}, {"dp": 2, "tp": 4}, {"dp": 4, "tp": 2}
    first, other, again = (plan_rank(model, (TOKENS,), mesh=mesh) for mesh in meshes)
    assert first.trace.calls == again.trace.calls and first.trace.signatures == again.trace.signatures
    assert {key.size for key in other.communication().by_collective_and_group()} == {2, 4}
    assert {key.size for key in again.communication().by_collective_and_group() if key.axis == "tp"} == {2}


def test_a_plan_does_not_change_the_model_or_the_program():
    model = build("llama_tiny")
    before = dict(model.named_parameters())
    plan_rank(model, (TOKENS,), mesh={"fsdp": 2, "tp": 2})
    assert all(before[name] is parameter for name, parameter in model.named_parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert not dist.is_initialized()
    with pytest.raises(ZeroDivisionError):
        plan_rank(model, (TOKENS,), mesh={"tp": 2}, loss=lambda y: 1 // 0)
    assert not dist.is_initialized()


def test_shape_execution_does_not_change_fsdp2():
    with fake_process_group(2, 0):
        model = shard_fully(Wide())
        first = record(model, FEATURES, "shapes")
        train(model, FEATURES)  # raises if a tensor has no values
        with torch.no_grad():
            model(FEATURES)  # the root's parameters stay gathered
        again = record(model, FEATURES, "shapes")
        train(model, FEATURES)
    assert analyse(first).total() == analyse(again).total() > 0


def test_gpt2_splits_its_heads():
    tokens = torch.ones(1, 64, dtype=torch.int64)
    model = build("gpt2", device="meta")
    single, split = (plan_rank(model, (tokens,), mesh={"tp": ranks}) for ranks in (1, 4))
    head = 3 * 64 * 768 * 50_257  # computed by every rank, forward and backward
    assert (split.flops().macs() - head) * 4 == single.flops().macs() - head
    assert {
        key.collective: volume.calls for key, volume in split.communication().by_collective_and_group().items()
    } == {"all_reduce": 4 * 12}
    with pytest.raises(ShardingError, match=r"tp=8 .*h.0.attn.heads is 12.: use tp=1, 2, 3, 4, 6 or 12"):
        plan_rank(model, (tokens,), mesh={"tp": 8})


def test_a_transformers_model_is_sharded_by_its_own_plan():
    plan = plan_rank(make_transformers_llama(), (TOKENS,), {"use_cache": False}, mesh={"dp": 8, "tp": 2})
    assert plan.flops().macs() == plan_llama({"tp": 2}).flops().macs()
    # Each projection sums the gradient of its input by itself; the frequencies of its positions are two buffers.
    assert {key: volume.payload for key, volume in plan.communication().by_collective_and_group().items()} == {
        ("all_reduce", "tp", 2, "float32"): FLOAT * HIDDEN * (1 + 2 * LAYERS + 5 * LAYERS + 1),
        ("all_gather", "tp", 2, "float32"): FLOAT * LOGITS,
        ("broadcast", "dp", 8, "float32"): 2 * FLOAT * WIDTH // 4 // 2,
        ("all_reduce", "dp", 8, "float32"): FLOAT * plan.parameters,
    }


def test_a_function_shards_any_model():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def split(model, mesh):
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    plan = plan_rank(model, (torch.ones(5, 6),), mesh={"tp": 4}, shard_by=split)
    assert plan.parameters == (6 * 8 + 8 + 8 * 3) // 4 + 3
    assert plan.communication().by_collective() == {"all_reduce": Volume(1, FLOAT * 15, 2 * 3 * FLOAT * 15 // 4)}
    with pytest.raises(ShardingError, match=r"no tensor-parallel plan is known for .*Sequential: pass shard_by"):
        plan_rank(model, (torch.ones(5, 6),), mesh={"tp": 4})
    assert plan_rank(model, (torch.ones(5, 6),), mesh={"dp": 4}, shard_by=split).parameters == 6 * 8 + 8 + 8 * 3 + 3


@pytest.mark.parametrize(
    ("mesh", "rank", "message"),
    [
        ({"tp": 8}, 8, "rank must be from 0 to 7 on this mesh; got 8"),
        ({"sp": 8}, 0, "the axes of a mesh must be among .*; got sp"),
        ({"fdsp": 8}, 0, r"got fdsp: did you mean 'fsdp'\?"),
        ({}, 0, "the axes of a mesh must be among .*; got none"),
        ({"dp": 0}, 0, "axis dp of the mesh must have at least 1 rank; got 0"),
        ({"tp": 3}, 0, r"tp=3 must divide the numbers of heads of .* .q_proj 4, k_proj 2, v_proj 2.: use tp=1 or 2"),
        ({"tp": 4}, 0, r"tp=4 must divide the numbers of heads of .* .q_proj 4, k_proj 2, v_proj 2.: use tp=1 or 2"),
    ],
    ids=["rank", "axis", "misspelt", "none", "size", "heads", "key heads"],
)
def test_an_invalid_mesh_raises(mesh, rank, message):
    with pytest.raises((PlanError, ShardingError), match=message):
        plan_llama(mesh, rank=rank)


def test_the_options_of_a_plan_are_the_keywords_of_plan_rank():
    _, _, _, *keywords = signature(plan_rank).parameters.items()
    options = {item.name: Parameter.empty if item.default is MISSING else item.default for item in fields(PlanOptions)}
    assert {name: item.default for name, item in keywords} == options


def test_work_that_a_plan_lacks_is_listed():
    assert plan_llama({"tp": 2}).left_out == ("the optimizer step",)
    assert "gradients of the norms" in plan_llama({"tp": 2}, sequence_parallel=True).left_out[0]
    # FSDP2 sums them itself, before it scatters them.
    both = plan_llama({"fsdp": 2, "tp": 2}, sequence_parallel=True)
    norms = (2 * LAYERS + 1) * WIDTH
    assert both.left_out == ("the optimizer step",)
    assert both.communication().by_collective_and_group()["all_reduce", "tp", 2, "float32"].payload == FLOAT * norms
    with pytest.raises(PlanError, match="FSDP2 is planned with the kernels of cpu or cuda, not of xpu"):
        plan_llama({"fsdp": 2}, device="xpu")


def test_an_optimizer_that_dtensor_cannot_step_raises():
    adafactor = {"optimizer": torch.optim.Adafactor, "assume": ADAFACTOR_ASSUMES}
    for mesh in ({"fsdp": 2}, {"tp": 2}):
        with pytest.raises(PlanError, match=r"DTensor cannot run Adafactor's step, .*: choose another optimizer"):
            plan_llama(mesh, **adafactor)
    assert plan_llama({"dp": 2}, **adafactor).left_out == ()


def test_a_program_with_a_process_group_raises():
    with fake_process_group(4, 0), pytest.raises(PlanError, match="this program has a process group"):
        plan_llama({"dp": 2})


def communicate(function, ranks=4):
    with fake_process_group(ranks, 0):
        trace = record_call(function, (torch.ones(8),), execution="real")
    return read_communication(Trace.from_json(trace.to_json()))


def buffers(sizes):
    return [torch.empty(size) for size in sizes]


# Payload of 8 floats: 32 bytes for each rank, or for all four.
COLLECTIVES = {
    "all_reduce": (lambda x: dist.all_reduce(x), Volume(1, 32, 48)),
    "all_gather": (lambda x: dist.all_gather(buffers([8] * 4), x), Volume(1, 128, 96)),
    "all_gather into": (lambda x: dist.all_gather_into_tensor(torch.empty(32), x), Volume(1, 128, 96)),
    "reduce_scatter": (lambda x: dist.reduce_scatter_tensor(torch.empty(2), x), Volume(1, 32, 24)),
    "reduce_scatter list": (lambda x: dist.reduce_scatter(torch.empty(2), list(x.split(2))), Volume(1, 32, 24)),
    "all_to_all": (lambda x: dist.all_to_all_single(torch.empty(8), x), Volume(1, 32, 24)),
    "broadcast": (lambda x: dist.broadcast(x, 0), Volume(1, 32, 32)),
    "reduce": (lambda x: dist.reduce(x, 0), Volume(1, 32, 32)),
    "gather": (lambda x: dist.gather(x, buffers([8] * 4)), Volume(1, 32, 32)),
    "scatter": (lambda x: dist.scatter(x, buffers([8] * 4)), Volume(1, 32, 32)),
    "send": (lambda x: dist.send(x, 1), Volume(1, 32, 32)),
    "receive": (lambda x: dist.recv(x, 1), Volume(1, 32, 32)),
    "barrier": (lambda x: dist.barrier(), Volume(1, 0, 0)),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_carries_its_payload(name):
    function, volume = COLLECTIVES[name]
    communication = communicate(function)
    assert communication.by_collective() == {name.partition(" ")[0]: volume} and not communication.unsupported
    assert [item.group for item in communication.transfers] == [ProcessGroupSpec("0", 4, "", 0, 1)]


def test_bytes_on_the_wire_are_rounded_up():
    assert communicate(lambda x: dist.all_reduce(x[:1]), ranks=3).total() == Volume(1, 4, 6)  # 2 * 2/3 * 4 = 5.33
    assert communicate(lambda x: dist.all_reduce(x), ranks=1).total() == Volume(1, 32, 0)


def test_an_op_without_a_rule_is_unsupported():
    def of(packet, *inputs):
        signature = Signature(packet, ("input",), inputs, ())
        trace = record_call(torch.relu, (torch.ones(2),))
        return read_communication(
            Trace(trace.modules, (), ((),), (signature,), (), {(0, 0, "forward"): 3}, {}, about=trace.about)
        )

    assert of("symm_mem::fused", TensorSpec((2,))).unsupported == Counter({"symm_mem::fused": 3})
    without_group = of("_c10d_functional::all_reduce", TensorSpec((2,)), Symbol("object", "ScriptObject"))
    assert without_group.total() == Volume(3, 24, None)
    assert next(iter(without_group.by_collective_and_group())).size is None


def test_the_command_line_plans(capsys):
    assert main(["plan", "zoo:llama_tiny", "--mesh", "dp=2048,tp=2", "--rank", "3", "--table", "exact"]) == 0
    text = capsys.readouterr().out
    assert "rank 3 of 4,096 (dp 1, tp 1)\n" in text and "\nEstimated: DDP gradient averaging over dp (all-red" in text
    assert main(["plan", "zoo:llama_tiny", "--mesh", "fsdp=2", "--dtype", "bfloat16", "--format", "json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["parameters"] * 2 == record["parameter_bytes"] == PARAMETERS
    assert {item["dtype"] for item in record["communication"]} == {"bfloat16"} and record["unsupported_ops"] == {}


@pytest.mark.parametrize("format", list(FORMATS))
def test_every_format_writes_the_plan(format, capsys):
    arguments = ["--mesh", "dp=2048,cp=2", "--input", "1,16:int64", "--sort", "payload", "--top", "2"]
    assert main(["plan", "zoo:llama_tiny", *arguments, "--format", format]) == 0
    written = check_report(format, capsys.readouterr().out, "plan")
    # The gradients, and the keys and values of both layers and parts, in four bytes.
    if format == "csv":
        assert [row["payload"] for row in written] == [str(4 * PARAMETERS), str(4 * 2 * LAYERS * 2 * 16 * KEYS)]
    elif format == "json":
        assert written["parameters"] == PARAMETERS and len(written["communication"]) == 3
    else:
        assert f"{4 * PARAMETERS:,}" in written.replace("{,}", ",") and "1 more collective." in written


def test_a_plan_says_what_is_assumed_and_unsupported():
    plan = plan_llama({"tp": 2})
    calls = {(0, 0, "forward"): 3}
    signature = Signature("symm_mem::fused", ("input",), (TensorSpec((2,)),), ())
    about = {**plan.trace.about, "given": "aten::index=0.25", "supposed": "aten::nonzero: all elements are true"}
    trace = Trace(plan.trace.modules, (), ((),), (signature,), (), calls, {}, about=about)
    text = write_document(plan_report(replace(plan, trace=trace), load_table("default"), name="llama"))
    assert "Unsupported, so not in the FLOPs: symm_mem::fused (3 calls)." in text
    assert "Unsupported, so not in the bytes: symm_mem::fused (3 calls)." in text
    assert "Given for data-dependent ops: aten::index=0.25." in text
    assert "ASSUMED (data-dependent): aten::nonzero: all elements are true." in text and "collective" not in text


def test_a_plan_counts_by_its_table():
    plan = plan_llama({"tp": 2})  # by "exact"
    assert plan.flops().total() == plan.flops("exact").total() > plan.flops("default").total()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh", "dp=two"], "such as dp=128,tp=8; got 'dp=two'"),
        (["--mesh", "dp=2,dp=2"], "such as dp=128,tp=8; got 'dp=2'"),
        (["--mesh", "tp=2", "--shard", "nowhere"], "--shard nowhere: write package.module:function"),
        (["--mesh", "tp=3"], "(q_proj 4, k_proj 2, v_proj 2): use tp=1 or 2\n"),  # without the default inputs
    ],
    ids=["size", "twice", "shard", "heads"],
)
def test_a_mistake_on_the_command_line_is_reported(capsys, arguments, message):
    with suppress(SystemExit):  # argparse's own mistakes
        assert main(["plan", "zoo:llama_tiny", *arguments]) == 2
    assert message in capsys.readouterr().err
