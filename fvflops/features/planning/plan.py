"""Plan one rank of a distributed training step on a single machine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fvflops.analysis.model_counts import FlopCountAnalysis
from fvflops.capture.model.meta_copy import copy_to_meta
from fvflops.capture.recorder.signature import describe, tensors_of
from fvflops.capture.restore.interrupts import deferred
from fvflops.capture.restore.torch_state import model_runs
from fvflops.capture.run import Loss
from fvflops.capture.training_step import Checkpointed, OptimizerMaker, record_step
from fvflops.features.communication.compute import read_communication
from fvflops.features.communication.model import Communication
from fvflops.features.memory.compute import read_memory
from fvflops.features.memory.report import MemoryPrediction, printed
from fvflops.features.planning.context_parallel import ShardedSequence
from fvflops.features.planning.estimated_calls import (
    Call,
    StageLinks,
    add_calls,
    gradient_accumulation,
    gradient_allreduce,
    local_spec,
    repeat,
    send_recv,
    tied_gradient_allreduce,
)
from fvflops.features.planning.estimated_memory import EstimatedMemory
from fvflops.features.planning.pipeline import (
    Inputs,
    find_hidden_state,
    find_stages,
    find_tied,
    make_stage_inputs,
    split_stage,
)
from fvflops.features.planning.sharding import find_sharding, shard
from fvflops.formulas import FormulaTable, resolve_table
from fvflops.reports.display import Displayed
from fvflops.text import short_repr
from fvflops.torch_internals import default_process_group
from fvflops.trace import Symbol, Trace
from fvflops.trace.process_group import ProcessGroupSpec
from fvflops.units import format_parameters

# Axes of a mesh: pipeline parallelism, replicas (DistributedDataParallel, or with fsdp hybrid sharding), fully sharded
# data parallelism (FSDP2), context parallelism, tensor parallelism.
AXES = ("pp", "dp", "fsdp", "cp", "tp")
Shard = Callable[[nn.Module, Any], nn.Module | None]


class PlanError(ValueError):
    """An invalid mesh, rank or program state for a plan."""


@dataclass(frozen=True, slots=True, repr=False)
class RankPlan(Displayed):
    """One rank's work in one training step.

    `mesh` is axis → size, outermost first, `coordinates` axis → the rank's index. `parameters` and `parameter_bytes`
    are those of the rank's shard, `model_parameters` those of the full model. `trace` is the step; `derived` describes
    its calls that are estimated, not run, and `left_out` the work of a real step that is not included. `recorded` is
    the part that was run, a step of one microbatch, and `estimated_memory` describes what `memory` adds to it.
    """

    _report = "fvflops.features.planning.report:plan_report"

    mesh: Mapping[str, int]
    rank: int
    coordinates: Mapping[str, int]
    parameters: int
    parameter_bytes: int
    model_parameters: int
    trace: Trace
    recorded: Trace
    estimated_memory: EstimatedMemory
    derived: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def __repr__(self) -> str:
        mesh = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        parameters = f"{format_parameters(self.parameters)} of {format_parameters(self.model_parameters)} parameters"
        return short_repr(self, f"rank {self.rank} on {mesh}", parameters)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return math.prod(self.mesh.values())

    def flops(self, table: str | FormulaTable = "default") -> FlopCountAnalysis:
        """Return the FLOPs of the step in a convention, by module, operator and phase."""
        return FlopCountAnalysis.from_trace(self.trace, table=table, warn=False)

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
        """Return the memory of the rank at each event of `recorded`; the arguments are those of `predict_memory`.

        Included are gathered parameters and buffers of collectives, and by estimate what `estimated_memory` names; on
        the CPU gloo's copies are workspaces. Not included: the process groups' own buffers, such as NCCL's, FSDP2's
        CPUOffloadPolicy, and what `left_out` names.
        """
        timeline = read_memory(
            self.recorded, device=device, granularity=granularity, first_step=first_step, workspaces=workspaces
        )
        return printed(self.estimated_memory.added_to(timeline))


def plan_rank(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: Mapping[str, int],
    rank: int = 0,
    shard_by: Shard | None = None,
    sequence_parallel: bool = False,
    microbatches: int = 1,
    loss: Loss | None = None,
    optimizer: OptimizerMaker | None = None,
    checkpoint: Checkpointed = (),
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

    `args` and `kwargs` are the inputs of one rank, with cp its part of the sequence, and of one of the `microbatches`,
    whose gradients are accumulated. `loss` is a function of the model's result, by default the sum of its first tensor
    that requires a gradient; `optimizer` creates the optimizer from the rank's parameters, by default there is no
    optimizer step; `checkpoint` selects the modules whose activations are recomputed, as in TrainingStepAnalysis;
    `device` is the kind of device whose kernels are shown, `assume` is that of `record_call`, and composite ops that
    `table` counts are not decomposed.

    A program with an initialised process group, an unknown axis and a rank out of range raise PlanError, a model that
    cannot be split ShardingError. The model is not changed.

    >>> from fvflops.zoo import build
    >>> tokens = torch.ones(1, 16, dtype=torch.int64)
    >>> plan = plan_rank(build("llama_tiny", device="meta"), (tokens,), mesh={"dp": 512, "tp": 2})
    >>> plan.parameters, {axis: volume.payload for axis, volume in plan.communication().by_axis().items()}
    (62784, {'tp': 57344, 'dp': 251136})
    >>> dict(plan.memory().at_peak().by_kind)["parameter"]
    251136
    """
    _check(mesh, rank, microbatches, sequence_parallel, device)
    coordinates = _coordinates(mesh, rank)
    inputs: Inputs = args, dict(kwargs or {})
    rank_model, links = copy_to_meta(model), None
    if mesh.get("pp", 1) > 1:
        rank_model, inputs, links = _make_stage(model, inputs, coordinates["pp"], mesh["pp"])
        loss = _first_element if links.sends else loss
    with deferred(), fake_process_group(math.prod(mesh.values()), rank), model_runs():
        device_mesh = _make_mesh(mesh)
        rank_model = _split(rank_model, device_mesh, mesh, shard_by, sequence_parallel)
        specs = [local_spec(parameter) for parameter in rank_model.parameters()]
        gather_keys = partial(ShardedSequence, device_mesh.get_group("cp")) if mesh.get("cp", 1) > 1 else nullcontext
        with gather_keys():
            recorded = record_step(
                rank_model,
                *inputs,
                loss=loss or sum_of_result,
                optimizers=() if optimizer is None else [optimizer],
                checkpointed=checkpoint,
                # A recomputation runs in autograd, outside this context.
                checkpoint_options={"context_fn": lambda: (nullcontext(), gather_keys())},
                device=device,
                assume=assume,
                stops_at=resolve_table(table).stops_at,
            )
        trace, descriptions = _add_estimated_calls(recorded, rank_model, device_mesh, mesh, links, microbatches)
        if links is not None and links.receives != links.sends:  # the first or the last stage
            names = [pair[links.receives] for pair in find_tied(model, find_stages(model)).items()]
            parameters = [rank_model.get_parameter(name) for name in names]
            trace = add_calls(trace, tied_gradient_allreduce(trace, parameters, _end_stages(mesh, rank)))
            descriptions += tuple(
                f"all-reduce over pp of the gradient of {name}, of which the first and the last stage have a copy each"
                for name in names
            )
    return RankPlan(
        mesh=dict(mesh),
        rank=rank,
        coordinates=coordinates,
        parameters=sum(spec.numel for spec in specs),
        parameter_bytes=sum(spec.nbytes for spec in specs),
        model_parameters=sum(parameter.numel() for parameter in model.parameters()),
        trace=trace,
        recorded=recorded,
        estimated_memory=_estimate_memory(mesh, coordinates, microbatches),
        derived=descriptions,
        left_out=() if optimizer is not None else _list_excluded(mesh, sequence_parallel),
    )


