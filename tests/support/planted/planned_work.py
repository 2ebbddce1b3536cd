"""The work of a planned step as a GPU's trace shows it: kernels with their names, shapes and times, and collectives."""

import zlib
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from fvflops import estimate_step, plan_step
from fvflops.plan.rank_plan import RankPlan
from fvflops.plan.step_time.calibration import KernelTimer
from fvflops.plan.step_time.kernel_times import kernel_of
from fvflops.plan.step_time.pass_program import Collective as PlannedCollective
from fvflops.plan.step_time.pass_program import Launch, Run, StreamRun
from fvflops.plan.step_time.schedule_simulation import time_collective
from fvflops.plan.step_time.step_estimate import StepEstimate
from fvflops.plan.step_time.step_program import StepProgram, read_step
from fvflops.trace import Signature, TensorSpec
from fvflops.trace.module_tree import innermost
from fvflops.zoo import build
from tests.support.planted.synthetic_trace import Collective, Op, Wait, Work

TYPES = {
    "bfloat16": "c10::BFloat16",
    "float16": "c10::Half",
    "float32": "float",
    "float64": "double",
    "int64": "long int",
    "int32": "int",
    "bool": "bool",
}
# Kernels of matrix products by dtype, as cuBLAS names them on an H100.
PRODUCTS = {
    "bfloat16": "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT",
    "float16": "nvjet_hsh_128x256_64x4_2x1_v_bz_coopA_TNT",
    "float32": "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>(Params)",
    "tf32": "sm90_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize128x128x32_cublas",
    "float64": "void cutlass::Kernel2<cutlass_80_tensorop_d884gemm_64x64_16x4_nn_align1>(Params)",
}
_ATTENTION = "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>(Flash_fwd_params)"
_ATTENTION_BACKWARD = (
    "void flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128>>(Flash_bwd_params)"
)
_ELEMENTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::Functor>(int)"
_OTHERS = {
    "embedding": "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16>(int)",
    "copy": "void at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)",
    "split_with_sizes_copy": "void at::native::detail::split_with_sizes_copy_out_contiguous_kernel<float>(char**)",
    "norm": "void at::native::vectorized_layer_norm_kernel<c10::BFloat16, float>(int, float)",
    "softmax": "void at::native::softmax_warp_forward<float>(int)",
    "_fused_adamw": "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor>(int)",
    "sum": "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>(int)",
}


@cache
def plan(case: str) -> tuple[StepEstimate, StepProgram]:
    """Return a planned step: one of CASES."""
    model, sizes, inputs, options, device = CASES[case]
    tokens = torch.ones(*inputs, dtype=torch.int64, device="meta")
    built = build(model, device="meta", **sizes).to(torch.bfloat16)
    optimizer = {"optimizer": lambda parameters: torch.optim.AdamW(parameters, fused=True)}
    step = plan_step(built, tokens, device="cuda", **{**optimizer, **options})
    return estimate_step(step, device=device), read_step(step.ranks)


