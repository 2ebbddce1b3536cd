"""Plan a rank or a whole pipeline, and find changes that lower a rank's peak memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fvflops.capture.training_step import OptimizerMaker
from fvflops.formulas import resolve_table
from fvflops.plan.checkpointing import find_checkpointed
from fvflops.plan.memory.memory_report import MemorySavings
from fvflops.plan.memory.memory_savings import PredictedStep, find_savings
from fvflops.plan.plan_options import PlanOptions, StepPlanOptions
from fvflops.plan.rank_plan import RankPlan, StepPlan, plan_ranks
from fvflops.text import Unpack, explaining_arguments


@explaining_arguments
def plan_rank(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mapping[str, int],
    **options: Unpack[StepPlanOptions],
) -> RankPlan:
    """Return one rank's work in a training step, by shape execution without weights.

    `mesh` is axis → size, outermost first; ranks along the last axis are adjacent. In torch's fake process group,
    torch's own DTensor and FSDP2 decide what each rank computes and sends; `derived` describes the estimates. The axes:

        dp      replicas, as DistributedDataParallel makes them (estimated); with fsdp, hybrid sharding
        fsdp    FSDP2 of each member of the model's outermost module lists, and of the root
        tp      tensor parallelism: zoo and transformers models by a known plan, others by `shard_by`, a function of
                (model, DeviceMesh of tp); `sequence_parallel` shards the sequence between the layers too
        cp      context parallelism: each rank has a part of the sequence, and attention gathers keys and values
        pp      pipeline stages, of models with a known split; their sends and receives are estimated
        ep      expert parallelism: experts of zoo and transformers mixtures are divided among ranks of fsdp (or dp), cp
                and tp, whose number does not change, and get tokens by all-to-all; FSDP2 shards each among the rest
        etp     with ep, tensor parallelism of each expert: 1, or the size of tp

    `args` and `kwargs` are the inputs of one rank, with cp its part of the sequence, and of one of the `microbatches`,
    whose gradients are accumulated; a tensor is the only argument. The other arguments:

        schedule, stages_per_rank   the pipeline's, of `SCHEDULES`: 1f1b, or interleaved with several stages
        stage_layers                number of layers of each pipeline stage: equal
        split_by                    PipelineStages, how a model is split: as known for zoo and transformers models
        reshard_after_forward       whether FSDP2 gathers parameters again for the backward pass (ZeRO-3) or keeps them
                                    (ZeRO-2): only without pp, as torchtitan
        reduce_each_microbatch      whether FSDP2 reduces gradients in each backward pass or, as always with pp, once
        precision                   data types, of `PRECISIONS`: the model's
        loss                        function of the model's result: the sum of its first tensor with a gradient
        optimizer                   creates the optimizer from the rank's parameters: no optimizer step
        optimizer_sharding          "dp": replicas divide the optimizer's state and master weights (ZeRO-1), as in
                                    Megatron-Core: buffers of gradients are reduce-scattered after the last microbatch,
                                    and parameters gathered before the first. By default each replica updates all
        gradient_dtype              data type of buffers in which gradients are accumulated and then reduced, of
                                    `GRADIENT_DTYPES`, with optimizer_sharding or master weights: the parameters'
        checkpoint                  of `POLICIES` ("full", "every 2", "selective"), or as in TrainingStepAnalysis: none
        offload                     parts on the host, of OFFLOADS in memory/offload.py: none
        routing                     tokens of each expert of a known mixture: a number for each, a row of numbers for
                                    each rank of ep, or a mapping from names of mixtures' experts to these: all equal
        device, assume              kind of device whose kernels are shown, and assumed values, as for `record_call`
        table                       convention of `flops`, of which a plan does not decompose the composite ops

    A program with an initialised process group, an unknown axis and a rank out of range raise PlanError, a model that
    cannot be split ShardingError, a schedule that does not fit ScheduleError. The model is not changed.

    >>> import torch
    >>> from fvflops.zoo import build
    >>> tokens = torch.ones(1, 16, dtype=torch.int64)
    >>> plan = plan_rank(build("llama_tiny", device="meta"), tokens, mesh={"dp": 512, "tp": 2})
    >>> plan.parameters, {axis: volume.payload for axis, volume in plan.communication().by_axis().items()}
    (62784, {'tp': 57344, 'dp': 251136})
    >>> dict(plan.memory().at_peak().by_kind)["parameter"]
    251136
    """
    return plan_ranks(model, args, kwargs, PlanOptions(mesh=mesh, **options))[0]


@explaining_arguments
def plan_step(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mapping[str, int],
    **options: Unpack[StepPlanOptions],
) -> StepPlan:
    """Return the work of `rank` and of all others along the pipeline axis, whose stages differ.

    Arguments and errors are as for `plan_rank`. Ranks with equal stages are recorded once. Ranks with other coordinates
    do the same as one of these, except for parts of uneven size.

    >>> import torch
    >>> from fvflops.zoo import build
    >>> tokens = torch.ones(1, 16, dtype=torch.int64)
    >>> step = plan_step(build("llama_tiny", device="meta"), tokens, mesh={"pp": 2, "dp": 4}, microbatches=2)
    >>> [(plan.rank, len(plan.step.actions)) for plan in step.ranks]
    [(0, 5), (4, 5)]
    """
    return StepPlan(plan_ranks(model, args, kwargs, PlanOptions(mesh=mesh, **options), whole_pipeline=True))


@explaining_arguments
def plan_savings(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mapping[str, int],
    first_step: bool = False,
    **options: Unpack[StepPlanOptions],
) -> MemorySavings:
    """Return changes that lower the peak memory of a rank, and the FLOPs that they cost it, as `memory_savings` does.

    Arguments and errors are as for `plan_rank`, and `first_step` is as for `RankPlan.memory`.

    >>> import torch
    >>> from fvflops.zoo import build
    >>> tokens = torch.ones(8, 128, dtype=torch.int64)
    >>> best = plan_savings(build("llama_tiny", device="meta"), (tokens,), mesh={"tp": 2}).changes[0]
    >>> best.change, best.name, best.modules
    ('checkpoint', 'Block', ('layers.0', 'layers.1'))
    """
    return savings_of_rank(model, args, kwargs, PlanOptions(mesh=mesh, **options), first_step=first_step)


def savings_of_rank(
    model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None, options: PlanOptions, *, first_step: bool
) -> MemorySavings:
    """Return changes that lower the peak memory of the rank of a plan with some options, as `plan_savings`."""
    table, precision = resolve_table(options.table), options.dtypes

    def predict(
        model: nn.Module = model,
        inputs: Any = args,
        kwargs: Mapping[str, Any] | None = kwargs,
        optimizer: OptimizerMaker | Sequence[OptimizerMaker] | None = options.optimizer,
        autocast: Any = ...,
        **changes: Any,
    ) -> PredictedStep:
        maker: Any = next(iter(optimizer), None) if isinstance(optimizer, (list, tuple)) else optimizer
        if autocast is not ...:
            changes["precision"] = None if autocast is None else "bf16-mixed"
        (plan,) = plan_ranks(model, inputs, kwargs, replace(options, optimizer=maker, table=table, **changes))
        return PredictedStep(plan.memory(first_step=first_step), plan.flops(table).total())

    return find_savings(
        predict,
        model,
        (args, dict(kwargs or {})),
        optimizers=() if options.optimizer is None else (options.optimizer,),
        checkpointed=find_checkpointed(model, options.checkpoint),
        in_autocast=precision is not None and not precision.is_uniform,
        assume=options.assume,
        table=table.name,
    )
