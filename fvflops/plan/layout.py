"""Layout of a training run: the mesh of ranks, and how a model is divided among them."""

from __future__ import annotations

import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fvflops.capture.recorder.tensor_specs import tensors_of
from fvflops.plan.pipeline_schedules import order_actions
from fvflops.plan.pipeline_stages import PipelineStages
from fvflops.plan.rank_step import Action
from fvflops.plan.sharding.expert_parallel import EXPERT_AXES, check_expert_axes
from fvflops.plan.sharding.fully_sharded import Precision
from fvflops.plan.sharding.routing import Routing
from fvflops.text import suggest
from fvflops.torch_internals import default_process_group, refusal

# Axes of a mesh: pipeline parallelism, replicas (DistributedDataParallel, or with fsdp hybrid sharding), fully sharded
# data parallelism (FSDP2), context parallelism, tensor parallelism; those of the experts regroup the same ranks.
AXES = ("pp", "dp", "fsdp", "cp", "tp", *EXPERT_AXES)
Shard = Callable[[nn.Module, Any], nn.Module | None]


class PlanError(ValueError):
    """An invalid mesh, rank or program state for a plan."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is divided among ranks; the fields are the arguments of `plan_rank`.

    `mesh` has the axes that multiply to the number of ranks, `expert_axes` ep and etp.
    """

    mesh: Mapping[str, int]
    shard_by: Shard | None = None
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    stage_layers: Sequence[int] | None = None
    split_by: PipelineStages | None = None
    reshard_after_forward: bool = True
    precision: Precision | None = None
    expert_axes: Mapping[str, int] = field(default_factory=dict)
    routing: Routing = None

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis, 1 for one that the mesh lacks."""
        return self.axes.get(axis, 1)

    @property
    def axes(self) -> dict[str, int]:
        """All axes, of the experts too."""
        return {**self.mesh, **self.expert_axes}

    @property
    def world(self) -> int:
        """The number of ranks."""
        return math.prod(self.mesh.values())

    @property
    def stages(self) -> int:
        """The number of pipeline stages."""
        return self.size("pp") * self.stages_per_rank

    @property
    def is_fully_sharded(self) -> bool:
        """Whether FSDP2 shards the parameters."""
        return self.size("fsdp") > 1

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return axis → a rank's index; the last axis varies fastest.

        >>> Layout({"dp": 2, "tp": 4}).coordinates(5)
        {'dp': 1, 'tp': 1}
        """
        coordinates = {}
        for axis, size in reversed(list(self.mesh.items())):
            rank, coordinates[axis] = divmod(rank, size)
        return {axis: coordinates[axis] for axis in self.mesh}

    def pipeline_rank(self, rank: int, stage: int) -> int:
        """Return the rank at another index of the pipeline axis, with the other coordinates of `rank`."""
        axes = list(self.mesh)
        if "pp" not in axes:
            return rank
        step = math.prod(self.mesh[axis] for axis in axes[axes.index("pp") + 1 :])
        return rank + (stage - self.coordinates(rank)["pp"]) * step


def check_layout(layout: Layout, rank: int, microbatches: int, device: str | torch.device | None) -> None:
    """Raise PlanError where a layout has no such rank, axis or number, or its parts exclude each other."""
    mesh = layout.axes
    unknown = [axis for axis in mesh if axis not in AXES]
    if not mesh or unknown:
        hint = suggest(unknown[0], AXES) if unknown else ""
        raise PlanError(f"the axes of a mesh must be among {', '.join(AXES)}; got {', '.join(mesh) or 'none'}{hint}")
    for axis, size in mesh.items():
        if size < 1:
            raise PlanError(f"axis {axis} of the mesh must have at least 1 rank; got {size}")
    if not 0 <= rank < layout.world:
        raise PlanError(f"rank must be from 0 to {layout.world - 1:,} on this mesh; got {rank}")
    check_expert_axes(mesh)
    if isinstance(layout.routing, Mapping) and layout.size("pp") > 1:
        raise PlanError("routing by names of experts is not planned with pp: pass a number for each expert")
    for name, number in (("microbatches", microbatches), ("stages_per_rank", layout.stages_per_rank)):
        if number < 1:
            raise PlanError(f"{name} must be at least 1; got {number}")
    if layout.size("pp") == 1 and (layout.stages_per_rank > 1 or layout.stage_layers is not None):
        raise PlanError(f"this mesh has no pipeline stages (got {', '.join(mesh)}): add pp to it")
    if layout.is_fully_sharded and device is not None and torch.device(device).type not in ("cpu", "cuda"):
        raise PlanError(f"FSDP2 is planned with the kernels of cpu or cuda, not with those of {device}")


def check_sequence(layout: Layout, inputs: Any) -> None:
    """Raise PlanError where sequence parallelism cannot divide the sequence of the token ids among the inputs."""
    ranks = layout.size("tp")
    if not layout.sequence_parallel or ranks == 1:
        return
    for tensor in tensors_of(inputs):
        if tensor.ndim == 2 and not tensor.is_floating_point() and tensor.shape[1] % ranks:
            length = tensor.shape[1]
            fitting = [str(number) for number in range(2, min(length, 64) + 1) if length % number == 0]
            raise PlanError(
                f"with sequence_parallel tp={ranks} must divide the sequence of {length} tokens: "
                f"try {', '.join(fitting) or 'another length'}"
            )


