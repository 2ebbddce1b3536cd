"""Recorded passes as programs: kernels, fused modules, what waits for which collective, and work of unknown time."""

import itertools
import json
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from fvflops import (
    Efficiency,
    MasterWeights,
    estimate_step,
    find_device,
    find_efficiency,
    plan_rank,
    plan_step,
    record_call,
)
from fvflops.devices.kernel_models.products import Product
from fvflops.plan.rank_step import Action
from fvflops.plan.step_time.calibration import KernelTimer
from fvflops.plan.step_time.kernel_times import UNKNOWN, kernel_of
from fvflops.plan.step_time.pass_program import Collective, Run, StreamRun, Wait, read_program
from fvflops.plan.step_time.step_program import read_step
from fvflops.plan.step_time.step_time_report import estimate_report
from fvflops.reports.formats import write_document
from fvflops.trace import Signature, TraceError
from fvflops.zoo import build
from tests.support.models.parts import Applied

TOKENS = torch.ones(1, 16, dtype=torch.int64)


class Norm(nn.Module):
    def forward(self, x):
        return x * (x * x).mean(-1, keepdim=True).rsqrt()


def kernels_of(call, *inputs):
    trace = record_call(call, inputs)
    kernels = map(kernel_of, trace.signatures)
    return [kernel for kernel in kernels if kernel is not None]


def plan(mesh, **options):
    return plan_rank(build("llama_tiny", device="meta"), TOKENS, mesh=mesh, table="exact", **options)


def program_of(planned, kind="forward", **options):
    recorded = planned.step.pass_of(Action(kind, 0, 0))
    return read_program(recorded.trace, recorded.begin, recorded.end, **options)


def launches(program):
    return [program.launches[index] for item in program.items if isinstance(item, Run) for index in item.items]


def test_a_product_has_its_shape_and_dtype():
    x = torch.ones(2, 8, 32, dtype=torch.bfloat16)
    (kernel,) = kernels_of(torch.nn.functional.linear, x, torch.ones(64, 32, dtype=torch.bfloat16))
    assert (kernel.kind, kernel.dtype, kernel.macs) == ("matmul", "bfloat16", 16 * 64 * 32)
    assert kernel.shape == Product(16, 64, 32)
    assert kernel.nbytes == 2 * (16 * 32 + 64 * 32 + 16 * 64)
    (batched,) = kernels_of(torch.bmm, torch.ones(3, 40, 50), torch.ones(3, 50, 60))
    assert batched.shape == Product(40, 60, 50, batch=3, operand_bytes=4, result_bytes=4, alignment=8)


def test_pointwise_ops_and_reductions_are_bound_by_memory_and_views_are_no_kernels():
    (kernel,) = kernels_of(torch.add, torch.ones(100), torch.ones(100))
    assert (kernel.kind, kernel.nbytes) == ("memory", 3 * 400)
    (norm,) = kernels_of(nn.LayerNorm(64), torch.ones(100, 64))
    assert norm.kind == "memory"
    assert kernels_of(lambda x: x.view(10, 10).t(), torch.ones(100)) == []


