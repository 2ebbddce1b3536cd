"""The options of a plan, and its assumptions from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import torch
from torch import nn

from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.capture.run import Loss
from fvflops.capture.shapes.metadata import dtype_name
from fvflops.capture.training_step import OptimizerMaker, checkpointed_modules
from fvflops.formulas import FormulaTable, resolve_table
from fvflops.plan.checkpointing import Checkpoint
from fvflops.plan.memory.offload import check_offload
from fvflops.plan.memory.step_settings import (
    describe_checkpointed,
    describe_loss,
    given,
    settings_of_inputs,
    settings_of_model,
)
from fvflops.plan.parallel_axes import AXES, count_ranks, count_shares, dense_axes
from fvflops.plan.pipeline_schedules import choose_schedule, find_schedule, order_actions
from fvflops.plan.pipeline_stages import Inputs, PipelineStages
from fvflops.plan.rank_step import Action
from fvflops.plan.sharding.expert_parallel import check_expert_axes
from fvflops.plan.sharding.fully_sharded import Precision, find_precision
from fvflops.plan.sharding.optimizer_shards import find_gradient_dtype
from fvflops.plan.sharding.routing import Routing
from fvflops.text import suggest
from fvflops.trace import StopsAt

Shard = Callable[[nn.Module, Any], nn.Module | None]


# Axes over whose ranks an optimizer can be sharded; with cp, over both.
OPTIMIZER_SHARDINGS = ("dp",)


class PlanError(ValueError):
    """An invalid mesh, rank or program state for a plan."""


class LayoutOptions(TypedDict, total=False):
    """Options of a plan that `search_layouts` has too, as `plan_rank` describes them."""

    rank: Annotated[int, 0]
    shard_by: Annotated[Shard | None, None]
    sequence_parallel: Annotated[bool, False]
    microbatches: Annotated[int, 1]
    schedule: Annotated[str | None, None]
    stages_per_rank: Annotated[int | None, None]
    stage_layers: Annotated[Sequence[int] | None, None]
    split_by: Annotated[PipelineStages | None, None]
    reshard_after_forward: Annotated[bool | None, None]
    reduce_each_microbatch: Annotated[bool, True]
    precision: Annotated[str | None, None]
    loss: Annotated[Loss | None, None]
    optimizer_sharding: Annotated[str | None, None]
    gradient_dtype: Annotated[str | None, None]
    checkpoint: Annotated[Checkpoint, ()]
    routing: Annotated[Routing, None]
    offload: Annotated[Collection[str], ()]
    assume: Annotated[Mapping[str, Any] | None, None]
    table: Annotated[str | FormulaTable, "default"]


class StepPlanOptions(LayoutOptions, total=False):
    """Options of a plan besides the mesh, as `plan_rank` describes them."""

    optimizer: Annotated[OptimizerMaker | None, None]
    device: Annotated[str | torch.device | None, None]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """How a step is planned: the keywords of `plan_rank`, which describes them."""

    mesh: Mapping[str, int]
    rank: int = 0
    shard_by: Shard | None = None
    sequence_parallel: bool = False
    microbatches: int = 1
    schedule: str | None = None
    stages_per_rank: int | None = None
    stage_layers: Sequence[int] | None = None
    split_by: PipelineStages | None = None
    reshard_after_forward: bool | None = None
    reduce_each_microbatch: bool = True
    precision: str | None = None
    loss: Loss | None = None
    optimizer: OptimizerMaker | None = None
    optimizer_sharding: str | None = None
    gradient_dtype: str | None = None
    checkpoint: Checkpoint = ()
    routing: Routing = None
    offload: Collection[str] = ()
    device: str | torch.device | None = None
    assume: Mapping[str, Any] | None = None
    table: str | FormulaTable = "default"

    def size(self, axis: str) -> int:
        return self.mesh.get(axis, 1)

    @property
    def dense(self) -> dict[str, int]:
        return dense_axes(self.mesh)

    @property
    def axes(self) -> dict[str, int]:
        return {**self.dense, **self.mesh}

    @property
    def world(self) -> int:
        return count_ranks(self.mesh)

    @property
    def placement(self) -> tuple[str, int, int]:
        """The pipeline schedule, its ranks, and the stages of each rank."""
        schedule, stages_per_rank = choose_schedule(self.schedule, self.stages_per_rank)
        return schedule, self.size("pp"), stages_per_rank

    @property
    def is_pipelined(self) -> bool:
        return self.size("pp") > 1

    @property
    def is_fully_sharded(self) -> bool:
        return self.size("fsdp") > 1

    @property
    def has_sharded_optimizer(self) -> bool:
        """Whether replicas, if there are any, divide the optimizer."""
        return self.optimizer_sharding is not None and count_shares(self.mesh, "tokens") > 1

    @property
    def reshards(self) -> bool:
        """Whether FSDP2 gathers parameters again for the backward pass."""
        return not self.is_pipelined if self.reshard_after_forward is None else self.reshard_after_forward

    @property
    def dtypes(self) -> Precision | None:
        return find_precision(self.precision)

    @property
    def stops_at(self) -> StopsAt:
        """The composite ops that the convention counts as a whole."""
        return resolve_table(self.table).stops_at

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return axis → a rank's index; the last axis varies fastest.

        >>> PlanOptions(mesh={"dp": 2, "tp": 4}).coordinates(5)
        {'dp': 1, 'tp': 1}
        """
        coordinates = {}
        for axis, size in reversed(self.dense.items()):
            rank, coordinates[axis] = divmod(rank, size)
        return dict(reversed(coordinates.items()))

    def pipeline_rank(self, rank: int, index: int) -> int:
        """Return the rank at another index of the pipeline axis, with the other coordinates of `rank`."""
        axes = list(self.dense)
        if "pp" not in axes:
            return rank
        step = math.prod(self.mesh[axis] for axis in axes[axes.index("pp") + 1 :])
        return rank + (index - self.coordinates(rank)["pp"]) * step

    def check(self, inputs: Inputs) -> None:
        """Raise PlanError where there is no such rank, axis or number, or options exclude each other."""
        *_, stages_per_rank = self.placement
        find_precision(self.precision)
        self._check_optimizer()
        check_offload(self.offload)
        unknown = [axis for axis in self.mesh if axis not in AXES]
        if not self.mesh or unknown:
            hint = suggest(unknown[0], AXES) if unknown else ""
            got = ", ".join(self.axes) or "none"
            raise PlanError(f"the axes of a mesh must be among {', '.join(AXES)}; got {got}{hint}")
        for axis, size in self.axes.items():
            if size < 1:
                raise PlanError(f"axis {axis} of the mesh must have at least 1 rank; got {size}")
        if not 0 <= self.rank < self.world:
            raise PlanError(f"rank must be from 0 to {self.world - 1:,} on this mesh; got {self.rank}")
        check_expert_axes(self.mesh)
        if isinstance(self.routing, Mapping) and self.is_pipelined:
            raise PlanError("routing by names of experts is not supported with pp: pass a number for each expert")
        for name, number in (("microbatches", self.microbatches), ("stages_per_rank", stages_per_rank)):
            if number < 1:
                raise PlanError(f"{name} must be at least 1; got {number}")
        if not self.is_pipelined and (stages_per_rank > 1 or self.stage_layers is not None):
            raise PlanError(f"this mesh has no pipeline stages (got {', '.join(self.axes)}): add pp to it")
        if self.is_fully_sharded and self.device is not None and torch.device(self.device).type not in ("cpu", "cuda"):
            raise PlanError(f"FSDP2 is planned with the kernels of cpu or cuda, not of {self.device}")
        self._check_sequence(inputs)
        self._check_halves()

    def _check_halves(self) -> None:
        """Raise PlanError where torch cannot run the halves of backward passes, or leaves gradients of two dtypes."""
        dtypes, schedule = self.dtypes, self.placement[0]
        if not self.is_pipelined or not find_schedule(schedule).splits_backward:
            return
        if self.checkpoint == "selective":
            raise PlanError(
                f"schedule {schedule} with selective checkpointing is not supported: torch recomputes for one of "
                "the two halves of a backward pass only; use checkpoint full or schedule interleaved"
            )
        if self.is_fully_sharded and self.microbatches > 1 and dtypes is not None and dtypes.reduce != dtypes.compute:
            raise PlanError(
                f"schedule {schedule} with fsdp and precision {self.precision} is not supported: FSDP2 keeps "
                "gradients of two dtypes between microbatches; use precision bf16-mixed-reduce or schedule interleaved"
            )

    def _check_optimizer(self) -> None:
        """Raise PlanError where the optimizer cannot be sharded, or gradients have no buffers, as is asked for."""
        find_gradient_dtype(self.gradient_dtype)
        if (name := self.optimizer_sharding) is not None and name not in OPTIMIZER_SHARDINGS:
            hint, known = suggest(name, OPTIMIZER_SHARDINGS), ", ".join(OPTIMIZER_SHARDINGS)
            raise PlanError(f"no optimizer_sharding {name!r}{hint}: known is {known}")
        for name in ("optimizer_sharding", "gradient_dtype"):
            if getattr(self, name) is None:
                continue
            if self.is_fully_sharded:
                raise PlanError(f"FSDP2 shards the optimizer and reduces gradients itself: use {name} without fsdp")
            if self.optimizer is None:
                raise PlanError(f"{name} needs an optimizer: pass one, such as AdamW")

    def _check_sequence(self, inputs: Inputs) -> None:
        """Raise PlanError where sequence parallelism cannot divide the sequence of the token ids among the inputs."""
        ranks = self.size("tp")
        if not self.sequence_parallel or ranks == 1:
            return
        for tensor in tensors_of(inputs):
            if tensor.ndim == 2 and not tensor.is_floating_point() and tensor.shape[1] % ranks:
                length = tensor.shape[1]
                fitting = [str(number) for number in range(2, min(length, 64) + 1) if length % number == 0]
                raise PlanError(
                    f"with sequence_parallel tp={ranks} must divide the sequence of {length} tokens: "
                    f"try {', '.join(fitting) or 'another length'}"
                )

    def settings(self, model: nn.Module, inputs: Inputs) -> dict[str, Any]:
        """Return the assumptions of a plan that its Trace does not have, where they apply."""
        precision, checkpointing = self.dtypes, self.checkpoint
        if not isinstance(checkpointing, str):
            checkpointing = describe_checkpointed(checkpointed_modules(model, checkpointing))
        of_model = settings_of_model(model, None if precision is None else precision.compute)
        weights = of_model["weights"] if precision is None else dtype_name(precision.parameters)
        reduction = weights if precision is None or not self.is_fully_sharded else dtype_name(precision.reduce)
        accumulated = find_gradient_dtype(self.gradient_dtype)
        reduction = reduction if accumulated is None else dtype_name(accumulated)
        schedule, _, stages_per_rank = self.placement
        reduces_each = self.is_fully_sharded and self.microbatches > 1 and not self.is_pipelined
        return given(
            mesh=self.axes,
            **settings_of_inputs(inputs),
            microbatches=self.microbatches,
            **{**of_model, "weights": weights},
            gradient_reduction=reduction if count_shares(self.mesh, "tokens") > 1 else None,
            checkpointing=checkpointing,
            schedule=schedule if self.is_pipelined else None,
            stages_per_rank=stages_per_rank if self.is_pipelined else None,
            stage_layers=None if self.stage_layers is None else list(self.stage_layers),
            reshard_after_forward=self.reshards if self.is_fully_sharded else None,
            reduce_each_microbatch=self.reduce_each_microbatch if reduces_each else None,
            optimizer_sharding=self.optimizer_sharding if self.has_sharded_optimizer else None,
            gradient_accumulation=None if accumulated is None else dtype_name(accumulated),
            sequence_parallel=self.sequence_parallel if self.size("tp") > 1 else None,
            routing=self.routing,
            loss="sum of the first output" if self.loss is None else describe_loss(self.loss),
        )