def order_step(
    layout: Layout, microbatches: int, *, has_optimizer: bool, has_tied: bool = False
) -> list[tuple[Action, ...]]:
    """Return the order of actions of each pipeline rank; `has_tied`: the first and last stage share parameters.

    >>> for action in order_step(Layout({"dp": 2}), 1, has_optimizer=True)[0]:
    ...     print(action)
    Action(kind='forward', microbatch=0)
    Action(kind='backward', microbatch=0)
    Action(kind='allreduce')
    Action(kind='optimizer', stage=-1)
    """
    if layout.size("pp") > 1:
        orders = order_actions(layout.schedule, layout.size("pp"), microbatches, layout.stages_per_rank)
    else:
        passes = [Action(kind, 0, index) for index in range(microbatches) for kind in ("forward", "backward")]
        orders = [(*passes, Action("reduce"))]
    ends = [
        (*(_sum_tied(layout, order) if has_tied else ()), *([Action("optimizer", -1)] if has_optimizer else ()))
        for order in orders
    ]
    return [(*_adapt_order(layout, order), *end) for order, end in zip(orders, ends, strict=True)]


def _sum_tied(layout: Layout, order: Sequence[Action]) -> list[Action]:
    """Return the actions that sum the gradients of tied parameters; none where one rank has both stages."""
    ends = {0, layout.stages - 1} & {action.stage for action in order}
    return [Action("tied_allreduce", stage) for stage in ends] if len(ends) == 1 else []


def _adapt_order(layout: Layout, order: Sequence[Action]) -> Iterator[Action]:
    """Yield the actions that a rank does in a layout: only FSDP2 gathers parameters."""
    has_replicas = layout.size("dp") * layout.size("cp") > 1
    reduced = set()
    for action in order:
        if action.kind in ("unshard", "reshard"):
            if layout.is_fully_sharded and action.stage not in reduced:  # reducing has resharded
                yield action
        elif action.kind == "reduce":
            reduced.add(action.stage)
            if layout.is_fully_sharded and layout.size("pp") > 1:
                yield action
            elif has_replicas and not layout.is_fully_sharded:
                yield action._replace(kind="allreduce")
        else:
            yield action


@contextmanager
def torch_warnings_ignored() -> Iterator[None]:
    """Ignore the warnings of torch's own modules: a plan has no values, and cannot do what they advise."""
    from fvflops.torch_internals import redistribution_logger

    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", module=r"torch\b")
        if redistribution_logger is not None:
            stack.callback(redistribution_logger.setLevel, redistribution_logger.level)
            redistribution_logger.setLevel(logging.ERROR)
        yield


@contextmanager
def fake_process_group(size: int, rank: int) -> Iterator[None]:
    """Run as one rank of a fake process group, in which nothing is sent."""
    if not dist.is_available():
        raise PlanError("this torch is built without torch.distributed, which a plan needs")
    if message := refusal("plan and sharded memory"):
        raise PlanError(message)
    if dist.is_initialized():
        raise PlanError(
            "this program has a process group, and a plan needs a fake one: "
            "plan in another program, or after torch.distributed.destroy_process_group()"
        )
    from fvflops.torch_internals import FakeStore

    _clear_sharding_cache()
    show_exception = sys.excepthook
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        sys.excepthook = show_exception  # torch's writes the rank before each line
        _clear_sharding_cache()


def _clear_sharding_cache() -> None:
    """Clear DTensor's sharding caches: their entries name process groups, which are destroyed with the fake one."""
    from fvflops.torch_internals import clear_native_shardings, find_redistribution, propagate_sharding

    propagate_sharding.cache_clear()
    find_redistribution.cache_clear()  # torch 2.10 takes the mask of a sharded embedding from an equal plan
    clear_native_shardings()


def make_device_mesh(mesh: Mapping[str, int]) -> Any:
    """Return torch's DeviceMesh, in a process group of as many ranks."""
    parallel = [axis for axis, size in mesh.items() if size > 1]
    if len(parallel) == 1:
        _name_default_group(parallel[0])
    return dist.device_mesh.init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))


def _name_default_group(axis: str) -> None:
    """Name the group of all ranks after the only axis that needs it; torch reports none for it."""
    default_process_group()._set_group_desc(f"mesh_{axis}")


def join_axes(device_mesh: Any, mesh: Mapping[str, int], *axes: str) -> Any:
    """Return some axes flattened, in the mesh's order, to a mesh of one dimension, or None if none has two ranks."""
    parallel = tuple(axis for axis, size in mesh.items() if axis in axes and size > 1)
    if not parallel:
        return None
    if len(parallel) == 1:
        return device_mesh[parallel[0]]
    name = "+".join(parallel)
    flattened = device_mesh[parallel]._flatten(name)
    if flattened.size() == math.prod(mesh.values()):
        _name_default_group(name)
    return flattened
