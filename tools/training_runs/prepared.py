"""Plans of measured training runs, as programs that can be simulated again and again."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.checkpoint import set_checkpoint_early_stop

from fvflops.plan.added_optimizers import MasterWeights
from fvflops.plan.plan_options import PlanOptions, order_step
from fvflops.plan.plans import plan_step
from fvflops.plan.rank_step import Action
from fvflops.plan.step_time.pass_program import Collective, Item
from fvflops.plan.step_time.step_program import StepProgram, read_step
from fvflops.trace.process_group import ProcessGroupSpec
from fvflops.zoo import llama, megatron_gpt
from training_runs.rows import PARTS, TrainingRun

# Dtypes of parameters without FSDP; FSDP's own are in float32.
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16, "amp_bf16": torch.float32}
_CHECKPOINTS: Mapping[str, Any] = {"none": (), "attention": (megatron_gpt.CoreAttention,)}


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A measured run with its simulated program; `host_waits` is as for `simulate`."""

    run: TrainingRun
    step: StepProgram
    host_waits: bool


def is_planned(run: TrainingRun) -> bool:
    """Return whether a run has a time and can be planned: its batch is known, and no float8 linears are divided."""
    return (run.seconds or math.inf) < math.inf and not (run.precision == "fp8" and "tp" in run.mesh)


def prepare(run: TrainingRun, known: dict[Hashable, StepProgram]) -> PreparedRun:
    """Plan a run: its model, mesh, microbatches, checkpointing and optimizer, in shape execution.

    Runs that differ in their number of replicas and microbatches only share their recording, in `known`.
    """
    stages = run.mesh.get("pp", 1)
    key = key_of(run)
    if key not in known:
        known[key] = _plan(_recorded(run))
    step = known[key]
    options = PlanOptions(
        mesh=dict(run.mesh),
        microbatches=run.microbatches or 1,
        stages_per_rank=run.virtual_stages,
        optimizer=torch.optim.AdamW,
        optimizer_sharding="dp" if run.sharded_optimizer else None,
    )
    has_tied = any(action.kind == "tied_allreduce" for actions in step.ranks for action, _ in actions)
    orders = order_step(options, has_tied=has_tied)
    tp = run.mesh.get("tp", 1)
    apart = run.gpus // stages  # ranks of two stages
    step = with_orders(step, orders).with_groups(
        {
            **_replica_groups(run),
            **({"pp": ProcessGroupSpec("", 2, "pp", 0, apart * (stages - 1))} if stages > 1 else {}),
        },
        {stage: stage % stages * apart for stage in range(stages * run.virtual_stages)},
    )
    is_megatron = isinstance(run.config, megatron_gpt.MegatronGPTConfig)
    if is_megatron and stages > 1 and tp > 1:
        step = replace(step, scattered=ProcessGroupSpec("", tp, "tp", 0, 1))
    # Megatron's timers of each pass synchronise with the device.
    return PreparedRun(run, step, is_megatron)


def _recorded(run: TrainingRun) -> TrainingRun:
    """Return the run that is planned instead: with three microbatches, or as many as stages, and with few replicas."""
    # FSDP2's order of gathering in a pipeline depends on the number of microbatches.
    in_pipeline = {"fsdp", "pp"} <= run.mesh.keys()
    microbatches = (run.microbatches or 1) if in_pipeline else max(3, run.mesh.get("pp", 1))
    return replace(
        run,
        microbatches=microbatches,
        # A rank's share of a sharded optimizer depends on their number.
        mesh={axis: size if run.sharded_optimizer or axis != "dp" else 2 for axis, size in run.mesh.items()},
    )


def key_of(run: TrainingRun) -> Hashable:
    """Return the key of runs that share a plan."""
    recorded = _recorded(run)
    return (*(getattr(recorded, name) for name in _KEYS), tuple(recorded.mesh.items()))


_KEYS = (
    *("publisher", "compiled", "config", "sequence", "micro_batch", "microbatches"),
    *("checkpointing", "reshards", "precision", "reduced_in", "virtual_stages"),
    *("sequence_parallel", "sharded_optimizer", "all_reduced_in", "stage_layers", "recomputes_all"),
)


def _replica_groups(run: TrainingRun) -> dict[str, ProcessGroupSpec]:
    """Return the groups that contain all replicas, by axis: of dp, and with cp of both."""
    inner = [axis for axis in ("fsdp", "cp", "tp") if axis in run.mesh]
    stride = math.prod(run.mesh[axis] for axis in inner)
    dp, cp, tp = (run.mesh.get(axis, 1) for axis in ("dp", "cp", "tp"))
    return {"dp": ProcessGroupSpec("", dp, "dp", 0, stride), "dp+cp": ProcessGroupSpec("", dp * cp, "dp+cp", 0, tp)}


def _stage_layers(run: TrainingRun) -> list[int] | None:
    """Return the layers of each stage where they are not equal.

    Llama-3-405B has two fewer than stages: its first stage has the embedding alone, its last the head, as
    arXiv:2407.21783 says in section 3.3.2. Others are divided as evenly as they can be.
    """
    if run.stage_layers is not None:
        return list(run.stage_layers)
    stages, layers = run.mesh.get("pp", 1) * run.virtual_stages, run.config.layers
    if layers + 2 == stages:
        return [0, *[1] * layers, 0]
    each, more = divmod(layers, stages)
    return None if not more else [each + (stage < more) for stage in range(stages)]