@contextmanager
def fake_process_group(size: int, rank: int) -> Iterator[None]:
    """Run as one rank of a fake process group, in which nothing is sent."""
    if not dist.is_available():
        raise PlanError("this torch is built without torch.distributed, which a plan needs")
    if dist.is_initialized():
        raise PlanError(
            "this program has a process group, and a plan needs a fake one: "
            "plan in another program, or after torch.distributed.destroy_process_group()"
        )
    from fvflops.torch_internals import FakeStore

    _clear_sharding_cache()
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        _clear_sharding_cache()


def _clear_sharding_cache() -> None:
    """Clear DTensor's sharding cache: its entries name process groups, which are destroyed with the fake one."""
    from fvflops.torch_internals import clear_sharding_cache

    clear_sharding_cache()


def sum_of_result(result: Any) -> torch.Tensor:
    """Return the sum of the first differentiable tensor in a model's result, as its loss."""
    for tensor in tensors_of(result):
        if tensor.requires_grad:
            return tensor.sum()
    raise PlanError(f"the model returns {type(result).__name__} without a tensor that requires a gradient: pass loss=")


def _first_element(result: Any) -> torch.Tensor:
    """Return one element of a result, a loss without arithmetic."""
    return next(tensor for tensor in tensors_of(result) if tensor.requires_grad).flatten()[0]


