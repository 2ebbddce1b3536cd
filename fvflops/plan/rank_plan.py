"""Plan one rank of a distributed training step on a single machine."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.analysis.model_run import bind_inputs
from fvflops.capture.errors.model_errors import describe_module
from fvflops.capture.model.model_index import has_packed
from fvflops.capture.model.packed_layers import elements_per_item, stored_bytes
from fvflops.capture.model.read_module_tree import check_initialised
from fvflops.capture.recorder.tensor_specs import describe
from fvflops.capture.restore.interrupts import deferred
from fvflops.capture.restore.torch_state import model_runs
from fvflops.formulas import FormulaTable
from fvflops.garbage_collector import gc_paused
from fvflops.plan.action_recording import StageModule, record_actions
from fvflops.plan.added_optimizers import local_part
from fvflops.plan.communication import Communication, read_communication
from fvflops.plan.fake_process_group import fake_process_group, make_device_mesh, torch_warnings_ignored
from fvflops.plan.memory.memory_report import MemoryPrediction, as_prediction
from fvflops.plan.memory.offload import describe_offload, offloaded
from fvflops.plan.memory.step_memory import ActionMemory, add_buckets, describe_estimated, walk_step
from fvflops.plan.memory.step_settings import settings_of_trace
from fvflops.plan.memory.storage_lifetimes import MemoryTimeline, read_memory
from fvflops.plan.parallel_axes import count_ranks
from fvflops.plan.pipeline_schedules import rank_of_stage
from fvflops.plan.plan_options import PlanOptions, order_step
from fvflops.plan.rank_model import RankModel, ShortStage
from fvflops.plan.rank_step import Action, Pass, RankStep, share_equal
from fvflops.plan.sharding.expert_parallel import describe_routing, has_partial_router_gradients
from fvflops.plan.sharding.optimizer_shards import find_gradient_dtype
from fvflops.plan.sharding.replicas import find_replicas, with_dtype
from fvflops.plan.trace_changes import GroupShift, allreduce, local_spec, send_recv, total_of
from fvflops.reports.display import Displayed
from fvflops.text import short_repr
from fvflops.trace import Trace, Value
from fvflops.trace.process_group import ProcessGroupSpec
from fvflops.units import format_parameters


@dataclass(frozen=True, slots=True, repr=False)
class RankPlan(Displayed):
    """One rank's work in one training step.

    `mesh` is axis → size, outermost first. `parameters` and `parameter_bytes` describe the rank's shard,
    `model_parameters` the full model. `trace` is the step; `derived` describes its calls that are estimated, not run,
    and `left_out` the work of a real step that is not included. `recorded` is the part that was run, with one of
    equal microbatches. `step` is the order of the rank's actions, `table` the convention that `flops` counts by,
    `settings` the assumptions, `offload` the parts on the host.
    """

    _report = "fvflops.plan.plan_report:plan_report"

    mesh: Mapping[str, int]
    rank: int
    parameters: int
    parameter_bytes: int
    model_parameters: int
    trace: Trace
    recorded: Trace
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
        return count_ranks(self.mesh)

    @property
    def coordinates(self) -> Mapping[str, int]:
        """Axis → the rank's index."""
        return self.step.coordinates

    @property
    def estimated_memory(self) -> tuple[str, ...]:
        """Parts that `memory` adds to the recording, one line for each."""
        return tuple(describe_estimated(self.step, has_buffers="gradient_accumulation" in self.settings))

    def flops(self, table: str | FormulaTable | None = None) -> FlopCountAnalysis:
        """Return the FLOPs of the step by module, operator and phase, in a convention, by default the plan's."""
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
        """Return the memory of the rank at each event of its step; the arguments are as for `predict_memory`.

        The step's actions follow each other in the order of `step`: each microbatch in flight holds the activations
        that its forward pass left. An action that repeats an earlier one with equal memory allocated adds no events.
        Included are gathered parameters and buffers of collectives, and the parts that `estimated_memory` names; on the
        CPU gloo's copies are workspaces. Not included: the process groups' own buffers, such as NCCL's, FSDP2's
        CPUOffloadPolicy, and the parts in `left_out`.
        """
        recording = self.recorded_memory(
            device=device, granularity=granularity, first_step=first_step, workspaces=workspaces
        )
        return self.memory_of_step(recording, first_step=first_step)

    def memory_by_action(self, *, device: str | None = None, first_step: bool = False) -> tuple[ActionMemory, ...]:
        """Return the bytes allocated before, at the peak of and after each action of `step`, in order.

        The arguments are as for `memory`.

        >>> import torch
        >>> from fvflops import plan_rank
        >>> from fvflops.zoo import build
        >>> tokens = torch.ones(1, 16, dtype=torch.int64)
        >>> plan = plan_rank(build("llama_tiny", device="meta"), tokens, mesh={"pp": 2}, microbatches=2)
        >>> peaks = [item.peak for item in plan.memory_by_action()]
        >>> len(peaks), max(peaks) == plan.memory().peak
        (4, True)
        """
        return self._walk(self.recorded_memory(device=device, first_step=first_step))[1]

    def recorded_memory(self, **options: Any) -> MemoryTimeline:
        """Return the memory of `recorded` alone; the arguments are as for `memory`."""
        return read_memory(self.recorded, run_end=self.step.recorded_events, **options)

    def memory_of_step(self, recording: MemoryTimeline, *, first_step: bool = False) -> MemoryPrediction:
        """Return the memory of the step, by replaying a timeline that ranks with equal stages share."""
        settings = {**self.settings, "step": "the first" if first_step else "any but the first"}
        return as_prediction(self._walk(recording)[0], settings)

    def _walk(self, recording: MemoryTimeline) -> tuple[MemoryTimeline, tuple[ActionMemory, ...]]:
        return walk_step(offloaded(add_buckets(recording, self.step), self.offload), self.step)

    def describe_offload(self) -> list[str]:
        """Return how much is on the host, and how much of it a plan does not include."""
        return list(describe_offload(self.recorded_memory(), self.offload)) if self.offload else []


