"""Plan one rank of a distributed training step on a single machine."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.analysis.model_run import bind_inputs
from fvflops.capture.model.model_index import has_packed
from fvflops.capture.model.packed_layers import elements_per_item
from fvflops.capture.model.packed_parameters import stored_bytes
from fvflops.capture.recorder.tensor_specs import describe, tensors_of
from fvflops.capture.restore.interrupts import deferred
from fvflops.capture.restore.torch_state import model_runs
from fvflops.capture.run import Loss, choose_device
from fvflops.capture.training_step import OptimizerMaker
from fvflops.formulas import FormulaTable, resolve_table
from fvflops.plan.action_recording import Recipe, StageModule, record_actions
from fvflops.plan.added_optimizers import local_part
from fvflops.plan.checkpointing import Checkpoint, make_contexts
from fvflops.plan.communication import Communication, read_communication
from fvflops.plan.estimated_calls import (
    allreduce,
    average_gradients,
    broadcast_buffers,
    local_spec,
    send_recv,
    total_of,
)
from fvflops.plan.layout import AXES as AXES
from fvflops.plan.layout import (
    Layout,
    Shard,
    check_layout,
    check_sequence,
    join_axes,
    make_device_mesh,
    order_step,
    torch_warnings_ignored,
)
from fvflops.plan.layout import PlanError as PlanError
from fvflops.plan.layout import fake_process_group as fake_process_group
from fvflops.plan.memory.estimated_memory import EstimatedMemory, estimate_memory
from fvflops.plan.memory.memory_report import MemoryPrediction, printed
from fvflops.plan.memory.offload import check_offload, describe_offload, offloaded
from fvflops.plan.memory.step_memory import ActionMemory, StepMemory, walk_step
from fvflops.plan.memory.step_settings import settings_of_trace
from fvflops.plan.memory.storage_lifetimes import MemoryTimeline, read_memory
from fvflops.plan.pipeline_schedules import choose_schedule, rank_of_stage
from fvflops.plan.pipeline_stages import Inputs, PipelineStages
from fvflops.plan.plan_settings import settings_of_plan
from fvflops.plan.rank_model import RankModel
from fvflops.plan.rank_step import Action, Call, Gradient, RankStep, share_equal
from fvflops.plan.sharding.expert_parallel import (
    EXPERT_AXES,
    dense_axes,
    describe_routing,
)
from fvflops.plan.sharding.fully_sharded import find_precision
from fvflops.plan.sharding.fully_sharded import unsharded_class as unsharded_class
from fvflops.plan.sharding.routing import Routing
from fvflops.plan.trace_changes import shift_groups
from fvflops.reports.display import Displayed
from fvflops.text import short_repr
from fvflops.trace import Trace, Value
from fvflops.trace.process_group import ProcessGroupSpec
from fvflops.units import format_parameters


@dataclass(frozen=True, slots=True, repr=False)
class RankPlan(Displayed):
    """One rank's work in one training step.

    `mesh` is axis → size, outermost first, `coordinates` axis → the rank's index. `parameters` and `parameter_bytes`
    are those of the rank's shard, `model_parameters` those of the full model. `trace` is the step; `derived` describes
    its calls that are estimated, not run, and `left_out` the work of a real step that is not included. `recorded` is
    the part that was run, equal microbatches once, and `estimated_memory` describes what `memory` adds to it. `step` is
    the order of what the rank does, `table` the convention that `flops` counts by, `settings` what the plan assumes,
    `offload` what is on the host.
    """

    _report = "fvflops.plan.plan_report:plan_report"

    mesh: Mapping[str, int]
    rank: int
    coordinates: Mapping[str, int]
    parameters: int
    parameter_bytes: int
    model_parameters: int
    trace: Trace
    recorded: Trace
    estimated_memory: EstimatedMemory
    step: RankStep
    derived: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    table: str | FormulaTable = "default"
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    offload: tuple[str, ...] = ()

    def __repr__(self) -> str:
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        parameters = f"{format_parameters(self.parameters)} of {format_parameters(self.model_parameters)} parameters"
        return short_repr(self, f"rank {self.rank} on {mesh}", parameters)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return math.prod(dense_axes(self.mesh).values())

    def flops(self, table: str | FormulaTable | None = None) -> FlopCountAnalysis:
        """Return the FLOPs of the step by module, operator and phase, in a convention or that of the plan."""
        return FlopCountAnalysis.from_trace(self.trace, table=self.table if table is None else table, warn=False)

    def communication(self) -> Communication:
        """Return the communication of the rank in the step."""
        return read_communication(self.trace)

    def memory(
        self,
        *,
        device: str | None = None,
        granularity: int | None = None,
        first_step: bool = False,
        workspaces: bool = True,
    ) -> MemoryPrediction:
        """Return the memory of the rank at each event of its step; the arguments are those of `predict_memory`.

        The step's actions follow each other in the order of `step`: each microbatch in flight holds the activations
        that its forward pass left. The events of an action that repeats an earlier one, with as much memory allocated,
        are there once. Included are gathered parameters and buffers of collectives, and by estimate what
        `estimated_memory` names; on the CPU gloo's copies are workspaces. Not included: the process groups' own
        buffers, such as NCCL's, FSDP2's CPUOffloadPolicy, and what `left_out` names.
        """
        recording = self.recorded_memory(
            device=device, granularity=granularity, first_step=first_step, workspaces=workspaces
        )
        return self.memory_of_step(recording, first_step=first_step)

    def memory_by_action(self, *, device: str | None = None, first_step: bool = False) -> tuple[ActionMemory, ...]:
        """Return the bytes allocated before, at the peak of and after each action of `step`, in order.

        The arguments are those of `memory`.

        >>> from fvflops.zoo import build
        >>> tokens = torch.ones(1, 16, dtype=torch.int64)
        >>> plan = plan_rank(build("llama_tiny", device="meta"), tokens, mesh={"pp": 2}, microbatches=2)
        >>> peaks = [item.peak for item in plan.memory_by_action()]
        >>> len(peaks), max(peaks) == plan.memory().peak
        (4, True)
        """
        return self._walk(self.recorded_memory(device=device, first_step=first_step)).actions

    def recorded_memory(self, **options: Any) -> MemoryTimeline:
        """Return the memory of `recorded`, without what a step adds to it; the arguments are those of `memory`."""
        return read_memory(self.recorded, run_end=self.step.recorded_events, **options)

    def memory_of_step(self, recording: MemoryTimeline, *, first_step: bool = False) -> MemoryPrediction:
        """Return the memory of the step, by replaying a timeline that ranks with equal stages share."""
        settings = {**self.settings, "step": "the first" if first_step else "any but the first"}
        return printed(replace(self._walk(recording).timeline, settings=settings))

    def _walk(self, recording: MemoryTimeline) -> StepMemory:
        return walk_step(offloaded(self.estimated_memory.added_to(recording), self.offload), self.step)

    def describe_offload(self) -> list[str]:
        """Return how much is on the host, and what a plan does not include of that."""
        return list(describe_offload(self.recorded_memory(), self.offload)) if self.offload else []


@dataclass(frozen=True, slots=True, repr=False)
class StepPlan(Displayed):
    """A training step of a pipeline: the plans of its ranks, in the order of the pipeline axis."""

    _report = "fvflops.plan.plan_report:step_report"

    ranks: tuple[RankPlan, ...]

    def __repr__(self) -> str:
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.ranks[0].mesh.items())
        return short_repr(self, mesh, f"{len(self.ranks):,} pipeline ranks")


def plan_rank(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mapping[str, int],
    rank: int = 0,
    shard_by: Shard | None = None,
    sequence_parallel: bool = False,
    microbatches: int = 1,
    schedule: str | None = None,
    stages_per_rank: int | None = None,
    stage_layers: Sequence[int] | None = None,
    split_by: PipelineStages | None = None,
    reshard_after_forward: bool | None = None,
    reduce_each_microbatch: bool = True,
    precision: str | None = None,
    loss: Loss | None = None,
    optimizer: OptimizerMaker | None = None,
    checkpoint: Checkpoint = (),
    routing: Routing = None,
    offload: Collection[str] = (),
    device: str | torch.device | None = None,
    assume: Mapping[str, Any] | None = None,
    table: str | FormulaTable = "default",
) -> RankPlan:
    """Return one rank's work in a training step, by shape execution without weights.

    `mesh` is axis → size, outermost first; ranks along the last axis are adjacent. The rank runs in torch's fake
    process group, so that torch's own DTensor and FSDP2 decide what each rank computes and sends; `derived` describes
    what is estimated instead. The axes:

        dp      replicas, as DistributedDataParallel makes them (estimated); with fsdp, hybrid sharding
        fsdp    FSDP2 of each member of the model's outermost module lists, and of the root
        tp      tensor parallelism: zoo and transformers models by a known plan, others by `shard_by`, a function of
                (model, DeviceMesh of tp); `sequence_parallel` shards the sequence between the layers too
        cp      context parallelism: each rank has a part of the sequence, and attention gathers keys and values
        pp      pipeline stages, of models with a known split; their sends and receives are estimated
        ep      expert parallelism: the experts of a mixture, of the zoo or transformers, are divided among ranks of
                fsdp (or dp), cp and tp, whose number does not change, and get their tokens by all-to-all; each
                expert's parameters are sharded by FSDP2 among the ranks that remain
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
        checkpoint                  a policy of `POLICIES` of checkpointing.py ("full", "every 2", "selective"), or
                                    modules whose activations are recomputed, as in TrainingStepAnalysis: none
        offload                     what is on the host, of OFFLOADS in memory/offload.py: nothing
        routing                     tokens that each expert of a known mixture gets: a number for each expert, a row of
                                    numbers for each rank of ep, or a mapping from the name of each mixture's experts
                                    to these: all get as many
        device, assume              kind of device whose kernels are shown, and what `record_call` assumes
        table                       convention of `flops`, of which a plan does not decompose the composite ops

    A program with an initialised process group, an unknown axis and a rank out of range raise PlanError, a model that
    cannot be split ShardingError, a schedule that does not fit ScheduleError. The model is not changed.

    >>> from fvflops.zoo import build
    >>> tokens = torch.ones(1, 16, dtype=torch.int64)
    >>> plan = plan_rank(build("llama_tiny", device="meta"), tokens, mesh={"dp": 512, "tp": 2})
    >>> plan.parameters, {axis: volume.payload for axis, volume in plan.communication().by_axis().items()}
    (62784, {'tp': 57344, 'dp': 251136})
    >>> dict(plan.memory().at_peak().by_kind)["parameter"]
    251136
    """
    (plan,) = _plan(
        model,
        bind_inputs(model, args, kwargs),
        mesh=mesh,
        rank=rank,
        shard_by=shard_by,
        sequence_parallel=sequence_parallel,
        microbatches=microbatches,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        stage_layers=stage_layers,
        split_by=split_by,
        reshard_after_forward=reshard_after_forward,
        reduce_each_microbatch=reduce_each_microbatch,
        precision=precision,
        loss=loss,
        optimizer=optimizer,
        checkpoint=checkpoint,
        routing=routing,
        offload=offload,
        device=device,
        assume=assume,
        table=table,
    )
    return plan


def plan_step(
    model: nn.Module,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mapping[str, int],
    **options: Any,
) -> StepPlan:
    """Return the work of `rank` and of all others along the pipeline axis, whose stages differ.

    The arguments and errors are those of `plan_rank`. Ranks with equal stages are recorded once. Ranks with other
    coordinates do the same as one of these, but for parts of uneven size.

    >>> from fvflops.zoo import build
    >>> tokens = torch.ones(1, 16, dtype=torch.int64)
    >>> step = plan_step(build("llama_tiny", device="meta"), tokens, mesh={"pp": 2, "dp": 4}, microbatches=2)
    >>> [(plan.rank, len(plan.step.actions)) for plan in step.ranks]
    [(0, 5), (4, 5)]
    """
    return StepPlan(tuple(_plan(model, bind_inputs(model, args, kwargs), mesh=mesh, whole_pipeline=True, **options)))


def _plan(
    model: nn.Module,
    inputs: Inputs,
    *,
    mesh: Mapping[str, int],
    rank: int = 0,
    shard_by: Shard | None = None,
    sequence_parallel: bool = False,
    microbatches: int = 1,
    schedule: str | None = None,
    stages_per_rank: int | None = None,
    stage_layers: Sequence[int] | None = None,
    split_by: PipelineStages | None = None,
    reshard_after_forward: bool | None = None,
    reduce_each_microbatch: bool = True,
    precision: str | None = None,
    loss: Loss | None = None,
    optimizer: OptimizerMaker | None = None,
    checkpoint: Checkpoint = (),
    routing: Routing = None,
    offload: Collection[str] = (),
    device: str | torch.device | None = None,
    assume: Mapping[str, Any] | None = None,
    table: str | FormulaTable = "default",
    whole_pipeline: bool = False,
) -> list[RankPlan]:
    """Return the plan of a rank, or of all ranks along the pipeline axis."""
    layout = Layout(
        dense_axes(mesh),
        shard_by,
        sequence_parallel,
        *choose_schedule(schedule, stages_per_rank),
        stage_layers,
        split_by,
        mesh.get("pp", 1) == 1 if reshard_after_forward is None else reshard_after_forward,
        find_precision(precision),
        {axis: size for axis, size in mesh.items() if axis in EXPERT_AXES},
        routing,
    )
    check_offload(offload)
    check_layout(layout, rank, microbatches, device)
    check_sequence(layout, inputs)
    recipe = Recipe(
        stops_at=resolve_table(table).stops_at,
        pipelined=layout.size("pp") > 1,
        reduce_each_microbatch=reduce_each_microbatch,
        microbatches=microbatches,
        optimizer=optimizer,
        checkpoint=checkpoint,
        device=device,
        assume=assume,
    )
    rank_model = RankModel(model, inputs, layout, loss or sum_of_result)
    orders = order_step(layout, microbatches, has_optimizer=optimizer is not None, has_tied=bool(rank_model.tied))
    settings = settings_of_plan(model, inputs, layout, recipe, loss) | ({"offload": list(offload)} if offload else {})
    ranks = [layout.pipeline_rank(rank, index) for index in range(layout.size("pp"))] if whole_pipeline else [rank]
    alike: dict[Any, list[int]] = {}
    for item in ranks:
        alike.setdefault(rank_model.describe_stages(item, checkpoint), []).append(item)
    plans: list[RankPlan] = []
    for equal in alike.values():
        arguments = rank_model, layout, recipe, orders, equal
        # Where equal layers do not run equally, all of them are recorded.
        of_equal = _plan_equal_ranks(*arguments, shortened=True) or _plan_equal_ranks(*arguments, shortened=False)
        plans += (
            replace(
                plan,
                table=table,
                offload=tuple(offload),
                settings={**settings, **settings_of_trace(plan.trace, settings)},
            )
            for plan in of_equal
        )
    return sorted(plans, key=lambda plan: plan.rank)


def _plan_equal_ranks(
    rank_model: RankModel,
    layout: Layout,
    recipe: Recipe,
    orders: Sequence[tuple[Action, ...]],
    ranks: Sequence[int],
    *,
    shortened: bool,
) -> list[RankPlan]:
    """Return the plans of ranks with equal stages, of which the first is run.

    If `shortened`, few of its equal layers run; [] if these did not run equally.
    """
    with deferred(), torch_warnings_ignored(), fake_process_group(layout.world, ranks[0]), model_runs():
        device_mesh = make_device_mesh(layout.mesh)
        device = choose_device(recipe.device, ()).type
        hidden = rank_model.find_hidden(device_mesh, device)
        stages = rank_model.make_stages(ranks[0], device_mesh, hidden, recipe, shortened=shortened)
        around_forward = rank_model.around_forward(device_mesh, device)
        recipe = replace(
            recipe,
            around_forward=around_forward,
            checkpoint_options={"context_fn": make_contexts(recipe.checkpoint, around_forward)},
        )
        tensors = [parameter for stage in stages for parameter in stage.parameters()]
        local = [local_part(parameter) for parameter in tensors]
        is_unpacked = rank_model.is_packed and not any(has_packed(stage.module) for stage in stages)
        packed = {key: share for stage in stages for key, share in elements_per_item(stage.module).items()}
        own_orders = [orders[layout.coordinates(rank).get("pp", 0)] for rank in ranks]
        numbers = [rank_model.stages_of(rank) for rank in ranks]
        recording = record_actions(stages, list(map(_number_locally, own_orders, numbers)), recipe)
        if recording is None:
            return []
        recorded = recording.trace
        added, gradients, derived = _estimate_reductions(recorded, stages, layout, device_mesh)
        tied = _estimate_tied(rank_model, layout, recorded, stages, ranks[0])
        routed = [describe_routing(layout.routing)] if any(stage.experts is not None for stage in stages) else []
        group = describe(device_mesh.get_group("pp")) if layout.size("pp") > 1 else None
    plans = []
    for rank, order, stage_numbers, own_passes in zip(ranks, own_orders, numbers, recording.passes, strict=True):
        trace = shift_groups(recorded, rank - ranks[0])
        coordinates = layout.coordinates(rank)
        by_action = {
            action: replace(
                own_passes[local],
                trace=trace,
                added=added.get(local) or tied.get(local, ()),
                gradients=gradients.get(local, ()),
            )
            for action, local in zip(order, _number_locally(order, stage_numbers), strict=True)
        }
        step = RankStep(
            coordinates,
            order,
            share_equal(by_action),
            rank_model.links(rank, hidden),
            layout.schedule if recipe.pipelined else "",
        )
        transfers = (
            [] if group is None else send_recv(step.links.values(), coordinates["pp"], group, recipe.microbatches)
        )
        plans.append(
            RankPlan(
                mesh=layout.axes,
                rank=rank,
                coordinates=coordinates,
                parameters=int(
                    sum(part.numel() * packed.get(id(tensor), 1) for tensor, part in zip(tensors, local, strict=True))
                ),
                parameter_bytes=sum(map(stored_bytes, local)),
                model_parameters=rank_model.parameters,
                trace=total_of(trace, step, transfers),
                recorded=trace,
                estimated_memory=estimate_memory(step),
                step=step,
                derived=(*([_TRANSFERS] if transfers else []), *derived, *([_TIED] if tied else []), *routed),
                left_out=(
                    *(() if recipe.optimizer is not None else _list_excluded(layout, rank_model.has_router_gradients)),
                    *([_PACKING] if is_unpacked else []),
                ),
            )
        )
    return plans


_TRANSFERS = "pipeline sends and receives over pp, once per microbatch"
_PACKING = "packed weights, which shards of tensors do not keep: they are planned in the dtype that the model uses"
_TIED = "parameters that the first and the last stage share: a copy in each, and an all-reduce of their gradients"


def _number_locally(order: Sequence[Action], numbers: Sequence[int]) -> list[Action]:
    """Return the actions with stages numbered among those of the rank."""
    return [item if item.stage < 0 else item._replace(stage=numbers.index(item.stage)) for item in order]


def _estimate_tied(
    rank_model: RankModel, layout: Layout, recorded: Trace, stages: Sequence[StageModule], rank: int
) -> dict[Action, tuple[Call, ...]]:
    """Return the all-reduces of the gradients that the first and the last stage share, as in Megatron-LM."""
    numbers = rank_model.stages_of(rank)
    ends = {0, layout.stages - 1} & set(numbers)
    if len(ends) != 1 or not rank_model.tied:
        return {}
    (stage,) = ends
    index = numbers.index(stage)
    names = [names[stage != 0] for names in rank_model.tied]
    specs = [local_spec(stages[index].module.get_parameter(name)) for name in names]
    pair = (rank_of_stage(layout.schedule, end, layout.size("pp")) for end in (0, layout.stages - 1))
    first, last = sorted(layout.pipeline_rank(rank, end) for end in pair)
    group = ProcessGroupSpec("first and last stage", 2, "pp", first, last - first).symbol()
    return {Action("tied_allreduce", index): tuple(allreduce(spec, recorded.info.device, group) for spec in specs)}


def _estimate_reductions(
    recorded: Trace, stages: Sequence[StageModule], layout: Layout, device_mesh: Any
) -> tuple[dict[Action, tuple[Call, ...]], dict[Action, tuple[Gradient, ...]], tuple[str, ...]]:
    """Return the calls of DistributedDataParallel for each stage, the gradients that it averages, and a description."""
    replicas = None if layout.is_fully_sharded else join_axes(device_mesh, layout.mesh, "dp", "cp")
    if replicas is None:
        return {}, {}, ()
    group, device = describe(replicas.get_group()), recorded.info.device
    added, gradients = {}, {}
    for index, stage in enumerate(stages):
        action = Action("allreduce", index)
        prefix = f"stage{index}." if len(stages) > 1 else ""
        gradients[action] = tuple(_list_averaged(stage, prefix, device, group, replicas.size()))
        added[action] = (
            *broadcast_buffers(stage.buffers(), device, group),
            *average_gradients(gradients[action]),
        )
    description = (
        f"DDP gradient averaging over {replicas.mesh_dim_names[0]} (all-reduce of each trainable parameter once, "
        "regardless of bucketing)"
    )
    return added, gradients, (description,)


def _list_averaged(stage: StageModule, prefix: str, device: str, group: Value, replicas: int) -> Iterator[Gradient]:
    """Yield the gradients that replicas of a stage average: dense ones, then those of experts."""
    experts = stage.experts
    divided = set() if experts is None else experts.divided_parameters
    of_experts = (
        (describe(experts.mesh.get_group("edp")), experts.replicas)
        if experts is not None and experts.replicas > 1
        else None
    )
    for name, parameter in stage.named_parameters():
        averaged = of_experts if id(parameter) in divided else (group, replicas)
        if parameter.requires_grad and averaged is not None:
            yield Gradient(f"{prefix}{name}", replace(local_spec(parameter), device=device), *averaged)


def sum_of_result(result: Any) -> torch.Tensor:
    """Return the sum of the first differentiable tensor in a model's result, as its loss."""
    for tensor in tensors_of(result):
        if tensor.requires_grad:
            return tensor.sum()
    raise PlanError(f"the model returns {type(result).__name__} without a tensor that requires a gradient: pass loss=")


def _list_excluded(layout: Layout, has_router_gradients: bool) -> tuple[str, ...]:
    step = "the optimizer step"
    reduced = [
        name for name, partial in (("norms", layout.sequence_parallel), ("routers", has_router_gradients)) if partial
    ]
    if reduced and layout.size("tp") > 1 and not layout.is_fully_sharded:
        step += f", in which DTensor reduces the gradients of the {' and '.join(reduced)} over tp"
    return (step,)