def _estimate_memory(mesh: Mapping[str, int], coordinates: Mapping[str, int], microbatches: int) -> EstimatedMemory:
    replicas = mesh.get("dp", 1) * mesh.get("cp", 1)
    return EstimatedMemory(
        buckets=replicas > 1 and mesh.get("fsdp", 1) == 1,
        in_flight=min(microbatches, mesh.get("pp", 1) - coordinates.get("pp", 0)),
        accumulates=microbatches > 1,
    )


def _list_excluded(mesh: Mapping[str, int], sequence_parallel: bool) -> tuple[str, ...]:
    step = "the optimizer step"
    if sequence_parallel and mesh.get("tp", 1) > 1 and mesh.get("fsdp", 1) == 1:
        step += ", in which DTensor reduces the gradients of the norms over tp"
    return (step,)


def _check(
    mesh: Mapping[str, int],
    rank: int,
    microbatches: int,
    sequence_parallel: bool,
    device: str | torch.device | None,
) -> None:
    if not mesh or any(axis not in AXES for axis in mesh):
        raise PlanError(f"the axes of a mesh must be among {', '.join(AXES)}; got {', '.join(mesh) or 'none'}")
    for axis, size in mesh.items():
        if size < 1:
            raise PlanError(f"axis {axis} of the mesh must have at least 1 rank; got {size}")
    world = math.prod(mesh.values())
    if not 0 <= rank < world:
        raise PlanError(f"rank must be from 0 to {world - 1:,} on this mesh; got {rank}")
    if microbatches < 1:
        raise PlanError(f"microbatches must be at least 1; got {microbatches}")
    if mesh.get("fsdp", 1) > 1 and (microbatches > 1 or mesh.get("pp", 1) > 1):
        raise PlanError(
            "with microbatches or stages the schedule decides when FSDP2 gathers and reduces: plan fsdp without them"
        )
    if mesh.get("fsdp", 1) > 1 and device is not None and torch.device(device).type != "cpu":
        raise PlanError(f"FSDP2 is planned with the CPU's kernels, not with those of {device}: omit the device")
    if sequence_parallel and mesh.get("pp", 1) > 1:
        raise PlanError("pipeline stages send whole sequences: plan pp without sequence_parallel")


def _coordinates(mesh: Mapping[str, int], rank: int) -> dict[str, int]:
    """Return axis → the rank's index; the last axis varies fastest."""
    coordinates = {}
    for axis, size in reversed(list(mesh.items())):
        rank, coordinates[axis] = divmod(rank, size)
    return {axis: coordinates[axis] for axis in mesh}


def _end_stages(mesh: Mapping[str, int], rank: int) -> Symbol:
    """Return the group of a rank's first and last pipeline stage, the other coordinates being equal."""
    axes = list(mesh)
    step = math.prod(mesh[axis] for axis in axes[axes.index("pp") + 1 :])
    first = rank - _coordinates(mesh, rank)["pp"] * step
    return ProcessGroupSpec("first and last stage", 2, "pp", first, step * (mesh["pp"] - 1)).symbol()


def _make_mesh(mesh: Mapping[str, int]) -> Any:
    parallel = [axis for axis, size in mesh.items() if size > 1]
    if len(parallel) == 1:
        _name_default_group(parallel[0])
    return dist.device_mesh.init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))