def order_step(options: PlanOptions, *, has_tied: bool = False) -> list[tuple[Action, ...]]:
    """Return the order of actions of each pipeline rank; `has_tied`: the first and last stage share parameters.

    >>> for action in order_step(PlanOptions(mesh={"dp": 2}, optimizer=torch.optim.SGD))[0]:
    ...     print(action)
    Action(kind='forward', microbatch=0)
    Action(kind='backward', microbatch=0)
    Action(kind='allreduce')
    Action(kind='optimizer', stage=-1)
    """
    schedule, ranks, stages_per_rank = options.placement
    if options.is_pipelined:
        orders = order_actions(schedule, ranks, options.microbatches, stages_per_rank)
    else:
        passes = [Action(kind, 0, index) for index in range(options.microbatches) for kind in ("forward", "backward")]
        orders = [(*passes, Action("reduce"))]
    last = [] if options.optimizer is None else [Action("optimizer", -1)]
    adapted = []
    for order in orders:
        # Ranks with one of the two stages that share parameters sum the gradients of these.
        ends = {0, ranks * stages_per_rank - 1} & {action.stage for action in order} if has_tied else set()
        tied = [Action("tied_allreduce", stage) for stage in ends] if len(ends) == 1 else []
        adapted.append((*_adapt_order(options, order), *tied, *last))
    return adapted


def _adapt_order(options: PlanOptions, order: Sequence[Action]) -> Iterator[Action]:
    """Yield the actions that a rank does: FSDP2 gathers parameters, and so does a sharded optimizer, once a step."""
    is_replicated = count_shares(options.mesh, "tokens") > 1
    is_sharded = options.has_sharded_optimizer
    reduced: set[int] = set()
    started: set[int] = set()
    stages = list(dict.fromkeys(action.stage for action in order if action.kind == "forward")) if is_sharded else []
    for action in order:
        if action.kind == "forward" and stages and action.stage not in started:
            # The parameters of the next stage are gathered during the first forward pass of this one.
            begin = len(started) + bool(started)
            started.add(action.stage)
            for stage in stages[begin : len(started) + 1]:
                yield Action("all_gather", stage)
        if action.kind in ("unshard", "reshard"):
            if options.is_fully_sharded and action.stage not in reduced:  # reducing has resharded
                yield action
        elif action.kind != "reduce":
            yield action
        else:
            reduced.add(action.stage)
            if options.is_fully_sharded and options.is_pipelined:
                yield action
            elif is_replicated and not options.is_fully_sharded:
                yield action._replace(kind="reduce_scatter" if is_sharded else "allreduce")