@dataclass(frozen=True, slots=True, repr=False)
class StepPlan(Displayed):
    """A training step of a pipeline: the plans of its ranks, in the order of the pipeline axis."""

    _report = "fvflops.plan.plan_report:step_report"

    ranks: tuple[RankPlan, ...]

    def __repr__(self) -> str:
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.ranks[0].mesh.items())
        return short_repr(self, mesh, f"{len(self.ranks):,} pipeline ranks")


@gc_paused()
def plan_ranks(
    model: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any] | None,
    options: PlanOptions,
    *,
    whole_pipeline: bool = False,
    cache: dict[Hashable, ShortStage] | None = None,
) -> tuple[RankPlan, ...]:
    """Return the plan of a rank, or of all ranks along the pipeline axis; `cache` is as for `RankModel`."""
    inputs = bind_inputs(model, args, kwargs)
    options.check(inputs)
    check_initialised(model)
    rank_model = RankModel(model, inputs, options, cache)
    orders = order_step(options, has_tied=bool(rank_model.tied))
    settings = options.settings(model, inputs)
    settings |= {"offload": list(options.offload)} if options.offload else {}
    indices = range(options.size("pp")) if whole_pipeline else [options.coordinates(options.rank).get("pp", 0)]
    alike: dict[Any, list[int]] = {}
    for rank in (options.pipeline_rank(options.rank, index) for index in indices):
        alike.setdefault(rank_model.describe_stages(rank), []).append(rank)
    first = options.pipeline_rank(options.rank, indices[0])
    plans: list[RankPlan] = []
    # All stages run as one rank, for which torch finds the shardings of each op once.
    with deferred(), torch_warnings_ignored(), fake_process_group(options.world, first), model_runs():
        device_mesh = make_device_mesh(options.dense)
        group = describe(device_mesh.get_group("pp")) if options.is_pipelined else None
        for ranks in alike.values():
            own_orders = [orders[options.coordinates(rank).get("pp", 0)] for rank in ranks]
            # Where equal layers run differently, all layers are recorded.
            recorded = _record(rank_model, device_mesh, own_orders, ranks, shortened=True)
            recorded = recorded or _record(rank_model, device_mesh, own_orders, ranks, shortened=False)
            assert recorded is not None
            passes, shared = recorded
            shared["settings"] = {**settings, **settings_of_trace(shared["recorded"], settings)}
            for rank, order, own_passes in zip(ranks, own_orders, passes, strict=True):
                plans.append(_make_plan(rank_model, order, own_passes, shared, rank, first, group))
    return tuple(sorted(plans, key=lambda plan: plan.rank))


def _make_plan(
    rank_model: RankModel,
    order: tuple[Action, ...],
    passes: Mapping[Action, Pass],
    shared: Mapping[str, Any],
    rank: int,
    first: int,
    group: Value,
) -> RankPlan:
    """Return the plan of a rank from passes that were recorded as the rank `first`; `group` is the pipeline's."""
    options, shift = rank_model.options, GroupShift(rank - first)
    trace = shift.trace(shared["recorded"])
    by_action = {
        action: shift.estimated(replace(passes[local], trace=trace))
        for action, local in zip(order, _number_locally(order, rank_model.stages_of(rank)), strict=True)
    }
    schedule = options.placement[0] if options.is_pipelined else ""
    coordinates, links = options.coordinates(rank), rank_model.links(rank)
    step = RankStep(coordinates, order, share_equal(by_action), links, schedule)
    transfers = send_recv(links.values(), coordinates["pp"], group, options.microbatches) if schedule else []
    derived = (*([_TRANSFERS] if transfers else []), *shared["derived"])
    total = total_of(trace, step, transfers)
    return RankPlan(rank=rank, trace=total, step=step, **{**shared, "recorded": trace, "derived": derived})