def _plan(run: TrainingRun) -> StepProgram:
    model = _with_float8(run.build_model()) if run.precision == "fp8" else run.build_model()
    model = model.to(torch.float32 if "fsdp" in run.mesh else _DTYPES[run.precision])
    tokens = torch.ones(run.micro_batch or 1, run.sequence // run.mesh.get("cp", 1), dtype=torch.int64)
    with set_checkpoint_early_stop(not run.recomputes_all):
        plan = plan_step(
            model,
            (tokens,) if type(run.config) is llama.LlamaConfig else (tokens, tokens),
            mesh=dict(run.mesh),
            microbatches=run.microbatches or 1,
            stage_layers=_stage_layers(run),
            sequence_parallel=run.sequence_parallel,
            checkpoint=_CHECKPOINTS.get(run.checkpointing, run.checkpointing),
            optimizer=_optimizer(run),
            device="cuda",
            **_options(run),
        )
    # torch.compile makes one kernel of the ops between products.
    parts = PARTS[type(run.config)]
    fused = [*parts.fused, *([parts.block] if run.compiled else [])]
    names = [f"{item.__module__}.{item.__qualname__}" for item in fused]
    # By default Megatron-LM and DeepSpeed reduce gradients after the last backward pass, NeMo beside it, in buckets of
    # 40 million numbers.
    step = read_step(plan.ranks, fused=names, bucket_cap_mb=160 if run.publisher == "NVIDIA" else 0)
    return step if run.all_reduced_in is None else _all_reduce(step, run)


def _all_reduce(step: StepProgram, run: TrainingRun) -> StepProgram:
    """Return the step of a sharded optimizer with an all-reduce of gradients in place of their reduce-scatter."""
    widening = getattr(torch, str(run.all_reduced_in)).itemsize // getattr(torch, run.reduced_in).itemsize

    def change(item: Item) -> Item:
        if not isinstance(item, Collective) or item.call.collective != "reduce_scatter" or item.phase != "backward":
            return item
        if item.call.group is None or item.call.group.axis not in ("dp", "dp+cp"):
            return item
        payload = item.call.payload * widening
        return item._replace(call=item.call._replace(collective="all_reduce", payload=payload, wire=None))

    programs = (replace(program, items=tuple(map(change, program.items))) for program in step.programs)
    return replace(step, programs=tuple(programs))


def _optimizer(run: TrainingRun) -> Callable[..., torch.optim.Optimizer]:
    """Return the factory of the optimizer; vTrain's runs seem to be measured while the loss scale is too large."""
    adam = partial(torch.optim.AdamW, fused=True)
    if "fsdp" in run.mesh or run.precision == "amp_bf16":
        return adam
    return SkippedStep if run.publisher == "vTrain" else partial(MasterWeights, make=adam)


def _with_float8(model: nn.Module) -> nn.Module:
    """Return the model with float8 linears in its layers."""
    from torchao.float8 import convert_to_float8_training

    return convert_to_float8_training(model, module_filter_fn=lambda module, name: re.search(r"\.\d+\.", name))


def _options(run: TrainingRun) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if run.virtual_stages > 1:
        options = {"schedule": "interleaved", "stages_per_rank": run.virtual_stages}
    if run.sharded_optimizer and run.replicas > 1:
        options |= {"optimizer_sharding": "dp", "gradient_dtype": "fp32" if run.reduced_in == "float32" else "bf16"}
    elif "fsdp" in run.mesh:
        precision = "bf16-mixed" if run.reduced_in == "float32" else "bf16-mixed-reduce"
        options |= {"precision": precision, "reshard_after_forward": run.reshards}
    return options


class SkippedStep(Optimizer):
    """Copies gradients to float32 and unscales them; since some have overflowed, nothing else is done.

    Megatron starts with a loss scale of 2^32, halves it after each overflow, and updates no parameter until then.
    Source: Float16OptimizerWithFloat16Params.step and DynamicGradScaler of Megatron-LM.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__(list(parameters), {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        copies = []
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                copies.append(torch.empty_like(gradient, dtype=torch.float32))
                copies[-1].grad = gradient.to(torch.float32)
        # One kernel, which multiplies by a scalar tensor, as unscaling does.
        torch.nn.utils.clip_grads_with_norm_(copies, 1.0, torch.ones((), device=copies[0].device), foreach=True)


def with_orders(step: StepProgram, orders: Sequence[Sequence[Action]]) -> StepProgram:
    """Return a step with other orders of its actions, such as for more microbatches.

    The first and the last microbatch of an order have the programs of the first and the last here, the others the
    program of one between: this step needs three microbatches if the orders have more, and one if they have one.
    """
    ranks = []
    for known, order in zip(step.ranks, orders, strict=True):
        programs: dict[tuple[str, int], list[int]] = {}
        for action, index in sorted(known, key=lambda item: item[0].microbatch):
            programs.setdefault((action.kind, action.stage), []).append(index)
        last = max(action.microbatch for action in order)
        ranks.append(tuple((action, _of_microbatch(programs, action, last)) for action in order))
    return replace(step, ranks=tuple(ranks))


def _of_microbatch(programs: Mapping[tuple[str, int], Sequence[int]], action: Action, last: int) -> int:
    found = programs[action.kind, action.stage]
    if action.microbatch <= 0:
        return found[0]
    return found[-1] if action.microbatch == last else found[len(found) // 2]