def _name_default_group(axis: str) -> None:
    """Name the group of all ranks after the only axis that needs it; torch reports none for it."""
    default_process_group()._set_group_desc(f"mesh_{axis}")


def _add_estimated_calls(
    trace: Trace,
    model: nn.Module,
    device_mesh: Any,
    mesh: Mapping[str, int],
    links: StageLinks | None,
    microbatches: int,
) -> tuple[Trace, tuple[str, ...]]:
    """Return a Trace with the estimated calls of a rank's step, and their descriptions."""
    added: list[Call] = []
    descriptions = []
    if links is not None:
        added += send_recv(links, describe(device_mesh.get_group("pp")), microbatches)
        descriptions.append("pipeline sends and receives over pp, once per microbatch")
    if microbatches > 1:
        trace = repeat(trace, microbatches)
        added += gradient_accumulation(trace, model, microbatches)
        descriptions.append(f"{microbatches} microbatches with gradient accumulation, of which one was run")
    replicas = _join(device_mesh, mesh, "dp", "cp")
    if replicas is not None and mesh.get("fsdp", 1) == 1:
        added += gradient_allreduce(trace, model, describe(replicas.get_group()), replicas.size())
        descriptions.append(
            f"DDP gradient averaging over {replicas.mesh_dim_names[0]} (all-reduce of each trainable parameter once, "
            "regardless of bucketing)"
        )
    return add_calls(trace, added), tuple(descriptions)


def _join(device_mesh: Any, mesh: Mapping[str, int], *axes: str) -> Any:
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


def _make_stage(model: nn.Module, inputs: Inputs, stage: int, count: int) -> tuple[nn.Module, Inputs, StageLinks]:
    """Return one of `count` pipeline stages of a model, with its inputs and its links to other stages."""
    stages = find_stages(model)
    stage_model, first_block = copy_to_meta(model), copy_to_meta(model)
    split_stage(stage_model, stages, stage, count)
    blocks: Any = first_block.get_submodule(stages.blocks)
    split_stage(first_block, stages, 0, len(blocks))
    hidden = find_hidden_state(first_block, inputs)
    if stage > 0:
        inputs = make_stage_inputs(model, inputs, stages, hidden)
    return stage_model, inputs, StageLinks(hidden, stage > 0, stage < count - 1)


def _split(
    model: nn.Module, device_mesh: Any, mesh: Mapping[str, int], shard_by: Shard | None, sequence_parallel: bool
) -> nn.Module:
    if shard_by is not None:
        model = shard_by(model, device_mesh["tp"]) or model
    elif mesh.get("tp", 1) > 1:
        shard(model, device_mesh["tp"], find_sharding(model, sequence=sequence_parallel))
    if mesh.get("fsdp", 1) > 1:
        from torch.distributed.fsdp import fully_shard

        fsdp_mesh = _join(device_mesh, mesh, "fsdp", "cp")
        if mesh.get("dp", 1) > 1:
            fsdp_mesh = device_mesh["dp", fsdp_mesh.mesh_dim_names[0]]
        for block in _blocks(model):
            fully_shard(block, mesh=fsdp_mesh)
        fully_shard(model, mesh=fsdp_mesh)
        _materialise(model)
    return model


def unsharded_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module before `fully_shard`, which replaces it by a class of FSDPModule and that one."""
    bases: tuple[type[nn.Module], ...] = type(module).__bases__
    return bases[-1] if bases[0].__name__ == "FSDPModule" else type(module)


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the members of a model's outermost module lists, the units of FSDP2."""
    blocks: list[nn.Module] = []
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            blocks += child
        else:
            blocks += _blocks(child)
    return list(dict.fromkeys(blocks))


def _materialise(model: nn.Module) -> None:
    """Give a model's parameters uninitialised memory: FSDP2 rejects the meta device.

    The memory is never written to, so the system never allocates its pages.
    """
    model._apply(
        lambda tensor: (torch.empty_like if isinstance(tensor, nn.Parameter) else _zeros)(tensor, device="cpu")
    )


def _zeros(buffer: torch.Tensor, device: str) -> torch.Tensor:
    return torch.zeros_like(buffer, device=device) if buffer.device.type == "meta" else buffer