def _record(
    rank_model: RankModel,
    device_mesh: Any,
    orders: Sequence[tuple[Action, ...]],
    ranks: Sequence[int],
    *,
    shortened: bool,
) -> tuple[list[dict[Action, Pass]], dict[str, Any]] | None:
    """Return the passes of ranks with equal stages, and what their plans share; None if `shortened` layers differ."""
    options, numbers = rank_model.options, [rank_model.stages_of(rank) for rank in ranks]
    stages = rank_model.make_stages(ranks[0], device_mesh, shortened=shortened)
    tensors = [parameter for stage in stages for parameter in stage.parameters()]
    local = [local_part(parameter) for parameter in tensors]
    is_unpacked = has_packed(rank_model.model) and not any(has_packed(stage.module) for stage in stages)
    packed = {key: share for stage in stages for key, share in elements_per_item(stage.module).items()}
    replicas = find_replicas(stages, options, device_mesh)
    is_sharded = options.has_sharded_optimizer
    shards = replicas.shards() if replicas is not None and is_sharded else None
    local_orders = list(map(_number_locally, orders, numbers))
    try:
        recording = record_actions(stages, local_orders, options, rank_model.around_forward(device_mesh), shards)
    except RuntimeError as error:
        if options.size("tp") > 1 and error.args and describe_module(error):
            remedy = "if it runs without tp, a sharding style is missing or wrong"
            error.args = (f"{error.args[0]} (tp={options.size('tp')}: {remedy})", *error.args[1:])
        raise
    if recording is None:
        return None
    trace, recorded = recording
    estimated = _estimate_tied(trace.info.device, stages, rank_model, ranks[0])
    derived = [_TIED] if estimated else []
    if replicas is not None:
        averaged, described = replicas.estimate(trace.info.device, stages, is_sharded=is_sharded)
        estimated, derived = {**estimated, **averaged}, [*described, *derived]
    derived += [describe_routing(options.routing)] if any(stage.experts is not None for stage in stages) else []
    excluded = () if options.optimizer is not None else _list_excluded(options, rank_model.model)
    counts = (part.numel() * packed.get(id(tensor), 1) for tensor, part in zip(tensors, local, strict=True))
    passes = [{action: replace(item, **estimated.get(action, {})) for action, item in own.items()} for own in recorded]
    return passes, {
        "mesh": options.axes,
        "parameters": int(sum(counts)),
        "parameter_bytes": sum(map(stored_bytes, local)),
        "model_parameters": rank_model.parameters,
        "recorded": trace,
        "derived": derived,
        "left_out": (*excluded, *([_PACKING] if is_unpacked else [])),
        "table": options.table,
        "offload": tuple(options.offload),
    }


_TRANSFERS = "pipeline sends and receives over pp, once per microbatch"
_PACKING = "packed weights, which shards of tensors do not keep: they are planned in the dtype that the model uses"
_TIED = "parameters that the first and the last stage share: a copy in each, and an all-reduce of their gradients"


def _number_locally(order: Sequence[Action], numbers: Sequence[int]) -> list[Action]:
    return [item if item.stage < 0 else item._replace(stage=numbers.index(item.stage)) for item in order]


def _estimate_tied(
    device: str, stages: Sequence[StageModule], rank_model: RankModel, rank: int
) -> dict[Action, dict[str, Any]]:
    """Return action → its Pass's all-reduces of gradients that the first and last stage share, as in Megatron-LM."""
    options, numbers = rank_model.options, rank_model.stages_of(rank)
    schedule, ranks, stages_per_rank = options.placement
    last = ranks * stages_per_rank - 1
    ends = {0, last} & set(numbers)
    if len(ends) != 1 or not rank_model.tied:
        return {}
    (stage,) = ends
    index = numbers.index(stage)
    names = [names[stage != 0] for names in rank_model.tied]
    dtype = find_gradient_dtype(options.gradient_dtype)
    specs = [with_dtype(local_spec(stages[index].module.get_parameter(name)), dtype) for name in names]
    first, other = sorted(options.pipeline_rank(rank, rank_of_stage(schedule, end, ranks)) for end in (0, last))
    group = ProcessGroupSpec("first and last stage", 2, "pp", first, other - first).symbol()
    return {Action("tied_allreduce", index): {"added": tuple(allreduce(spec, device, group) for spec in specs)}}


def _list_excluded(options: PlanOptions, model: nn.Module) -> tuple[str, ...]:
    """Return the work of a real step that a plan without an optimizer excludes."""
    step = "the optimizer step"
    reduced = ["norms"] * options.sequence_parallel + ["routers"] * has_partial_router_gradients(model)
    if reduced and options.size("tp") > 1 and not options.is_fully_sharded:
        step += f", in which DTensor reduces the gradients of the {' and '.join(reduced)} over tp"
    return (step,)