@pytest.mark.parametrize(
    ("keys", "options", "macs"),
    [
        (8, {"is_causal": True}, 2 * 2 * 36 * 16),  # 2 products of 2 heads, of the unmasked pairs
        (8, {"attn_mask": torch.ones(8, 8).tril().bool()}, 2 * 2 * 64 * 16),  # kernels do not skip what a tensor masks
        # Of one of 4 ranks with context parallelism: the ranks' mean, without the half diagonal.
        (32, {"is_causal": True}, 2 * 2 * 8 * 32 * 16 // 2),
    ],
    ids=["causal", "mask", "part of a sequence"],
)
def test_attention_computes_the_pairs_that_its_kernel_does_not_skip(keys, options, macs):
    q, k = torch.ones(1, 2, 8, 16), torch.ones(1, 2, keys, 16)
    trace = record_call(nn.functional.scaled_dot_product_attention, (q, k, k), kwargs=options)
    (attention,) = [kernel for kernel in map(kernel_of, trace.signatures) if kernel and kernel.kind == "attention"]
    assert attention.macs == macs


def test_the_ops_of_a_fused_module_are_one_kernel():
    trace = record_call(
        Applied(
            lambda self, x: self.down(self.norm(self.up(x))), up=nn.Linear(16, 64), norm=Norm(), down=nn.Linear(64, 16)
        ),
        (torch.ones(4, 16),),
    )
    name = f"{Norm.__module__}.{Norm.__qualname__}"
    plain, fused = read_program(trace), read_program(trace, fused=[name])
    assert Counter(launch.module for launch in launches(plain))["norm"] > 1
    assert [(launch.module, launch.op) for launch in launches(fused)] == [
        ("up", "aten::addmm"),
        ("norm", "fused"),
        ("down", "aten::addmm"),
    ]
    # It reads its input and writes its result, and nothing between.
    assert launches(fused)[1].kernel.nbytes == 2 * 4 * 64 * 4
    products = [launch.kernel for launch in launches(plain) if launch.kernel.kind == "matmul"]
    assert products == [launch.kernel for launch in launches(fused) if launch.kernel.kind == "matmul"]


def test_a_reader_of_a_collective_waits_for_it():
    program = program_of(plan({"tp": 2}))
    numbers = [item.number for item in program.items if isinstance(item, Collective)]
    waits = [item.number for item in program.items if isinstance(item, Wait)]
    assert len(numbers) == 6 and waits == numbers  # of the embedding, two in each layer, and the logits
    # In a layer the next kernel reads the sum.
    for begin, item in enumerate(program.items):
        if isinstance(item, Collective) and item.module:
            assert isinstance(program.items[begin - 1], Run)
    last = max(begin for begin, item in enumerate(program.items) if isinstance(item, Collective))
    assert program.items[last + 1] == Wait(numbers[-1])


def test_fsdp_gathers_ahead_of_the_module_that_waits():
    program = program_of(plan({"fsdp": 4}))
    gathers = [item for item in program.items if isinstance(item, Collective)]
    # The root with embedding, norm and head, and two layers; each waits for the end of waiting of the one before it.
    assert [item.call.collective for item in gathers] == ["all_gather"] * 3
    assert [item.gate for item in gathers] == [-1, gathers[0].number, gathers[1].number]
    waits = [item.number for item in program.items if isinstance(item, Wait)]
    assert waits == [item.number for item in gathers]


def reductions_of(program):
    found = [item for item in program.items if isinstance(item, Collective) and item.gate is None]
    return [item for item in found if item.call.collective == "reduce_scatter"]


def test_a_backward_pass_reduces_gradients_that_only_the_next_reduction_waits_for():
    program = program_of(plan({"fsdp": 4}, microbatches=2), "backward")
    reductions = reductions_of(program)
    assert len(reductions) == 3
    for earlier, later in itertools.pairwise(reductions):
        assert program.items[program.items.index(later) - 1] == Wait(earlier.number)
    waited = [item.number for item in program.items if isinstance(item, Wait)]
    assert [waited.count(item.number) for item in reductions] == [1, 1, 0]


def test_fsdp_accumulates_gradients_on_the_stream_of_their_reduction():
    """As torch's foreach_reduce, under post_reduce_stream: the compute stream goes on."""
    planned = plan({"fsdp": 4}, microbatches=2)
    recorded = planned.step.pass_of(Action("backward", 0, 1))
    program = read_program(recorded.trace, recorded.begin, recorded.end)
    added = [item for item in program.items if isinstance(item, StreamRun)]
    assert {program.launches[item.item].op for item in added} == {"aten::add_"}
    assert {item.number for item in added} == {item.number for item in reductions_of(program)}
    waited = [item.number for item in program.items if isinstance(item, Wait)]
    assert waited.count(added[-1].number) == 0


def test_replicas_of_shards_reduce_after_the_shards_while_the_compute_stream_goes_on():
    program = program_of(plan({"dp": 2, "fsdp": 4}), "backward")
    sums = [item for item in program.items if isinstance(item, Collective) and item.call.collective == "all_reduce"]
    assert [item.after for item in sums] == [item.number for item in reductions_of(program)]
    assert not {item.number for item in program.items if isinstance(item, Wait)} & {item.number for item in sums}


def test_a_module_that_is_sharded_fully_keeps_its_class():
    planned = plan({"fsdp": 4})
    assert "fvflops.zoo.llama.Block" in planned.recorded.modules.by_name["layers.0"].classes
    fused = launches(program_of(planned, fused={"fvflops.zoo.llama.Block"}))
    assert len(fused) < len(launches(program_of(planned))) and any(launch.op == "fused" for launch in fused)


def test_what_an_optimizer_creates_in_its_first_step_takes_no_time():
    gpt = build("megatron_gpt_tiny", device="meta").half()
    optimizer = partial(MasterWeights, make=partial(torch.optim.AdamW, fused=True))
    planned = plan_rank(gpt, (TOKENS, TOKENS), mesh={"dp": 2}, optimizer=optimizer)
    recorded = planned.step.pass_of(Action("optimizer", -1))
    updates = launches(read_program(recorded.trace, recorded.begin, recorded.end))
    nbytes = Counter()
    for launch in updates:
        nbytes[launch.op] += launch.kernel.nbytes
    # Gradients are copied to float32, and the new weights to float16, but not the weights to their copies.
    assert nbytes["aten::_to_copy"] == nbytes["aten::_foreach_copy_"] == (2 + 4) * planned.parameters


def test_a_trace_without_order_is_an_error():
    with pytest.raises(TraceError, match="no ordered events"):
        read_program(record_call(torch.relu, (torch.ones(2),)).aggregate())


def test_torchaos_float8_linears_take_the_float8_peak_and_casts_of_the_module_one_kernel():
    float8 = pytest.importorskip("torchao.float8")
    with torch.device("meta"):
        tokens = torch.ones(8192, 4096, dtype=torch.bfloat16)
        model = nn.Sequential(nn.Linear(4096, 4096, bias=False, dtype=torch.bfloat16))
        converted = float8.convert_to_float8_training(nn.Sequential(nn.Linear(4096, 4096, bias=False).bfloat16()))
    timer = KernelTimer(find_device("H100"), find_efficiency("H100"))
    times = []
    for subject in (model, converted):
        plan = plan_rank(subject, tokens, mesh={"dp": 1}, device="cuda")
        linear = "torchao.float8.float8_linear.Float8Linear"
        programs = [
            read_program(plan.trace, item.begin, item.end, fused=[linear]) for item in plan.step.passes.values()
        ]
        launches = [launch for program in programs for launch in program.launches]
        products = [
            timer.seconds(launch.kernel) for launch in launches if launch.op in ("aten::mm", "aten::_scaled_mm")
        ]
        times.append(max(products))
    assert {launch.op for launch in launches if launch.module == "0"} == {"aten::_scaled_mm", "fused"}
    assert 0.5 < times[1] / times[0] < 0.65


EFFICIENCY = Efficiency(source="a test")
# A custom op without a formula, and one that communicates without a rule.
OPS = ("fvflops_step::scan", "symm_mem::fvflops_reduce")


def net(self, x):
    hidden = self.layer(x)
    scanned = torch.ops.fvflops_step.scan(hidden.detach())
    reduced = torch.ops.symm_mem.fvflops_reduce(hidden.detach())
    return (hidden + scanned + reduced).view(-1)


@pytest.fixture(scope="module")
def step():
    """Plan of a step with two microbatches, in each of which both ops run."""
    with ExitStack() as stack:
        for op in OPS:
            space, _, name = op.partition("::")
            library = stack.enter_context(torch.library._scoped_library(space, "FRAGMENT"))
            library.define(f"{name}(Tensor x) -> Tensor")
            library.impl(name, torch.clone, "CompositeExplicitAutograd")
        yield plan_step(
            Applied(net, layer=nn.Linear(8, 8)),
            torch.ones(4, 8),
            mesh={"dp": 2},
            microbatches=2,
            optimizer=torch.optim.AdamW,
        )


def test_a_step_names_what_it_has_no_time_for(step):
    estimate = estimate_step(step, device="H100", efficiency=EFFICIENCY)
    assert estimate.unknown == {"symm_mem::fvflops_reduce": 2}
    assert estimate.bytes_only == {"fvflops_step::scan": 2}
    document = estimate_report(estimate)
    text = " ".join(write_document(document).split())
    assert "Time unknown, so not in the step: symm_mem::fvflops_reduce (2 calls)." in text
    assert "FLOPs unknown, so timed by their bytes: fvflops_step::scan (2 calls)." in text
    data = json.loads(write_document(document, "json"))
    assert data["unknown_time"] == {"symm_mem::fvflops_reduce": 2}
    assert data["time_of_bytes_only"] == {"fvflops_step::scan": 2}


def test_calls_that_were_not_run_are_named_too(step):
    opaque = Signature("mylib::fused", (), (), (), "mylib::fused(...)")
    assert kernel_of(opaque) == UNKNOWN
    (rank,) = step.ranks
    passes = {
        action: replace(item, added=((opaque, "optimizer", 3),)) if action.kind == "optimizer" else item
        for action, item in rank.step.passes.items()
    }
    program = read_step([replace(rank, step=replace(rank.step, passes=passes))])
    assert program.count("unknown") == {"symm_mem::fvflops_reduce": 2, "mylib::fused": 3}


def test_all_work_of_a_model_has_a_time():
    step = plan_step(
        build("llama_tiny", device="meta"), torch.ones(2, 16, dtype=torch.int64), mesh={"fsdp": 2, "tp": 2}
    )
    program = read_step(step.ranks)
    assert not program.count("unknown") and not program.count("bytes_only")