# Case → model, its sizes, the shape of its token ids, options of the plan, and the device.
CASES = {
    "one GPU": ("gpt2", {"vocab_size": 50304, "layers": 4}, (16, 1024), {"mesh": {"dp": 1}}, "H100"),
    "llama": ("llama3_8b", {"layers": 4}, (2, 4096), {"mesh": {"dp": 1}}, "H100"),
    "fsdp": ("llama3_8b", {"layers": 6}, (2, 4096), {"mesh": {"fsdp": 8}}, "H100"),
    "ddp": ("gpt2", {"vocab_size": 50304, "layers": 6}, (16, 1024), {"mesh": {"dp": 8}}, "H100"),
    "ddp llama": ("llama3_8b", {"layers": 4}, (2, 4096), {"mesh": {"dp": 8}}, "H100"),
    "pipeline": ("llama3_8b", {"layers": 4}, (1, 4096), {"mesh": {"pp": 2}, "microbatches": 8}, "H100"),
    "tensor": (*("llama3_8b", {"layers": 4}, (2, 4096)), {"mesh": {"tp": 4}, "optimizer": torch.optim.AdamW}, "H100"),
    "a100": ("gpt2", {"vocab_size": 50304, "layers": 4}, (16, 1024), {"mesh": {"dp": 1}}, "A100"),
    "experts": ("mixtral_8x7b", {"layers": 2}, (1, 4096), {"mesh": {"dp": 1}}, "H100"),
    "recompute": (*("llama3_8b", {"layers": 4}, (2, 4096), {"mesh": {"dp": 1}, "checkpoint": "full"}, "H100"),),
    "sgd": (
        *("mpt_125m", {"layers": 4}, (8, 2048)),
        *({"mesh": {"dp": 1}, "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True)}, "H100"),
    ),
}


def work_of(case: str, *, rank: int = 0, launch: float = 6e-6) -> list[Work]:
    """Return the work of a rank's planned step in the order of its launches."""
    estimate, step = plan(case)
    timer = KernelTimer(estimate.device, estimate.efficiency)
    work = []
    first, end = 0, 0.0
    for (action, index), span in zip(step.ranks[rank], estimate.simulation.spans[rank], strict=True):
        signatures = _signatures(estimate.plans[rank], action)
        # In the pipeline the compute stream waits for another stage.
        if span.start > end + 1e-6 and action.kind in ("forward", "backward"):
            first += 1
            work += _receive(-first, span.start - end, action.kind)
        end = span.end
        for item in step.programs[index].items:
            work += _convert(item, step.programs[index].launches, signatures, timer, estimate.network, first, launch)
        first += sum(isinstance(item, PlannedCollective) for item in step.programs[index].items)
    return work


def _receive(number: int, seconds: float, phase: str) -> list[Work]:
    received = Collective(
        number=number, collective="recv", seconds=seconds, elements=4096 * 4096, group="pp", size=2, phase=phase
    )
    return [received, Wait(number)]


def _signatures(rank: RankPlan, action: Any) -> dict[tuple[Any, ...], Signature]:
    """Return (kernel, phase, module, op) → a signature of the calls that launch it."""
    recorded = rank.step.pass_of(action)
    trace = recorded.trace
    owners = [innermost(scope) for scope in trace.scopes()]
    found = {}
    for event in (trace.events or ())[recorded.begin : recorded.end]:
        if event.kind != "op":
            continue
        signature = trace.signatures[event.item]
        moved = any(storage not in event.reads for storage in event.writes) if event.writes else None
        found[kernel_of(signature, moved), event.phase, owners[event.stack], signature.packet] = signature
    return found


def _convert(item, launches, signatures, timer, network, first, launch):
    if isinstance(item, Run):
        for number in item.items:
            yield _op(launches[number], signatures, timer, launch)
    elif isinstance(item, PlannedCollective):
        call = item.call
        if call.group is None or call.group.size < 2:
            return
        yield Collective(
            number=first + item.number,
            collective=call.collective,
            seconds=time_collective(item, timer.efficiency, network),
            elements=call.payload // 2,
            group=call.group.axis or call.group.name,
            size=call.group.size,
            phase=item.phase,
            module=item.module,
            gate=None if item.gate is None else first + item.gate if item.gate >= 0 else -1_000_000,
            after=None if item.after is None else first + item.after,
        )
    elif not isinstance(item, StreamRun) and item.group is None:
        yield Wait(first + item.number)


def _op(launch: Launch, signatures: Mapping[tuple[Any, ...], Signature], timer: KernelTimer, host: float) -> Op:
    key = launch.kernel, launch.phase, launch.module, launch.op
    signature = signatures.get(key)
    name = "aten::_fused_rms_norm" if launch.op == "fused" else launch.op
    if launch.op == "fused" and launch.phase == "backward":
        name = "aten::_fused_rms_norm_backward"
    # As kernels differ from each other in a step, by up to 2 %.
    noise = 1 + 0.02 * (zlib.crc32(repr(key).encode()) % 100 - 50) / 100
    specs = () if signature is None else signature.inputs
    return Op(
        op=name,
        kernels=((name_kernel(launch), timer.seconds(launch.kernel) * noise),),
        dims=tuple(spec.shape if isinstance(spec, TensorSpec) else () for spec in specs),
        types=tuple(TYPES.get(spec.dtype, spec.dtype) if isinstance(spec, TensorSpec) else "" for spec in specs),
        phase=launch.phase,
        module=launch.module,
        launch=host,
    )


def name_kernel(launch: Launch) -> str:
    if launch.kernel.kind == "matmul":
        return PRODUCTS[launch.kernel.dtype]
    if launch.kernel.kind == "attention":
        return _ATTENTION
    if launch.kernel.kind == "attention backward":
        return _ATTENTION_BACKWARD
    name = "norm" if launch.op == "fused" else launch.op
    return next((kernel for part, kernel in _OTHERS.items() if part in name), _ELEMENTWISE)
